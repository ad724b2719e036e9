"""Workloads that are judged by validation."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_digits

from stormplus_bench.train import networks
from stormplus_bench.train.catalogue import classifier
from stormplus_bench.train.workload import Network


def noisy_digits() -> Network:
    """A ResNet that can learn 1,400 noisy digits by heart: 20 epochs."""
    bunch = load_digits()
    noise = np.random.default_rng(5).normal(0, 0.3, bunch.images.shape)
    images = torch.tensor((bunch.images / 16 + noise)[:, None], dtype=torch.float32)
    labels = torch.tensor(bunch.target)
    order = torch.tensor(np.random.default_rng(0).permutation(len(images)))
    train, valid = order[:1400], order[1400:]
    workload = Network(
        "resnet-noisy-digits",
        partial(networks.small_resnet, 1, (16, 16, 32)),
        **classifier(),
        data=(images[train], labels[train]),
        budget=20 * (1400 // 32),
        valid=(images[valid], labels[valid]),
    )
    workload.fractions = (0, 0.5, 0.7, 1)
    return workload


SMALL_DATA: dict[str, Callable[[], Network]] = {
    "resnet-noisy-digits": noisy_digits,
}
