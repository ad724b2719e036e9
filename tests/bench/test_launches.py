"""What a step asks of a device, counted on a simulated one."""

import torch

from stormplus import StormPlus
from stormplus_bench.launches import device_counts
from stormplus_bench.simulated_device import Counts
from stormplus_bench.train.networks import resnet34


def test_adam_takes_seven_launches_on_resnet34():
    shapes = [p.shape for p in resnet34(1000).parameters()]
    counts = device_counts(lambda p: torch.optim.Adam(p, foreach=True), shapes)
    assert counts == Counts(launches=7, syncs=0, h2d=0, d2h=0)


def test_both_halves_of_a_pair_are_counted():
    events = []

    def make(params):
        opt = StormPlus(params)
        opt.register_pass_hook(lambda _, event: events.append(event))
        return opt

    device_counts(make, [torch.Size([3])])
    assert events[-4:] == ["before_move", "after_move", "before_estimate", "after_estimate"]
