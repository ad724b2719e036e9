"""Steps on a simulated device: no waiting, few launches, and the values of the CPU."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from optimizers import assert_same, halves, state_tensors
from torch import nn

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from stormplus.torch import PairedOptimizer
from stormplus.torch.kernels import native
from stormplus_bench.launches import device_counts
from stormplus_bench.simulated_device import SimulatedDevice, value
from stormplus_bench.train.networks import resnet34

BF16, F16 = torch.bfloat16, torch.float16
SHAPES = [(16, 8), (16,)]


@dataclass(frozen=True)
class Case:
    """An optimizer with options, and the parameters that it is given."""

    make: Callable  # of parameters, and of what puts a tensor on their device
    dtype: torch.dtype = torch.float32
    without_gradient: tuple = ()  # which parameters
    device: str = "cuda"
    float64: bool = True


def case(cls, *, dtype=torch.float32, without_gradient=(), device="cuda", float64=True, **options):
    return Case(lambda p, put: cls(p, **options), dtype, without_gradient, device, float64)


def two_groups(cls):
    def make(params, put):
        half = len(params) // 2
        return cls([{"params": params[:half]}, {"params": params[half:], "weight_decay": 0.1}])

    return Case(make)


def with_tensor_lr(params, put):
    opt = Untuned(params)
    opt.param_groups[0]["lr"] = put(torch.tensor(0.5))
    return opt


NO_FLOAT64 = {"device": "xpu", "float64": False}
UNTUNED = {
    "Untuned": case(Untuned),
    "Untuned, unchecked": case(Untuned, check_finite=False),
    "Untuned, weight decay, maximize": case(Untuned, weight_decay=0.1, maximize=True),
    "Untuned, bfloat16 state": case(Untuned, state_dtype=BF16),
    "Untuned, bfloat16": case(Untuned, dtype=BF16),
    "Untuned, bfloat16, bfloat16 state": case(Untuned, dtype=BF16, state_dtype=BF16),
    "Untuned, float16": case(Untuned, dtype=F16),
    "Untuned, two groups": two_groups(Untuned),
    "Untuned, one without gradient": case(Untuned, without_gradient=(3,)),
    "Untuned, tensor lr": Case(with_tensor_lr),
    "Untuned, no float64": case(Untuned, **NO_FLOAT64),
    "Untuned, no float64, bfloat16 state": case(Untuned, state_dtype=BF16, **NO_FLOAT64),
}
PAIRED = {
    "StormPlus": case(StormPlus),
    "StormPlus, unchecked": case(StormPlus, check_finite=False),
    "StormPlus, L2": case(StormPlus, weight_decay=0.1),
    "StormPlus, decoupled": case(StormPlus, weight_decay=0.1, decoupled_weight_decay=True),
    "StormPlus, bfloat16": case(StormPlus, dtype=BF16),
    "StormPlus, tensor lr": Case(lambda p, put: StormPlus(p, lr=put(torch.tensor(0.5)))),
    "StormPlus, no float64": case(StormPlus, **NO_FLOAT64),
    "StormPlus, two groups": two_groups(StormPlus),
    "SimplifiedStormPlus": case(SimplifiedStormPlus),
    "Storm": case(Storm),
}
CASES = UNTUNED | PAIRED


# Above the bound: a pass for each parameter group.
LAUNCHES = {"StormPlus, two groups": 155}


@pytest.fixture(params=CASES)
def name(request):
    return request.param


def parameters(case, tensors, put):
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES * (tensors // len(SHAPES))
    values = [0.1 * torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(put(v.to(case.dtype))) for v in values]


def trained(case, params, opt, put, *, steps=3, before_last=lambda: None):
    """Take some steps with given gradients, two per step for a paired optimizer."""
    generator = torch.Generator().manual_seed(1)

    def evaluate():
        for i, p in enumerate(params):
            g = torch.randn(p.shape, generator=generator).to(case.dtype)
            p.grad = None if i in case.without_gradient else put(g)

    for k in range(steps):
        if k == steps - 1:
            before_last()
        if isinstance(opt, PairedOptimizer):
            halves(opt, evaluate)
        else:
            evaluate()
            opt.step()


@cache
def on_device(name, tensors=20):
    """Return parameters and diagnostics after three steps, and the counts of the last one."""
    case = CASES[name]
    with SimulatedDevice(case.device, float64=case.float64) as device:
        params = parameters(case, tensors, device.put)
        opt = case.make(params, device.put)
        trained(case, params, opt, device.put, before_last=device.reset)
        counts = device.counts
        return [value(p.detach()) for p in params], opt.diagnostics(), counts


def test_a_step_waits_for_nothing_and_uploads_nothing(name):
    counts = on_device(name)[2]
    assert (counts.syncs, counts.h2d) == (0, 0)


def test_the_launches_are_bounded(name):
    bound = LAUNCHES.get(name, 200 if name in UNTUNED else 120)
    assert on_device(name)[2].launches <= bound


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("Untuned", "StormPlus") else pytest.param(name, marks=pytest.mark.long)
        for name in CASES
    ],
)
def test_the_launches_do_not_depend_on_the_number_of_tensors(name):
    assert on_device(name, tensors=110)[2] == on_device(name, tensors=20)[2]


def test_a_step_equals_that_of_the_plain_path_on_the_cpu(name, monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", None)
    case = CASES[name]
    params = parameters(case, 20, torch.clone)
    opt = case.make(params, torch.clone)
    trained(case, params, opt, torch.clone)
    expected = [p.detach() for p in params], opt.diagnostics()
    # A half-precision parameter may be rounded the other way, and so may half-precision state.
    half = BF16 in (case.dtype, getattr(opt, "_state_dtype", None)) or case.dtype == F16
    tolerance = 2**-7 if half else 1e-6
    torch.testing.assert_close(on_device(name)[:2], expected, rtol=tolerance, atol=tolerance)


def test_state_keeps_its_addresses(name):
    """A captured CUDA graph writes to the same memory whenever it is replayed."""
    case = CASES[name]
    with SimulatedDevice(case.device, float64=case.float64) as device:
        params = parameters(case, 4, device.put)
        opt = case.make(params, device.put)
        trained(case, params, opt, device.put, steps=2)
        before = state_tensors(opt)  # alive, so that their memory is not used for others
        trained(case, params, opt, device.put, steps=2)
        moved = [k for k, t in state_tensors(opt).items() if t.data_ptr() != before[k].data_ptr()]
        assert moved == []


@pytest.mark.long  # 22 million weights
@pytest.mark.parametrize(
    ("make", "dtype", "bound"),
    [
        pytest.param(Untuned, torch.float32, 200, id="Untuned"),
        pytest.param(partial(Untuned, state_dtype=BF16), torch.float32, 200, id="bfloat16 state"),
        pytest.param(Untuned, BF16, 200, id="bfloat16"),
        pytest.param(StormPlus, torch.float32, 120, id="StormPlus"),
    ],
)
def test_the_launches_are_bounded_on_resnet34(make, dtype, bound):
    shapes = [p.shape for p in resnet34(1000).parameters()]
    assert device_counts(make, shapes, dtype=dtype).launches <= bound


# -- gradients that are not finite ----------------------------------------------------------------

GOOD = [
    [[0.3, -1.0, 2.0], [0.5]],
    [[-0.2, 0.4, 1.0], [-0.1]],
    [[0.7, 0.1, -0.6], [0.2]],
    [[1.1, -0.3, 0.5], [0.9]],
    [[0.2, 0.8, -0.4], [-0.7]],
    [[-0.9, 0.6, 0.3], [0.4]],
    [[0.5, -0.2, 0.1], [1.2]],
]
NAN = [[0.3, math.nan, 2.0], [0.5]]
INFINITE = [[0.3, -1.0, 2.0], [math.inf]]
each_bad = pytest.mark.parametrize("bad", [NAN, INFINITE], ids=["nan", "inf"])


@pytest.fixture
def device():
    with SimulatedDevice("cuda") as device:
        yield device


def small(make, put):
    return make([nn.Parameter(put(torch.tensor(x))) for x in ([0.1, 0.2, 0.3], [1.0])])


def give(opt, put, gradient):
    for p, g in zip(opt.parameters(), gradient):
        p.grad = put(torch.tensor(g))


def steps(opt, put, gradients):
    for gradient in gradients:
        give(opt, put, gradient)
        opt.step()


def pair(opt, put, first, second):
    give(opt, put, first)
    opt.move()
    give(opt, put, second)
    opt.estimate()


def first_sample(opt, put, gradient):
    give(opt, put, gradient)
    opt.estimate()


def values(opt):
    return [value(p.detach()).clone() for p in opt.parameters()]


def whole_state(opt):
    """Return copies of parameters and state, without the count of skipped steps."""
    state = {key: value(t).clone() for key, t in state_tensors(opt).items()}
    return values(opt), {k: v for k, v in state.items() if k[1] not in ("skip", "skipped")}


@each_bad
def test_untuned_skips_a_gradient_that_is_not_finite(device, bad):
    opt = small(Untuned, device.put)
    steps(opt, device.put, GOOD[:2])
    before = whole_state(opt)
    steps(opt, device.put, [bad])
    assert_same(whole_state(opt), before)


@pytest.mark.parametrize("good_before", [0, 2])
def test_untuned_goes_on_as_if_a_skipped_step_had_not_been(device, good_before):
    run, expected = small(Untuned, device.put), small(Untuned, device.put)
    steps(run, device.put, [*GOOD[:good_before], NAN])
    with pytest.raises(FloatingPointError):
        steps(run, device.put, GOOD[2:3])
    steps(run, device.put, GOOD[2:])
    steps(expected, device.put, [*GOOD[:good_before], *GOOD[2:]])
    assert_same(whole_state(run), whole_state(expected))


@each_bad
def test_a_pair_is_skipped_if_its_first_gradient_is_not_finite(device, bad):
    opt = small(StormPlus, device.put)
    first_sample(opt, device.put, GOOD[0])
    before = whole_state(opt)
    pair(opt, device.put, bad, GOOD[1])
    assert_same(whole_state(opt), before)


def test_a_pair_goes_on_as_if_a_skipped_one_had_not_been(device):
    run, expected = small(StormPlus, device.put), small(StormPlus, device.put)
    for opt in (run, expected):
        first_sample(opt, device.put, GOOD[0])
        pair(opt, device.put, *GOOD[1:3])
    pair(run, device.put, NAN, NAN)
    with pytest.raises(FloatingPointError):
        pair(run, device.put, *GOOD[3:5])
    for opt in (run, expected):
        pair(opt, device.put, *GOOD[3:5])
    assert_same(whole_state(run), whole_state(expected))


@each_bad
def test_a_second_gradient_that_is_not_finite_raises_late_and_restarts(device, bad):
    run, expected = small(StormPlus, device.put), small(StormPlus, torch.clone)
    for opt, put in ((run, device.put), (expected, torch.clone)):
        first_sample(opt, put, GOOD[0])
        pair(opt, put, *GOOD[1:3])
    pair(run, device.put, GOOD[3], bad)
    give(run, device.put, GOOD[4])
    with pytest.raises(FloatingPointError):
        run.move()
    before = values(run)
    run.move()
    assert_same(values(run), before)
    first_sample(run, device.put, GOOD[5])
    estimators = [value(run.state[p]["estimator"]).tolist() for p in run.parameters()]
    assert estimators == [torch.tensor(g).tolist() for g in GOOD[5]]
    pair(run, device.put, *GOOD[5:7])
    give(expected, torch.clone, GOOD[3])
    expected.move()
    expected.restart()
    first_sample(expected, torch.clone, GOOD[5])
    pair(expected, torch.clone, *GOOD[5:7])
    torch.testing.assert_close(values(run), values(expected))


def test_a_first_sample_that_is_not_finite_moves_nothing(device):
    opt = small(StormPlus, device.put)
    first_sample(opt, device.put, NAN)
    before = values(opt)
    with pytest.raises(FloatingPointError):
        pair(opt, device.put, *GOOD[:2])
    pair(opt, device.put, *GOOD[:2])
    assert_same(values(opt), before)


# -- GradScaler's protocol -------------------------------------------------------------------------


def scaled_step(opt, put, gradient, *, scale, found_inf):
    """Take a step as torch.amp.GradScaler.step does."""
    give(opt, put, gradient)
    opt.grad_scale, opt.found_inf = put(torch.tensor(scale)), put(torch.tensor(found_inf))
    opt.step()
    del opt.grad_scale, opt.found_inf


def scaled(gradient, scale):
    return [[scale * x for x in numbers] for numbers in gradient]


def test_a_scaled_step_equals_an_unscaled_one(device):
    run, expected = small(Untuned, device.put), small(Untuned, device.put)
    for gradient in GOOD:
        scaled_step(run, device.put, scaled(gradient, 1024), scale=1024.0, found_inf=0.0)
        steps(expected, device.put, [gradient])
    assert_same(values(run), values(expected))


def test_an_overflow_that_the_scaler_has_found_changes_nothing(device):
    opt = small(Untuned, device.put)
    steps(opt, device.put, GOOD[:2])
    before = whole_state(opt)
    scaled_step(opt, device.put, INFINITE, scale=1024.0, found_inf=1.0)
    assert_same(whole_state(opt), before)


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_scaled_step_does_not_wait_for_the_device(device, found_inf):
    opt = small(Untuned, device.put)
    steps(opt, device.put, GOOD[:2])
    device.reset()
    scaled_step(opt, device.put, GOOD[2], scale=2.0, found_inf=found_inf)
    assert (device.counts.syncs, device.counts.h2d) == (0, 0)


@pytest.mark.parametrize("with_scaler", [True, False])
def test_an_overflow_that_the_scaler_has_found_is_no_error(device, with_scaler):
    opt = small(Untuned, device.put)
    scaled_step(opt, device.put, INFINITE, scale=1024.0, found_inf=1.0)
    if with_scaler:
        scaled_step(opt, device.put, GOOD[0], scale=1024.0, found_inf=0.0)
    else:
        steps(opt, device.put, GOOD[:1])
    assert opt.grad_evaluations == 1
