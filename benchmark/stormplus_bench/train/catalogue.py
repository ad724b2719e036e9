"""The workloads that there are: smooth problems, and networks on real images and text.

Data too large to ship is read from the folder `$STORMPLUS_DATA`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from stormplus.theory.problems import (
    FiniteSum,
    MatrixCompletion,
    NonConvexLogistic,
    PhaseRetrieval,
    digit_image,
    digits_nmf,
    sample_image,
)
from stormplus_bench import data
from stormplus_bench.train import networks
from stormplus_bench.train.workload import FRACTIONS, Network, Smooth, Workload

SMOOTH_BUDGET = 1500
SMOOTH_BATCH = 16
PAPER_BATCH = 100
CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2470, 0.2435, 0.2616)
Split = tuple[Tensor, Tensor]


def or_reason(make: Callable[[], Workload], budget: int | None = None) -> dict[str, Any]:
    """A workload whose data is not there is skipped with the reason, not an error."""
    try:
        workload = make()
    except data.MissingData as missing:
        return {"workload": None, "reason": str(missing)}
    set_budget(workload, budget)
    return {"workload": workload, "reason": None}


def set_budget(workload: Workload, budget: int | None) -> None:
    """Another budget is another workload, with a name of its own."""
    if budget and budget != workload.budget:
        workload.budget = budget
        workload.name = f"{workload.name} ({budget} evaluations)"


def _signs(problem: FiniteSum, x: Any) -> float:
    return float((np.sign(problem.data["features"] @ x) == problem.data["targets"]).mean())


def _logistic(name: str, features: Any, positive: Any) -> Smooth:
    rng = np.random.default_rng(0)
    order = rng.permutation(len(features))
    train, valid = np.split(order, [len(order) * 4 // 5])
    spread = features[train].std(0)
    a = (features[:, spread > 0] - features[train][:, spread > 0].mean(0)) / spread[spread > 0]
    a = np.column_stack([a, np.ones(len(a))])
    y = 2.0 * positive - 1
    seen, unseen = (
        NonConvexLogistic(a[part], y[part], weight=0.01, batch_size=SMOOTH_BATCH)
        for part in (train, valid)
    )
    return Smooth(name, seen, unseen, _signs, budget=SMOOTH_BUDGET)


def logistic_breast_cancer() -> Smooth:
    bunch = load_breast_cancer()
    return _logistic("logistic-breast-cancer", bunch.data, bunch.target)


def logistic_digits() -> Smooth:
    """Odd against even."""
    bunch = load_digits()
    return _logistic("logistic-digits", bunch.data, bunch.target % 2)


def phase_retrieval() -> Smooth:
    """One digit from Gaussian intensities; unseen measurements for validation."""
    truth = digit_image(0).ravel()
    truth = truth / np.sqrt((truth * truth).mean())
    rng = np.random.default_rng(0)
    a = rng.standard_normal((10 * truth.size, truth.size)) / np.sqrt(truth.size)
    y = (a @ truth) ** 2
    cut = 8 * truth.size
    seen = PhaseRetrieval(a[:cut], y[:cut], batch_size=SMOOTH_BATCH)
    unseen = PhaseRetrieval(a[cut:], y[cut:], batch_size=SMOOTH_BATCH)
    return Smooth("phase-retrieval", seen, unseen, budget=SMOOTH_BUDGET)


def nmf() -> Smooth:
    """Every column has a code of its own: nothing is left unseen."""
    return Smooth("nmf", digits_nmf(), budget=SMOOTH_BUDGET)


def matrix_completion() -> Smooth:
    """An image from half of its pixels; the other half for validation."""
    image = sample_image("china", shrink=8)
    mask = np.random.default_rng(0).random(image.shape) < 0.5
    seen, unseen = (
        MatrixCompletion(image.shape, np.argwhere(m), image[m], 5, batch_size=64)
        for m in (mask, ~mask)
    )
    return Smooth("matrix-completion", seen, unseen, budget=SMOOTH_BUDGET)


SMOOTH = {
    "logistic-breast-cancer": logistic_breast_cancer,
    "logistic-digits": logistic_digits,
    "phase-retrieval": phase_retrieval,
    "nmf": nmf,
    "matrix-completion": matrix_completion,
}


def digits(model: str) -> Network:
    """Embedded: 1797 images of 8 x 8."""
    bunch = load_digits()
    images = torch.tensor(bunch.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(bunch.target)
    order = torch.tensor(np.random.default_rng(0).permutation(len(images)))
    train, valid = order.split([1437, 360])
    return Network(
        f"{model}-digits",
        {"mlp": networks.mlp, "cnn": networks.digits_cnn}[model],
        (images[train], labels[train]),
        (images[valid], labels[valid]),
        budget=1500,
        batch_size=32,
        full_grad=True,
    )


def mnist(model: str) -> Network:
    train, valid = pictures("mnist")
    if model == "cnn":
        return Network(
            "cnn-mnist",
            networks.mnist_cnn,
            train,
            valid,
            budget=1200,
            batch_size=64,
            prepare=_unit,
            full_grad=True,
        )
    return Network(
        "autoencoder-mnist",
        networks.autoencoder,
        (train[0], train[0]),
        (valid[0], valid[0]),
        budget=1200,
        batch_size=64,
        prepare=_unit,
        criterion=_pixels,
        classes=False,
        full_grad=True,
    )


def cifar10(model: str) -> Network:
    train, valid = pictures("cifar10")
    make: Callable[[], nn.Module]
    make, budget = {
        "bncnn": (networks.batchnorm_cnn, 800),
        "resnet": (networks.small_resnet, 400),
    }[model]
    workload = Network(
        f"{model}-cifar10",
        make,
        train,
        valid,
        budget=budget,
        batch_size=32,
        prepare=standard,
    )
    workload.measured = 1000 if model == "bncnn" else 500  # a forward pass of the other is dear
    return workload


def course(images: int, epochs: int) -> Network:
    """The paper's experiment to its end, on few images, as many of each class.

    The budget counts samples, so that every method sees so many epochs.
    """
    (inputs, targets), valid = pictures("cifar10")
    chosen = balanced(targets, images)
    workload = Network(
        f"resnet34-cifar10 ({images} images, {epochs} epochs)",
        networks.resnet34,
        (inputs[chosen], targets[chosen]),
        valid,
        budget=epochs * images // PAPER_BATCH,
        batch_size=PAPER_BATCH,
        prepare=standard,
    )
    workload.counts = "samples"
    if images >= 1000:  # else it is run to see that it runs
        workload.measured = len(valid[0])  # all of both
    workload.resumes = workload.watches = True
    return workload


def balanced(targets: Tensor, count: int) -> Tensor:
    """The places of the first examples of each class, as many of each, in order."""
    classes = int(targets.max()) + 1
    if count % classes:
        raise ValueError(f"images must be a multiple of {classes} classes, got {count}")
    places = [torch.nonzero(targets == k)[: count // classes, 0] for k in range(classes)]
    return torch.cat(places).sort().values


def paper(images: int, budget: int) -> Network:
    """The paper's experiment: ResNet34 on CIFAR-10, batches of 100, no augmentation."""
    (inputs, targets), valid = pictures("cifar10")
    workload = Network(
        f"resnet34-cifar10 ({images} images, {budget} evaluations)",
        networks.resnet34,
        (inputs[:images], targets[:images]),
        valid,
        budget=budget,
        batch_size=PAPER_BATCH,
        prepare=standard,
    )
    if images < len(inputs):  # a sweep: the end is what ranks
        workload.measured, workload.fractions = min(1000, images), (0, 1)
    elif budget < 1000:
        workload.measured = 1000
    else:
        workload.fractions = tuple(sorted({*FRACTIONS, *np.linspace(0, 1, 21)}))
    if budget >= 5000:  # a GPU: the whole test set
        workload.measured = 10_000
    return workload


def shakespeare() -> Network:
    return Characters(data.load("shakespeare"))


class Characters(Network):
    """A small GPT on characters: windows of 64, the next character at every place."""

    length = 64

    def __init__(self, text: data.Text) -> None:
        train, valid = (torch.as_tensor(part) for part in (text.train, text.test))
        fixed = [
            self._windows(part, torch.arange(100) * (len(part) // 101)) for part in (train, valid)
        ]
        super().__init__(
            "gpt-shakespeare",
            lambda: networks.GPT(len(text.vocabulary), self.length),
            *fixed,
            budget=1000,
            batch_size=8,
        )
        self.text = train
        self.batches = math.ceil(len(train) / self.length / self.batch_size)

    def _windows(self, codes: Tensor, starts: Tensor) -> Split:
        places = starts[:, None] + torch.arange(self.length + 1)
        windows = codes[places]
        return windows[:, :-1], windows[:, 1:]

    def samples(self, seed: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1000 + seed)
        last = len(self.text) - self.length - 1
        while True:
            yield self._windows(
                self.text, torch.randint(last, (self.batch_size,), generator=generator)
            )


@lru_cache
def pictures(name: str) -> tuple[Split, Split]:
    found = data.load(name)
    assert isinstance(found, data.Images)
    train = torch.from_numpy(found.train_x), torch.from_numpy(found.train_y)
    return train, (torch.from_numpy(found.test_x), torch.from_numpy(found.test_y))


def _unit(x: Tensor) -> Tensor:
    return x.float() / 255


def standard(x: Tensor) -> Tensor:
    mean, std = torch.tensor(CIFAR_MEAN)[:, None, None], torch.tensor(CIFAR_STD)[:, None, None]
    return (x.float() / 255 - mean) / std


def _pixels(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of pixels, summed over the image and divided by its size."""
    return F.binary_cross_entropy_with_logits(logits, _unit(target).flatten(1))


# All of them, by name.
EVERY: dict[str, Callable[[], Workload]] = {
    **SMOOTH,
    "mlp-digits": partial(digits, "mlp"),
    "cnn-digits": partial(digits, "cnn"),
    "cnn-mnist": partial(mnist, "cnn"),
    "autoencoder-mnist": partial(mnist, "autoencoder"),
    "bncnn-cifar10": partial(cifar10, "bncnn"),
    "resnet-cifar10": partial(cifar10, "resnet"),
    "gpt-shakespeare": shakespeare,
}
