"""The launches of a step on a device, counted on tensors without memory."""

import torch

from stormplus import StormPlus
from stormplus_bench.launches import launches
from stormplus_bench.train.networks import resnet34


def test_multi_tensor_passes_start_few_kernels():
    shapes = [p.shape for p in resnet34(1000).parameters()]
    # 110 tensors in some ten lists, with seven calls each, and some fifty for the run's numbers.
    counted = launches(lambda p: StormPlus(p, foreach=True, check_finite=False), shapes)
    assert 50 < counted < 150
    assert launches(lambda p: torch.optim.SGD(p, foreach=True, momentum=0.9), shapes) == 3
