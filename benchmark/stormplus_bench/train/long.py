"""The workloads of the tier `long`: thousands of steps, augmented images, fine-tuning.

Two of them, the ViT and the low-rank changes, are held out: no decision on `Untuned` has used them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from stormplus_bench.train import catalogue, networks
from stormplus_bench.train.catalogue import Split
from stormplus_bench.train.workload import Network

# Long runs are measured less often; 0.7 is where the target of the performance profiles is.
FRACTIONS = (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1)
HALF = 5  # of the classes
RANK = 4
TRAINED = 3000  # steps of the network that is fine-tuned


def _long(workload: Network, name: str, budget: int) -> Network:
    workload.name, workload.budget, workload.fractions = name, budget, FRACTIONS
    workload.full_grad = False
    return workload


def gpt() -> Network:
    return _long(catalogue.shakespeare(), "gpt-shakespeare-long", 10_000)


def autoencoder() -> Network:
    return _long(catalogue.mnist("autoencoder"), "autoencoder-mnist-long", 10_000)


def resnet() -> Network:
    return _on_cifar10("resnet-cifar10-long", networks.small_resnet, budget=8000, augmented=True)


def vit() -> Network:
    return _on_cifar10("vit-cifar10", networks.ViT, budget=5000, augmented=True)


def finetune() -> Network:
    """All weights of a network that knows the other half of the classes, with a new last layer."""

    def make() -> nn.Module:
        return nn.Sequential(*_body().children(), nn.Linear(1024, HALF))

    return _on_cifar10("finetune-cifar10", make, budget=4000, half=1)


def lora() -> Network:
    """The same with its weights frozen, their changes of low rank, B = 0 at the start."""

    def make() -> nn.Module:
        body = networks.add_low_rank(_body(), RANK)
        return nn.Sequential(*body.children(), nn.Linear(1024, HALF))

    return _on_cifar10("lora-cifar10", make, budget=4000, half=1)


LONG: dict[str, Callable[[], Network]] = {
    "gpt-shakespeare": gpt,
    "resnet-cifar10": resnet,
    "autoencoder-mnist": autoencoder,
    "finetune-cifar10": finetune,
    "vit-cifar10": vit,
    "lora-cifar10": lora,
}


def _on_cifar10(
    name: str,
    make: Callable[[], nn.Module],
    *,
    budget: int,
    augmented: bool = False,
    half: int | None = None,
) -> Network:
    train, valid = catalogue.pictures("cifar10")
    if half is not None:
        train, valid = (_classes(part, half) for part in (train, valid))
    workload = Network(
        name,
        make,
        train,
        valid,
        budget=budget,
        batch_size=32,
        prepare=catalogue.standard,
    )
    if augmented:
        workload.augment = crops_and_flips
    return _long(workload, name, budget)


def _classes(examples: Split, half: int) -> Split:
    """The examples of the first or the second half of the classes, counted from 0."""
    inputs, targets = examples
    chosen = targets // HALF == half
    return inputs[chosen], targets[chosen] % HALF


def _body() -> nn.Module:
    """A copy of the trained network without its last layer."""
    return nn.Sequential(*list(copy.deepcopy(_trained()).children())[:-1])


@lru_cache
def _trained() -> nn.Sequential:
    """The network to fine-tune: trained on the first half of the classes, once a process."""
    make = partial(networks.batchnorm_cnn, HALF)
    workload = _on_cifar10("", make, budget=TRAINED, half=0)
    model = workload.model(0)
    assert isinstance(model, nn.Sequential)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _, sample in zip(range(workload.budget), workload.samples(0)):
        optimizer.zero_grad()
        workload.loss(model, sample).backward()
        optimizer.step()
    return model


def crops_and_flips(images: Tensor, generator: Generator) -> Tensor:
    """Each image moved by up to 4 pixels, black at the edge, and mirrored or not."""
    count, channels, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(9, (2, count, 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    each, channel = torch.arange(count), torch.arange(channels)
    return padded[
        each[:, None, None, None],
        channel[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
