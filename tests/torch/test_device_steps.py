"""Steps on a simulated device: no waiting, few launches, and the values of the CPU."""

import math
from functools import cache, partial

import pytest
import torch
from torch import nn

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from stormplus.integrations.untuned import Average
from stormplus.torch import PairedOptimizer
from stormplus.torch.kernels import native
from stormplus_bench.simulated_device import SimulatedDevice, value
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
    "Untuned, tensor lr of one group": (with_tensor_lr(two_groups(Untuned)), F32),
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


class Run:
    """Parameters on a device or on the CPU, and gradients that are given to them."""

    def __init__(self, make, puts, start):
        self.puts = puts if isinstance(puts, list) else [puts] * len(start)
        self.params = [nn.Parameter(put(x)) for put, x in zip(self.puts, start)]
        self.opt = make(self.params)

    def give(self, gradients, scale=1.0):
        for p, put, g in zip(self.params, self.puts, gradients):
            p.grad = None if g is None else put(scale * g)

    def take(self, rows):
        """Take a step with the next gradients: a pair takes two, unless it is the first."""
        if isinstance(self.opt, PairedOptimizer):
            halves(self.opt, lambda: self.give(next(rows)))
        else:
            self.give(next(rows))
            self.opt.step()

    def step(self, *gradients):
        self.take(iter(gradients))

    def values(self):
        return [value(p.detach()).clone() for p in self.params]

    def everything(self):
        """Without the count of skipped steps."""
        state = {key: value(t).clone() for key, t in state_tensors(self.opt).items()}
        return self.values(), {k: v for k, v in state.items() if k[1] not in ("skip", "skipped")}


def training(name, tensors, put):
    """Return a run of a case of the table, and a function that takes a step."""
    make, dtype = CASES[name]
    shapes = SHAPES * (tensors // len(SHAPES))
    draw = torch.Generator().manual_seed(0)
    run = Run(make, put, [(0.1 * torch.randn(s, generator=draw)).to(dtype) for s in shapes])

    def gradients():
        while True:
            row = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
            yield [*row[:3], None, *row[4:]] if "one without gradient" in name else row

    return run, partial(run.take, gradients())


def device_for(name):
    if "no float64" in name:
        return SimulatedDevice("xpu", float64=False)
    return SimulatedDevice("cuda")


@cache
def on_device(name, tensors=20):
    """Return parameters and diagnostics after three steps, and the counts of the last one."""
    with device_for(name) as device:
        run, step = training(name, tensors, device.put)
        for _ in range(3):
            device.reset()
            step()
        counts = device.counts
        return run.values(), run.opt.diagnostics(), counts


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
    run, step = training(name, 20, torch.clone)
    for _ in range(3):
        step()
    # Half precision may be rounded the other way.
    tolerance = 2**-7 if "float16" in name else 1e-6
    expected = run.values(), run.opt.diagnostics()
    torch.testing.assert_close(on_device(name)[:2], expected, rtol=tolerance, atol=tolerance)


@each_case
def test_state_keeps_its_addresses(name):
    """A captured CUDA graph writes to the same memory whenever it is replayed."""
    with device_for(name) as device:
        run, step = training(name, 4, device.put)
        step()
        step()
        before = state_tensors(run.opt)  # alive, so that their memory is not used for others
        step()
        step()
        after = state_tensors(run.opt)
        assert [k for k, t in after.items() if t.data_ptr() != before[k].data_ptr()] == []


# -- gradients that are not finite ---------------------------------------------------------------

GOOD = [row.split([3, 1]) for row in noise(7, 4, dtype=F32)]
BAD = {
    "nan": (torch.tensor([1.0, math.nan, 1.0]), torch.ones(1)),
    "inf": (torch.ones(3), torch.tensor([math.inf])),
}
each_bad = pytest.mark.parametrize("bad", BAD.values(), ids=BAD)


def small(make, put):
    return Run(make, put, [torch.tensor([0.1, 0.2, 0.3]), torch.ones(1)])


def begun(put):
    """Return a run of StormPlus after its first sample and one pair."""
    run = small(StormPlus, put)
    run.step(GOOD[0])
    run.step(*GOOD[1:3])
    return run


@pytest.fixture
def device():
    with SimulatedDevice("cuda") as device:
        yield device


@each_bad
@pytest.mark.parametrize("before", [0, 2])
def test_untuned_skips_a_gradient_that_is_not_finite_and_raises_a_step_later(device, bad, before):
    run, expected = small(Untuned, device.put), small(Untuned, device.put)
    for gradient in GOOD[:before]:
        run.step(gradient)
    state = run.everything()
    run.step(bad)
    if before:
        assert_same(run.everything(), state)
    with pytest.raises(FloatingPointError):
        run.step(GOOD[2])
    for gradient in GOOD[2:]:
        run.step(gradient)
    for gradient in [*GOOD[:before], *GOOD[2:]]:
        expected.step(gradient)
    assert_same(run.everything(), expected.everything())


@each_bad
def test_a_pair_is_skipped_if_its_first_gradient_is_not_finite(device, bad):
    run, expected = begun(device.put), begun(device.put)
    state = run.everything()
    run.step(bad, bad)
    assert_same(run.everything(), state)
    with pytest.raises(FloatingPointError):
        run.step(*GOOD[3:5])
    for each in (run, expected):
        each.step(*GOOD[3:5])
    assert_same(run.everything(), expected.everything())


@each_bad
def test_a_second_gradient_that_is_not_finite_raises_late_and_restarts(device, bad):
    run, expected = begun(device.put), begun(torch.clone)
    run.step(GOOD[3], bad)
    before = run.values()
    with pytest.raises(FloatingPointError):
        run.step(*GOOD[4:6])
    run.step(*GOOD[4:6])
    assert_same(run.values(), before)
    assert_same([value(run.opt.state[p]["estimator"]) for p in run.params], list(GOOD[5]))
    expected.give(GOOD[3])
    expected.opt.move()
    expected.opt.restart()
    expected.step(GOOD[5])
    for each in (run, expected):
        each.step(*GOOD[5:7])
    torch.testing.assert_close(run.values(), expected.values())


def test_a_first_sample_that_is_not_finite_moves_nothing(device):
    run = small(StormPlus, device.put)
    before = run.values()
    run.step(BAD["nan"])
    with pytest.raises(FloatingPointError):
        run.step(*GOOD[:2])
    run.step(*GOOD[:2])
    assert_same(run.values(), before)


def scaled_step(run, gradient, found_inf):
    """Take a step as torch.amp.GradScaler does."""
    run.give(gradient, scale=1024.0)
    run.opt.grad_scale = run.puts[0](torch.tensor(1024.0))
    run.opt.found_inf = run.puts[0](torch.tensor(found_inf))
    run.opt.step()
    del run.opt.grad_scale, run.opt.found_inf


@pytest.mark.parametrize("overflow", [False, True])
def test_a_step_with_a_gradscaler_equals_one_without_and_does_not_wait(device, overflow):
    run, expected = small(Untuned, device.put), small(Untuned, device.put)
    for gradient in GOOD[:3]:
        scaled_step(run, gradient, found_inf=0.0)
        expected.step(gradient)
    device.reset()
    scaled_step(run, BAD["inf"] if overflow else GOOD[3], found_inf=float(overflow))
    assert (device.counts.syncs, device.counts.h2d) == (0, 0)
    if not overflow:
        expected.step(GOOD[3])
    assert_same(run.everything(), expected.everything())
    scaled_step(run, GOOD[4], found_inf=0.0)  # without an error
    run.step(GOOD[5])
    assert run.opt.grad_evaluations == (5 if overflow else 6)


def test_a_parameter_that_is_not_finite_is_an_error_with_a_scaler_too(device):
    run = small(Untuned, device.put)
    for gradient in GOOD[:2]:
        run.step(gradient)
    with torch.no_grad():
        run.params[0].mul_(math.nan)
    for gradient in GOOD[2:4]:  # the first one measures, the second one is skipped
        scaled_step(run, gradient, found_inf=0.0)
    with pytest.raises(FloatingPointError, match="parameter"):
        scaled_step(run, GOOD[4], found_inf=0.0)


def test_errors_after_a_reset_are_raised_as_before(device):
    run = small(Untuned, device.put)
    for _ in range(2):
        run.step(BAD["nan"])
        with pytest.raises(FloatingPointError):
            run.step(GOOD[0])
        run.opt.reset()


@pytest.mark.parametrize("make", [Untuned, StormPlus])
@pytest.mark.parametrize("on_cpu", [0, 1])
def test_some_parameters_may_stay_on_the_cpu(device, make, on_cpu):
    mixed = [device.put, device.put]
    mixed[on_cpu] = torch.clone
    runs = small(make, mixed), small(make, torch.clone)
    for i in range(4):
        for run in runs:
            run.step(*GOOD[i : i + 2])
    torch.testing.assert_close(runs[0].values(), runs[1].values())


@pytest.mark.parametrize("make", [Untuned, StormPlus])
def test_a_parameter_on_the_device_can_be_unfrozen_beside_one_on_the_cpu(device, make):
    def run(put):
        params = [nn.Parameter(put(torch.ones(2))), nn.Parameter(torch.ones(2))]
        params[0].requires_grad_(False)
        opt = make(params)
        for gradient in noise(4, 2, dtype=F32):
            params[0].grad, params[1].grad = put(gradient), gradient
            halves(opt, lambda: None) if make is StormPlus else opt.step()
            params[0].requires_grad_(True)
        return [value(p.detach()) for p in params]

    torch.testing.assert_close(run(device.put), run(torch.clone))


def test_an_lr_on_the_device_works_for_parameters_on_the_cpu(device):
    run, expected = small(Untuned, torch.clone), small(Untuned, torch.clone)
    run.opt.param_groups[0]["lr"] = device.put(torch.tensor(0.5))
    expected.opt.param_groups[0]["lr"] = 0.5
    for each in (run, expected):
        each.step(GOOD[0])
    assert_same(run.values(), expected.values())


def test_a_frozen_parameter_has_its_average_on_its_device_after_loading(device):
    trained = Run(Untuned, torch.clone, [torch.ones(2, dtype=BF16)])
    trained.step([torch.tensor([1.0, -2.0], dtype=BF16)])
    run = Run(Untuned, device.put, [p.detach() for p in trained.params])
    run.params[0].requires_grad_(False)
    run.opt.load_state_dict(trained.opt.state_dict())
    for each in (run, trained):
        each.opt.eval()
    assert_same(run.values(), trained.values())


def test_a_parameter_that_joins_in_a_skipped_sample_takes_its_first_gradient(device):
    run = Run(StormPlus, device.put, [torch.ones(1), torch.ones(1)])
    p, q = run.params
    p.grad = device.put(torch.ones(1))
    run.opt.estimate()
    p.grad = device.put(torch.tensor([math.nan]))
    run.opt.move()
    p.grad, q.grad = device.put(torch.ones(1)), device.put(torch.tensor([3.0]))
    run.opt.estimate()  # the sample is skipped
    assert value(run.opt.state[q]["estimator"]).tolist() == [3.0]


def test_swapping_the_average_in_under_a_trainer_does_not_wait(device):
    run = small(Untuned, device.put)
    run.step(GOOD[0])
    average = Average([run.opt])
    device.reset()
    average.swap_in()
    assert device.counts.syncs == 0
    average.swap_out()
