"""The Triton backend beyond test_kernels.py: launches, waiting, and when it is used."""

import importlib.util
from unittest import mock

import pytest
import torch

from stormplus.torch.kernels import triton
from stormplus.torch.kernels.plain import UntunedCoefficients
from stormplus_bench.simulated_device import SimulatedDevice, on_device, value
from tests.support.kernel_cases import F16, F32, F64, Kind, group_of

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.usefixtures("interpreter"),
]

ONE = torch.ones((), dtype=F64)


def ones(group):
    return UntunedCoefficients(*torch.ones(7, len(group.params), dtype=F64))


def group_with_all_buffers(tensors=2, put=torch.clone):
    kind = Kind(shapes=tuple((3 + i,) for i in range(tensors)))
    lists = kind.pair() | kind.untuned()
    group = group_of(triton, lists)
    for name in lists:
        if name != "coordinates":
            setattr(group, name, [put(tensor) for tensor in getattr(group, name)])
    group.device = group.params[0].device
    return group


@pytest.mark.parametrize("n", [3, 40])
def test_launches_do_not_grow_with_the_number_of_tensors(n, monkeypatch):
    launched = []
    monkeypatch.setattr(triton, "_launch", lambda kernel, *_, **__: launched.append(kernel))
    group = group_with_all_buffers(n)
    triton.any_nonfinite(group)
    triton.move(group, ONE)
    triton.estimate(group, ONE, finite_only=False)
    triton.untuned_step(group, ones(group))
    kernels = ["nonfinite", "move", "estimate", "untuned", "measure"]
    assert launched == [f"{name}_kernel" for name in kernels]


def test_a_pass_on_a_device_does_not_wait_and_copies_its_tables_once(monkeypatch):
    def launch(kernel, programs, **arguments):
        device.launch()
        real_launch(kernel, programs, **{name: value(v) for name, v in arguments.items()})

    real_launch = triton._launch
    monkeypatch.setattr(triton, "_launch", launch)
    with SimulatedDevice("cuda") as device:
        group = group_with_all_buffers(put=device.put)
        rows = UntunedCoefficients(*map(device.put, ones(group)))
        triton.untuned_step(group, rows)
        assert device.counts[1:] == (0, 2, 0), device.where
        device.reset()
        sums = triton.untuned_step(group, rows)
        assert device.counts == (2, 0, 0, 0), device.where
    assert all(map(on_device, sums))


def test_tables_are_made_on_the_cpu_whatever_torchs_default_device():
    with SimulatedDevice("cuda") as device, torch.device("meta"):
        assert value(triton._upload(device.device, (1, 2), False)).tolist() == [1, 2]


def test_a_captured_graph_has_tables_of_its_own_that_stay(monkeypatch):
    monkeypatch.setattr(triton, "_captured_uploads", kept := [])
    with SimulatedDevice("cuda") as device:
        eager = triton._upload(device.device, (1, 2), False)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            captured = triton._upload(device.device, (1, 2), False)
        assert triton._upload(device.device, (1, 2), False) is eager
    assert captured is not eager
    assert [t for _, t in kept] == [captured]


SUPPORTED = {
    "float32": ((F32, F32, F32), True),
    "half precision": ((F16, F32, F32), True),
    "float64": ((F64, F64, F64), False),
    "float16 state": ((F16, F16, F16), False),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_which_tensors_on_a_gpu_are_supported(name):
    dtypes, expected = SUPPORTED[name]
    with SimulatedDevice("cuda") as device:
        tensors = [device.put(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    assert triton.supports(*tensors) == expected
    assert not triton.supports(*map(value, tensors))  # on the CPU
