"""The workloads of the suite `long`: thousands of steps, augmented images, fine-tuning.

The ViT and LoRA are held out: no decision on `Untuned` has used them.
"""

import copy
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from stormplus_bench.train import catalogue, networks
from stormplus_bench.train.catalogue import Split, on_cifar10
from stormplus_bench.train.steppers import OneGradient
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Network

# Fewer measurements; the target of the performance profiles is read off at 0.7.
FRACTIONS = (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1)
HALF = 5  # of the classes
TRAINED = 3000  # steps of the network that is fine-tuned


def _long(workload: Network, name: str, budget: int) -> Network:
    workload.name, workload.budget, workload.fractions = name, budget, FRACTIONS
    workload.full_grad = False
    return workload


def gpt() -> Network:
    return _long(catalogue.shakespeare(), "gpt-shakespeare-long", 10_000)


def autoencoder() -> Network:
    return _long(catalogue.mnist("autoencoder"), "autoencoder-mnist-long", 10_000)


def augmented(name: str, make: Callable[[], nn.Module], budget: int) -> Network:
    workload = on_cifar10(name, make, budget)
    workload.augment = crops_and_flips
    return _long(workload, name, budget)


def finetune(name: str, rank: int | None = None) -> Network:
    """A network trained on the other half of the classes, with a new last layer.

    All weights are trained; with a `rank`, only the last layer and changes of low rank.
    """

    def make() -> nn.Module:
        body: nn.Module = copy.deepcopy(_trained())[:-1]
        if rank is not None:
            networks.add_low_rank(body, rank)
        return nn.Sequential(*body.children(), nn.Linear(1024, HALF))

    return _long(on_cifar10(name, make, 4000, _second_half), name, 4000)


LONG: dict[str, Callable[[], Network]] = {
    "gpt-shakespeare": gpt,
    "resnet-cifar10": partial(augmented, "resnet-cifar10-long", networks.small_resnet, 8000),
    "autoencoder-mnist": autoencoder,
    "finetune-cifar10": partial(finetune, "finetune-cifar10"),
    "vit-cifar10": partial(augmented, "vit-cifar10", networks.ViT, 5000),
    "lora-cifar10": partial(finetune, "lora-cifar10", rank=4),
}


def _classes(examples: Split, half: int) -> Split:
    """Return the examples of the first (0) or second (1) half of the classes, relabelled from 0."""
    inputs, targets = examples
    chosen = targets // HALF == half
    return inputs[chosen], targets[chosen] % HALF


_first_half, _second_half = (partial(_classes, half=half) for half in (0, 1))


@lru_cache
def _trained() -> Any:
    """Return the network to fine-tune, trained on the first half of the classes."""
    workload = on_cifar10("", partial(networks.batchnorm_cnn, HALF), TRAINED, _first_half)
    run = Training(workload, lambda t: OneGradient(torch.optim.Adam(t.parameters, lr=1e-3)), 0)
    run.advance(TRAINED)
    return run.model


def crops_and_flips(images: Tensor, generator: Generator) -> Tensor:
    """Shift each image by up to 4 pixels, black at the edge, and mirror half of them."""
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
