"""The simulated device counts launches, copies and waits as torch's CUDA code has them."""

from functools import partial

import pytest
import torch
from torch import nn

from stormplus_bench.simulated_device import Counts, SimulatedDevice, device_counts, value


@pytest.fixture
def device():
    with SimulatedDevice("cuda") as device:
        yield device


adam = partial(torch.optim.Adam, foreach=True)
sgd = partial(torch.optim.SGD, momentum=0.9, foreach=True)


# Adam calls lerp_, mul_, addcmul_, sqrt, div_, add_ and addcdiv_; SGD mul_ and two add_. A counting
# stand-in for the CUDA runtime also saw 7 launches for Adam on the 110 tensors of ResNet34.
# Where shapes differ, two of the 17 calls of capturable Adam take the slow route: they divide a
# list of tensors by a list of 0-dimensional tensors.
@pytest.mark.parametrize("tensors", [20, 110])
@pytest.mark.parametrize(
    ("make", "launches", "per_tensor"),
    [(adam, 7, 0), (sgd, 3, 0), (partial(adam, capturable=True), 15, 2)],
    ids=["Adam", "SGD", "capturable Adam"],
)
def test_a_multi_tensor_step_has_the_launches_of_its_calls_and_no_sync(
    make, launches, per_tensor, tensors
):
    counts = device_counts(make, [(3, i % 5 + 1) for i in range(tensors)])
    assert counts == Counts(launches + per_tensor * tensors, syncs=0, h2d=0, d2h=0)


MULTI_TENSOR = {  # what is done to a list of four tensors, and its launches
    "scalar on the device": (lambda a, put: torch._foreach_mul_(a, put(torch.tensor(2.0))), 1),
    "float64 scalar": (lambda a, put: torch._foreach_mul_(a, put(torch.tensor(2.0).double())), 4),
    "scalar on the CPU": (lambda a, put: torch._foreach_mul_(a, torch.tensor(2.0).double()), 1),
    "numbers": (lambda a, put: torch._foreach_mul_(a, [1.0, 2.0, 3.0, 4.0]), 1),
    "two dtypes": (lambda a, put: torch._foreach_add_(a, [t.double() for t in a]), 4),
    "copy of two dtypes": (lambda a, put: torch._foreach_copy_([t.double() for t in a], a), 1),
    "two strides": (lambda a, put: torch._foreach_add(a, [t.t() for t in a]), 4),
    "gaps": (lambda a, put: torch._foreach_neg_([t[:, :1] for t in a]), 4),
    "norm": (lambda a, put: torch._foreach_norm(a), 3),
}


@pytest.mark.parametrize("case", MULTI_TENSOR)
def test_a_multi_tensor_call_is_one_launch_only_on_the_fast_route(device, case):
    operation, launches = MULTI_TENSOR[case]
    operation([device.put(torch.ones(2, 2)) for _ in range(4)], device.put)
    calls = {name: n for (_, name, _), n in device.where.items() if name.startswith("_foreach_")}
    assert list(calls.values()) == [launches]


CALLS = {  # what is done with x on the device and h on the CPU: launches, syncs, h2d, d2h
    "item": (lambda x, h: x.sum().item(), (1, 1, 0, 0)),
    "equal": (lambda x, h: torch.equal(x, x), (1, 1, 0, 0)),
    "read with a mask": (lambda x, h: x[x > 1], (3, 1, 0, 0)),
    "blocking copy to the CPU": (lambda x, h: h.copy_(x), (0, 1, 0, 1)),
    "copy to the CPU": (lambda x, h: x.to("cpu", non_blocking=True), (0, 0, 0, 1)),
    "blocking copy from the CPU": (lambda x, h: x.copy_(h), (0, 1, 1, 0)),
    "copy from the CPU": (lambda x, h: h.to("cuda", non_blocking=True), (0, 0, 1, 0)),
    "constant": (lambda x, h: torch.tensor([1.0], device="cuda"), (0, 1, 1, 0)),
    "views": (lambda x, h: x.view(-1)[1:].detach(), (0, 0, 0, 0)),
    "allocation": (lambda x, h: torch.empty_like(x), (0, 0, 0, 0)),
    "zeros": (lambda x, h: torch.zeros(3, device="cuda"), (1, 0, 0, 0)),
    "backward": (lambda x, h: nn.Parameter(x).sum().backward(), (3, 0, 0, 0)),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_are_counted(device, case):
    call, counts = CALLS[case]
    call(device.put(torch.ones(2, 3)), torch.ones(2, 3))
    assert device.counts == counts, device.where


def test_a_write_through_a_view_is_seen_and_counted_as_a_version(device):
    x = device.put(torch.zeros(2, 3))
    x.view(-1)[4:].fill_(1.0)
    assert (value(x).tolist(), x._version) == ([[0, 0, 0], [0, 1, 1]], 1)


def test_tensors_on_two_devices_do_not_mix(device):
    with pytest.raises(RuntimeError, match="other on the wrong device"):
        device.put(torch.ones(3)).add_(torch.ones(3))


def test_a_device_without_float64_names_the_operation_and_the_line():
    library = compile("\ny = x.sum().double()", "/src/stormplus/torch/rule.py", "exec")
    message = r"_to_copy at torch/rule\.py:2 creates torch\.float64 on mps"
    with SimulatedDevice("mps", float64=False) as device, pytest.raises(TypeError, match=message):
        exec(library, {"x": device.put(torch.ones(3))})
