"""Workloads that are judged by validation."""

from collections.abc import Callable
from functools import partial

import numpy as np

from stormplus_bench.train import networks
from stormplus_bench.train.catalogue import classifier, digit_images
from stormplus_bench.train.workload import Network


def noisy_digits() -> Network:
    """A ResNet that can learn 1,400 noisy digits by heart: 20 epochs."""
    train, valid = digit_images(1400, np.random.default_rng(5).normal(0, 0.3, (1797, 8, 8)))
    workload = Network(
        "resnet-noisy-digits",
        partial(networks.small_resnet, 1, (16, 16, 32)),
        **classifier(),
        data=train,
        budget=20 * (1400 // 32),
        valid=valid,
    )
    workload.fractions = (0, 0.5, 0.7, 1)
    return workload


SMALL_DATA: dict[str, Callable[[], Network]] = {
    "resnet-noisy-digits": noisy_digits,
}
