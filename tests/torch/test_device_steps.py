"""Steps on a simulated device: no waiting, few launches, and the values of the CPU."""

import math
from functools import cache, partial

import pytest
import torch
from torch import nn

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from stormplus.torch import PairedOptimizer
from stormplus.torch.kernels import native
from stormplus_bench.simulated_device import SimulatedDevice, device_counts, value
from stormplus_bench.train.networks import resnet34
from tests.torch.optimizers import assert_same, halves, noise, state_tensors

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(16, 8), (16,)]


def two_groups(cls):
    def make(params):
        half = len(params) // 2
        return cls([{"params": params[:half]}, {"params": params[half:], "weight_decay": 0.1}])

    return make


def with_tensor_lr(cls):
    def make(params):
        opt = cls(params)
        opt.param_groups[0]["lr"] = params[0].detach().new_tensor(0.5)
        return opt

    return make


FIRST = {"unit": "first", "lr": 0.1, "weight_decay": 0.1}
BF16_STATE = partial(Untuned, state_dtype=BF16)
CASES = {  # the optimizer, and the dtype of the parameters
    "Untuned": (Untuned, F32),
    "Untuned, unchecked": (partial(Untuned, check_finite=False), F32),
    "Untuned, weight decay, maximize": (partial(Untuned, weight_decay=0.1, maximize=True), F32),
    "Untuned, bfloat16 state": (BF16_STATE, F32),
    "Untuned, bfloat16": (Untuned, BF16),
    "Untuned, bfloat16, bfloat16 state": (BF16_STATE, BF16),
    "Untuned, float16": (Untuned, F16),
    "Untuned, two groups": (two_groups(Untuned), F32),
    "Untuned, one without gradient": (Untuned, F32),
    "Untuned, tensor lr": (with_tensor_lr(Untuned), F32),
    "Untuned, no float64": (Untuned, F32),
    "Untuned, no float64, bfloat16 state": (BF16_STATE, F32),
    "StormPlus": (StormPlus, F32),
    "StormPlus, unchecked": (partial(StormPlus, check_finite=False), F32),
    "StormPlus, L2": (partial(StormPlus, weight_decay=0.1), F32),
    "StormPlus, decoupled": (
        partial(StormPlus, weight_decay=0.1, decoupled_weight_decay=True), F32
    ),
    "StormPlus, bfloat16": (StormPlus, BF16),
    "StormPlus, tensor lr": (with_tensor_lr(StormPlus), F32),
    "StormPlus, no float64": (StormPlus, F32),
    "StormPlus, two groups": (two_groups(StormPlus), F32),
    "StormPlus, unit": (partial(StormPlus, **FIRST), F32),
    "SimplifiedStormPlus, unit": (partial(SimplifiedStormPlus, **FIRST), F32),
    "Storm, unit, decoupled": (partial(Storm, decoupled_weight_decay=True, **FIRST), F32),
    "SimplifiedStormPlus": (SimplifiedStormPlus, F32),
    "Storm": (Storm, F32),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


def most_launches(name):
    if name == "StormPlus, two groups":
        return 155
    return 200 if name.startswith("Untuned") else 120


class Training:
    """A case of the table with its parameters, on a device or on the CPU."""

    def __init__(self, name, tensors, put):
        make, self.dtype = CASES[name]
        self.put, self.without_gradient = put, "one without gradient" in name
        draw = torch.Generator().manual_seed(0)
        shapes = SHAPES * (tensors // len(SHAPES))
        start = [0.1 * torch.randn(shape, generator=draw) for shape in shapes]
        self.params = [nn.Parameter(put(x.to(self.dtype))) for x in start]
        self.opt, self.draw = make(self.params), torch.Generator().manual_seed(1)

    def evaluate(self):
        for p in self.params:
            p.grad = self.put(torch.randn(p.shape, generator=self.draw).to(self.dtype))
        if self.without_gradient:
            self.params[3].grad = None

    def steps(self, count):
        for _ in range(count):
            if isinstance(self.opt, PairedOptimizer):
                halves(self.opt, self.evaluate)
            else:
                self.evaluate()
                self.opt.step()


def device_for(name):
    if "no float64" in name:
        return SimulatedDevice("xpu", float64=False)
    return SimulatedDevice("cuda")


@cache
def on_device(name, tensors=20):
    """Return parameters and diagnostics after three steps, and the counts of the last one."""
    with device_for(name) as device:
        run = Training(name, tensors, device.put)
        run.steps(2)
        device.reset()
        run.steps(1)
        counts = device.counts
        return [value(p.detach()) for p in run.params], run.opt.diagnostics(), counts


@each_case
def test_a_step_waits_for_nothing_uploads_nothing_and_launches_little(name):
    counts = on_device(name)[2]
    assert (counts.syncs, counts.h2d) == (0, 0)
    assert counts.launches <= most_launches(name)


long_but_two = [
    name if name in ("Untuned", "StormPlus") else pytest.param(name, marks=pytest.mark.long)
    for name in CASES
]


@pytest.mark.parametrize("name", long_but_two)
def test_the_launches_do_not_depend_on_the_number_of_tensors(name):
    assert on_device(name, tensors=110)[2] == on_device(name, tensors=20)[2]


@each_case
def test_a_step_equals_that_of_the_plain_path_on_the_cpu(name, monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", None)
    run = Training(name, 20, torch.clone)
    run.steps(3)
    expected = [p.detach() for p in run.params], run.opt.diagnostics()
    # Half precision may be rounded the other way.
    tolerance = 2**-7 if "float16" in name else 1e-6
    torch.testing.assert_close(on_device(name)[:2], expected, rtol=tolerance, atol=tolerance)


@each_case
def test_state_keeps_its_addresses(name):
    """A captured CUDA graph writes to the same memory whenever it is replayed."""
    with device_for(name) as device:
        run = Training(name, 4, device.put)
        run.steps(2)
        before = state_tensors(run.opt)  # alive, so that their memory is not used for others
        run.steps(2)
        after = state_tensors(run.opt)
        assert [k for k, t in after.items() if t.data_ptr() != before[k].data_ptr()] == []


@pytest.mark.long  # 22 million weights
@pytest.mark.parametrize(
    "name", ["Untuned", "Untuned, bfloat16 state", "Untuned, bfloat16", "StormPlus"]
)
def test_the_launches_are_bounded_on_resnet34(name):
    shapes, (make, dtype) = [p.shape for p in resnet34(1000).parameters()], CASES[name]
    assert device_counts(make, shapes, dtype=dtype).launches <= most_launches(name)


# -- gradients that are not finite ---------------------------------------------------------------

GOOD = noise(7, 4, dtype=F32)  # gradients of a tensor of 3 elements and of one of 1
NAN, INFINITE = GOOD[0].clone(), GOOD[0].clone()
NAN[1], INFINITE[3] = math.nan, math.inf
each_bad = pytest.mark.parametrize("bad", [NAN, INFINITE], ids=["nan", "inf"])


class Run:
    """A small model, and gradients that are given to it."""

    def __init__(self, make, put):
        self.params = [nn.Parameter(put(torch.tensor(x))) for x in ([0.1, 0.2, 0.3], [1.0])]
        self.opt, self.put = make(self.params), put

    def give(self, gradient, scale=1.0):
        for p, g in zip(self.params, gradient.split([3, 1])):
            p.grad = self.put(scale * g)

    def steps(self, *gradients):
        for gradient in gradients:
            self.give(gradient)
            self.opt.step()

    def scaled_step(self, gradient, *, scale, found_inf):
        """As torch.amp.GradScaler.step does."""
        self.give(gradient, scale)
        self.opt.grad_scale = self.put(torch.tensor(scale))
        self.opt.found_inf = self.put(torch.tensor(found_inf))
        self.opt.step()
        del self.opt.grad_scale, self.opt.found_inf

    def first(self, gradient):
        self.give(gradient)
        self.opt.estimate()

    def pair(self, first, second):
        self.give(first)
        self.opt.move()
        self.first(second)

    def values(self):
        return [value(p.detach()).clone() for p in self.params]

    def everything(self):
        """Without the count of skipped steps."""
        state = {key: value(t).clone() for key, t in state_tensors(self.opt).items()}
        return self.values(), {k: v for k, v in state.items() if k[1] not in ("skip", "skipped")}


@pytest.fixture
def device():
    with SimulatedDevice("cuda") as device:
        yield device


@each_bad
@pytest.mark.parametrize("before", [0, 2])
def test_untuned_skips_a_gradient_that_is_not_finite_and_raises_a_step_later(device, bad, before):
    run, expected = Run(Untuned, device.put), Run(Untuned, device.put)
    run.steps(*GOOD[:before])
    state = run.everything()
    run.steps(bad)
    if before:
        assert_same(run.everything(), state)
    with pytest.raises(FloatingPointError):
        run.steps(GOOD[2])
    run.steps(*GOOD[2:])
    expected.steps(*GOOD[:before], *GOOD[2:])
    assert_same(run.everything(), expected.everything())


@each_bad
def test_a_pair_is_skipped_if_its_first_gradient_is_not_finite(device, bad):
    run, expected = Run(StormPlus, device.put), Run(StormPlus, device.put)
    for each in (run, expected):
        each.first(GOOD[0])
        each.pair(*GOOD[1:3])
    state = run.everything()
    run.pair(bad, bad)
    assert_same(run.everything(), state)
    with pytest.raises(FloatingPointError):
        run.pair(*GOOD[3:5])
    for each in (run, expected):
        each.pair(*GOOD[3:5])
    assert_same(run.everything(), expected.everything())


@each_bad
def test_a_second_gradient_that_is_not_finite_raises_late_and_restarts(device, bad):
    run, expected = Run(StormPlus, device.put), Run(StormPlus, torch.clone)
    for each in (run, expected):
        each.first(GOOD[0])
        each.pair(*GOOD[1:3])
    run.pair(GOOD[3], bad)
    run.give(GOOD[4])
    with pytest.raises(FloatingPointError):
        run.opt.move()
    before = run.values()
    run.opt.move()
    assert_same(run.values(), before)
    run.first(GOOD[5])
    estimators = [value(run.opt.state[p]["estimator"]) for p in run.params]
    assert torch.equal(torch.cat(estimators), GOOD[5])
    expected.give(GOOD[3])
    expected.opt.move()
    expected.opt.restart()
    expected.first(GOOD[5])
    for each in (run, expected):
        each.pair(*GOOD[5:7])
    torch.testing.assert_close(run.values(), expected.values())


def test_a_first_sample_that_is_not_finite_moves_nothing(device):
    run = Run(StormPlus, device.put)
    run.first(NAN)
    before = run.values()
    with pytest.raises(FloatingPointError):
        run.pair(*GOOD[:2])
    run.pair(*GOOD[:2])
    assert_same(run.values(), before)


# -- GradScaler's protocol -----------------------------------------------------------------------


def test_a_scaled_step_equals_an_unscaled_one(device):
    run, expected = Run(Untuned, device.put), Run(Untuned, device.put)
    for gradient in GOOD:
        run.scaled_step(gradient, scale=1024.0, found_inf=0.0)
        expected.steps(gradient)
    assert_same(run.values(), expected.values())


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_scaled_step_does_not_wait_for_the_device(device, found_inf):
    run = Run(Untuned, device.put)
    run.steps(*GOOD[:2])
    device.reset()
    run.scaled_step(GOOD[2], scale=2.0, found_inf=found_inf)
    assert (device.counts.syncs, device.counts.h2d) == (0, 0)


@pytest.mark.parametrize("with_scaler", [True, False])
def test_an_overflow_that_the_scaler_has_found_changes_nothing_and_is_no_error(device, with_scaler):
    run = Run(Untuned, device.put)
    run.steps(*GOOD[:2])
    before = run.everything()
    run.scaled_step(INFINITE, scale=1024.0, found_inf=1.0)
    assert_same(run.everything(), before)
    if with_scaler:
        run.scaled_step(GOOD[0], scale=1024.0, found_inf=0.0)
    else:
        run.steps(GOOD[0])
    assert run.opt.grad_evaluations == 3


def test_a_parameter_that_is_not_finite_is_an_error_with_a_scaler_too(device):
    run = Run(Untuned, device.put)
    run.steps(*GOOD[:2])
    with torch.no_grad():
        run.params[0].mul_(math.nan)
    for gradient in GOOD[2:4]:  # the first one measures, the second one is skipped
        run.scaled_step(gradient, scale=2.0, found_inf=0.0)
    with pytest.raises(FloatingPointError, match="parameter"):
        run.scaled_step(GOOD[4], scale=2.0, found_inf=0.0)


def test_errors_after_a_reset_are_raised_as_before(device):
    run = Run(Untuned, device.put)
    for _ in range(2):
        run.steps(NAN)
        with pytest.raises(FloatingPointError):
            run.steps(GOOD[0])
        run.opt.reset()


@pytest.mark.parametrize("make", [Untuned, StormPlus])
@pytest.mark.parametrize("on_cpu", [0, 1])
def test_some_parameters_may_stay_on_the_cpu(device, make, on_cpu):
    def run(*places):
        start = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0])
        params = [nn.Parameter(put(x)) for put, x in zip(places, start)]
        opt = make(params)
        for gradient in GOOD[:4]:
            for p, put, g in zip(params, places, gradient.split([3, 1])):
                p.grad = put(g)
            if make is Untuned:
                opt.step()
                continue
            if opt.started:
                opt.move()
            opt.estimate()
        return [value(p.detach()) for p in params]

    mixed = [device.put, device.put]
    mixed[on_cpu] = torch.clone
    torch.testing.assert_close(run(*mixed), run(torch.clone, torch.clone))
