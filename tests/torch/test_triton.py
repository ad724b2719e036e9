"""The passes in Triton, run by its interpreter, against those in `plain`."""

import importlib.util
import math
import sys
from unittest import mock

import pytest
import torch

from stormplus.torch._sharding import Sample
from stormplus.torch._tensors import Objective, TensorGroup
from stormplus.torch.kernels import plain, triton
from stormplus.torch.kernels.plain import UntunedCoefficients
from stormplus.untuned_rule import average_weight, grad_weight
from stormplus_bench.simulated_device import SimulatedDevice, on_device, value

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, about overflow and NaN
]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MINIMIZE = Objective(1.0, 0.0)
EXACT = {"rtol": 0.0, "atol": 0.0}
ROUNDED = {"rtol": 3e-6, "atol": 1e-6}
CHUNK = 2048
SIZES = [1, 5, 1023, 1025, CHUNK + 1]


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    """Import Triton anew with TRITON_INTERPRET, which it reads when it is imported."""

    def modules():
        # Not the extension modules, which cannot be imported twice.
        return [
            name
            for name in sys.modules
            if name.split(".")[0] == "triton" and not name.startswith("triton._C")
        ]

    def forget():
        triton._compiled.cache_clear()
        triton._uploaded.cache_clear()
        return {name: sys.modules.pop(name) for name in modules()}

    before = forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(triton, "_CHUNK", CHUNK)  # the interpreter is slow
        yield
    forget()
    sys.modules.update(before)


def noise(size, dtype=F32, *, seed, scale=1.0, unaligned=False):
    generator = torch.Generator().manual_seed(10_000 * seed + size)
    values = scale * torch.randn(size + unaligned, generator=generator)
    return values.to(dtype)[int(unaligned) :]


def same_layout(tensor):
    """Return a copy with the same strides and alignment."""
    start = tensor.storage_offset()
    memory = torch.empty(start + tensor.numel(), dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), start).copy_(tensor)


def group_of(lists, *, samples=None, objective=MINIMIZE):
    """Return a group; `samples` has a stride and an offset for each tensor."""
    device = lists["params"][0].device
    group = TensorGroup(options={}, kernels=triton, device=device, objective=objective, **lists)
    for x, (stride, offset) in zip(group.params, samples or [(1, 0)] * len(group.params)):
        sample = Sample(x)
        sample.stride, sample.offset = stride, offset
        group.samples.append(sample)
    return group


def on_copies(module, name, lists, group=None, **arguments):
    """Return what a pass returns, and the tensors that it has changed."""
    copies = {key: [same_layout(t) for t in tensors] for key, tensors in lists.items()}
    return getattr(module, name)(group_of(copies, **group or {}), **arguments), copies


def assert_tensors_agree(actual, expected, **tolerance):
    for name, tensors in expected.items():
        for ours, theirs in zip(actual[name], tensors, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)


def assert_sums_agree(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0, equal_nan=True)


def number(x):
    return torch.tensor(x, dtype=torch.float64)


# -- pairs of gradients ----------------------------------------------------------------------------

MOVE = {"alpha": number(0.1)}
ESTIMATE = {"one_minus_a": number(0.9), "first": False, "finite_only": False}
each_objective = pytest.mark.parametrize(
    "objective",
    [Objective(-1.0, 0.0), Objective(1.0, 0.1)],
    ids=["maximize", "L2"],
)


def pair(sizes=(5, 1025), dtype=F32, grad_dtype=None, scale=1.0, unaligned=False):
    options = {"scale": scale, "unaligned": unaligned}
    return {
        "params": [noise(n, dtype, seed=1, unaligned=unaligned) for n in sizes],
        "grads": [noise(n, grad_dtype or dtype, seed=2, **options) for n in sizes],
        "estimators": [noise(n, seed=3, **options) for n in sizes],
    }


each_kind_of_tensor = pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({"sizes": SIZES}, id="float32"),
        pytest.param({"dtype": BF16}, id="bfloat16"),
        pytest.param({"dtype": F16}, id="float16"),
        pytest.param({"grad_dtype": BF16}, id="gradients in bfloat16"),
        pytest.param({"dtype": BF16, "grad_dtype": F32}, id="gradients in float32"),
        pytest.param({"sizes": SIZES, "unaligned": True}, id="unaligned"),
    ],
)


def assert_moves_agree(tensors, **group):
    _, expected = on_copies(plain, "move", tensors, group, **MOVE)
    _, actual = on_copies(triton, "move", tensors, group, **MOVE)
    assert_tensors_agree(actual, expected, **EXACT)


def assert_estimates_agree(tensors, group=None, **changes):
    arguments = ESTIMATE | changes
    sums, expected = on_copies(plain, "estimate", tensors, group, **arguments)
    own_sums, actual = on_copies(triton, "estimate", tensors, group, **arguments)
    assert_tensors_agree(actual, expected, **EXACT)
    assert_sums_agree(own_sums, sums)


@each_kind_of_tensor
def test_move(tensors):
    assert_moves_agree(pair(**tensors))


@each_objective
def test_move_on_an_objective(objective):
    assert_moves_agree(pair(), objective=objective)


@each_kind_of_tensor
def test_estimate(tensors):
    assert_estimates_agree(pair(**tensors))


@each_objective
def test_estimate_on_an_objective(objective):
    assert_estimates_agree(pair(), {"objective": objective})


def test_first_estimate():
    tensors = pair()
    tensors["estimators"][0][1] = math.nan  # is not read
    assert_estimates_agree(tensors, first=True)


def test_estimate_leaves_out_what_is_not_finite():
    tensors = pair()
    tensors["grads"][0][1] = math.nan
    tensors["grads"][1][-1] = -math.inf
    assert_estimates_agree(tensors, finite_only=True)


@pytest.mark.parametrize(("dtype", "bad"), [(F32, math.nan), (BF16, math.inf), (F16, -math.inf)])
def test_any_nonfinite(dtype, bad):
    group = group_of(pair(dtype=dtype))
    assert not triton.any_nonfinite(group)
    group.grads[1][-1] = bad
    assert triton.any_nonfinite(group)


# -- Untuned ---------------------------------------------------------------------------------------


def untuned(sizes=(5, 1025), dtype=F32, grad_dtype=None, state_dtype=F32, **options):
    masters = [noise(n, seed=1, unaligned=options.get("unaligned", False)) for n in sizes]
    return {
        "params": masters if dtype == F32 else [y.to(dtype) for y in masters],
        "grads": [noise(n, grad_dtype or dtype, seed=2, **options) for n in sizes],
        "z_minus_x": [noise(n, state_dtype, seed=3, **options | {"scale": 0.01}) for n in sizes],
        "grad_rms": [noise(n, state_dtype, seed=4, **options).abs() for n in sizes],
        "initial_sample": [noise(n, seed=5) for n in sizes],
        "masters": [] if dtype == F32 else masters,
    }


def coefficients(n, t=10.0, **changes):
    """Return coefficients that differ between tensors."""
    each = 1 + torch.arange(n, dtype=torch.float64) / n
    numbers = {
        "step_size": 0.01 * each,
        "max_move": 0.015 * each,
        "decay": 0.001 * each,
        "grad_weight": grad_weight(t * each),
        "average_weight": average_weight(t * each),
        "grad_factor": -each,
        "step": (t * each).round(),
    }
    return UntunedCoefficients(**numbers | changes)


def untuned_step(module, tensors, rows=None, **group):
    rows = rows or coefficients(len(tensors["params"]))
    return on_copies(module, "untuned_step", tensors, group, coefficients=rows)


def assert_steps_agree(tensors, tolerance=ROUNDED, **group):
    sums, expected = untuned_step(plain, tensors, **group)
    own_sums, actual = untuned_step(triton, tensors, **group)
    assert_tensors_agree(actual, expected, **tolerance)
    assert_sums_agree(own_sums, sums)
    return actual, expected


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({"sizes": SIZES}, id="float32"),
        pytest.param({"grad_dtype": BF16}, id="gradients in bfloat16"),
        pytest.param({"unaligned": True}, id="unaligned"),
    ],
)
def test_untuned_step(tensors):
    assert_steps_agree(untuned(**tensors))


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e38])
def test_untuned_step_with_gradients_of_any_size(scale):
    actual, expected = assert_steps_agree(untuned([1025], scale=scale))
    torch.testing.assert_close(actual["grad_rms"], expected["grad_rms"], rtol=3e-6, atol=3e-45)


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({"dtype": BF16}, id="bfloat16"),
        pytest.param({"dtype": F16}, id="float16"),
        pytest.param({"state_dtype": BF16}, id="state in bfloat16"),
        pytest.param({"dtype": BF16, "state_dtype": BF16}, id="both in bfloat16"),
    ],
)
def test_untuned_step_in_half_precision(tensors):
    tensors = untuned(**tensors)
    _, expected = untuned_step(plain, tensors)
    _, actual = untuned_step(triton, tensors)
    # Where the float32 results differ in their last bit, a few are rounded to the other neighbour.
    assert_tensors_agree(actual, expected, rtol=2**-7, atol=1e-6)
    for name in ("params", "z_minus_x", "grad_rms"):
        for ours, theirs in zip(actual[name], expected[name]):
            assert ours.dtype == F32 or (ours != theirs).sum() <= 3


@pytest.mark.parametrize(("bad", "state_dtype"), [(math.nan, BF16), (-math.inf, F32)], ids=str)
def test_untuned_step_keeps_what_is_not_finite(bad, state_dtype):
    tensors = untuned([5], state_dtype=state_dtype)
    tensors["grads"][0][2] = bad
    assert_steps_agree(tensors, tolerance={"rtol": 2**-7, "atol": 1e-6})


@pytest.mark.parametrize("backend", [triton, plain])
def test_stochastic_rounding_keeps_nan_of_any_bits(backend):
    tensors = untuned([5], state_dtype=BF16)
    tensors["grads"][0].view(torch.int32)[2] = 0x7FFFFFFF  # CUDA's
    _, actual = untuned_step(backend, tensors)
    assert actual["z_minus_x"][0][2].isnan()
    assert actual["grad_rms"][0][2].isnan()


def test_displacement_is_infinite_if_a_parameter_overflows():
    tensors = untuned([5], dtype=F16)
    tensors["masters"][0][2] = 65504.0
    tensors["params"][0][2] = 65504.0
    tensors["grads"][0][2] = 1.0  # which is maximized
    rows = coefficients(1, step_size=number([1e3]), max_move=number([1e3]))
    (_, moved_sq), actual = untuned_step(triton, tensors, rows)
    assert actual["params"][0][2] == math.inf
    assert actual["masters"][0].isfinite().all()
    assert moved_sq == math.inf


def test_parameter_that_was_overwritten_replaces_its_master():
    tensors = untuned([5], dtype=BF16)
    tensors["params"][0][2] = 3.0
    assert_steps_agree(tensors, tolerance={"rtol": 2**-7, "atol": 1e-6})


@pytest.mark.parametrize(("stride", "offset"), [(1, 3), (7, 0), (7, 700)])
def test_sample_of_a_shard(stride, offset):
    tensors = untuned([500])
    tensors["initial_sample"] = [noise(1200, seed=5)]
    assert_steps_agree(tensors, samples=[(stride, offset)])


def test_stochastic_rounding_of_a_shard():
    tensors = untuned([1025], state_dtype=BF16)
    _, expected = untuned_step(triton, tensors)
    shard = {name: [t[1000:] for t in tensors[name]] for name in tensors}
    shard["initial_sample"] = tensors["initial_sample"]
    _, actual = untuned_step(triton, shard, samples=[(1, 1000)])
    assert torch.equal(actual["z_minus_x"][0], expected["z_minus_x"][0][1000:])
    assert torch.equal(actual["grad_rms"][0], expected["grad_rms"][0][1000:])


def test_stride_zero_leaves_a_tensor_out_of_the_measurement():
    tensors = untuned([5, 9])
    tensors["initial_sample"][0] = torch.empty(0)
    (u_sq, moved_sq), _ = untuned_step(triton, tensors, samples=[(0, 0), (1, 0)])
    assert (u_sq > 0).all()
    assert moved_sq[0] == 0
    assert moved_sq[1] > 0


@pytest.mark.parametrize("offset", [0, 24])
def test_channels_last(offset):
    shape = (10, 4, 3, 2)
    tensors = untuned([240, 5])
    for name, (first, _) in ((k, v) for k, v in tensors.items() if v):
        if name != "initial_sample":
            image = first.view(shape).contiguous(memory_format=torch.channels_last)
            tensors[name][0] = image
    tensors["initial_sample"][0] = noise(100, seed=5)
    assert not tensors["params"][0].is_contiguous()
    assert_steps_agree(tensors, samples=[(7, offset), (1, 0)])


# -- all passes ------------------------------------------------------------------------------------

STEP = {"coefficients": coefficients(2)}
each_pass = pytest.mark.parametrize(
    ("name", "tensors", "arguments"),
    [
        pytest.param("move", pair(), MOVE, id="move"),
        pytest.param("estimate", pair(), ESTIMATE, id="estimate"),
        pytest.param("untuned_step", untuned(), STEP, id="Untuned"),
        pytest.param("untuned_step", untuned(dtype=BF16, state_dtype=BF16), STEP, id="bfloat16"),
    ],
)


@each_pass
def test_skip_changes_nothing(name, tensors, arguments):
    skip = torch.ones((), dtype=torch.bool)
    sums, actual = on_copies(triton, name, tensors, **arguments, skip=skip)
    assert_tensors_agree(actual, tensors, **EXACT)
    assert sums is None or (sums[0] == 0).all()


@each_pass
def test_autograd_sees_the_writes(name, tensors, arguments):
    versions = [x._version for x in tensors["params"]]
    skip = torch.ones((), dtype=torch.bool)
    getattr(triton, name)(group_of(tensors), **arguments, skip=skip)
    written = [x._version > v for x, v in zip(tensors["params"], versions)]
    assert all(written) if name != "estimate" else not any(written)


@pytest.mark.parametrize("n", [3, 40])
def test_launches_do_not_grow_with_the_number_of_tensors(n, monkeypatch):
    launched = []
    monkeypatch.setattr(
        triton, "_launch", lambda kernel, *_, **__: launched.append(kernel.__name__)
    )
    sizes = [3 + i for i in range(n)]
    triton.any_nonfinite(group_of(pair(sizes)))
    triton.move(group_of(pair(sizes)), **MOVE)
    triton.estimate(group_of(pair(sizes)), **ESTIMATE)
    triton.untuned_step(group_of(untuned(sizes)), coefficients(n))
    kernels = ["nonfinite", "move", "estimate", "untuned", "measure"]
    assert launched == [f"{name}_kernel" for name in kernels]


def test_pass_on_a_device_does_not_wait_and_copies_its_tables_once(monkeypatch):
    def launch(kernel, programs, **arguments):
        device.launch()
        real_launch(kernel, programs, **{name: value(v) for name, v in arguments.items()})

    real_launch = triton._launch
    monkeypatch.setattr(triton, "_launch", launch)
    with SimulatedDevice("cuda") as device:
        lists = {name: list(map(device.put, v)) for name, v in untuned().items()}
        group, rows = group_of(lists), UntunedCoefficients(*map(device.put, coefficients(2)))
        triton.untuned_step(group, rows)
        assert device.counts[1:] == (0, 2, 0), device.where
        device.reset()
        sums = triton.untuned_step(group, rows)
        assert device.counts == (2, 0, 0, 0), device.where
    assert all(map(on_device, sums))


def test_capture_makes_tables_that_stay(monkeypatch):
    monkeypatch.setattr(triton, "_kept_for_replays", kept := [])
    with SimulatedDevice("cuda") as device:
        eager = triton._on_device(device.device, (1, 2), False)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            captured = triton._on_device(device.device, (1, 2), False)
        assert triton._on_device(device.device, (1, 2), False) is eager
    assert captured is not eager
    assert [t for _, t in kept] == [captured]


def test_supports():
    with SimulatedDevice("cuda") as device:
        dtypes = F32, torch.float64, F16
        single, double, half = (device.put(torch.ones(3, dtype=dtype)) for dtype in dtypes)
    assert triton.supports(single, single, single)
    assert triton.supports(half, single, single)
    assert not triton.supports(double, double, double)
    assert not triton.supports(half, half, half)
    assert not triton.supports(*map(value, (single, single, single)))
