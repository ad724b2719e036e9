"""The workloads of the benchmark: smooth problems, and networks on images and text."""

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
    masked_matrix,
    measured_image,
    sample_image,
)
from stormplus_bench import data
from stormplus_bench.train import networks
from stormplus_bench.train.workload import Network, Smooth, Workload

SMOOTH_BATCH = 16
CIFAR_MEAN_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
Split = tuple[Tensor, Tensor]


def _signs(problem: FiniteSum, x: Any) -> float:
    return float((np.sign(problem.data["features"] @ x) == problem.data["targets"]).mean())


def _logistic(name: str, features: Any, positive: Any) -> Smooth:
    order = np.random.default_rng(0).permutation(len(features))
    train, valid = np.split(order, [len(order) * 4 // 5])
    spread = features[train].std(0)
    a = (features[:, spread > 0] - features[train][:, spread > 0].mean(0)) / spread[spread > 0]
    a = np.column_stack([a, np.ones(len(a))])
    y = 2.0 * positive - 1
    seen, unseen = (
        NonConvexLogistic(a[part], y[part], weight=0.01, batch_size=SMOOTH_BATCH)
        for part in (train, valid)
    )
    return Smooth(name, seen, unseen, _signs)


def logistic_breast_cancer() -> Smooth:
    return _logistic("logistic-breast-cancer", *load_breast_cancer(return_X_y=True))


def logistic_digits() -> Smooth:
    """Odd against even."""
    features, digit = load_digits(return_X_y=True)
    return _logistic("logistic-digits", features, digit % 2)


def phase_retrieval() -> Smooth:
    """One digit from Gaussian intensities; other measurements validate."""
    every, truth = measured_image(digit_image(0), oversampling=10)
    seen, unseen = (
        PhaseRetrieval(
            every.data["features"][part], every.data["targets"][part], batch_size=SMOOTH_BATCH
        )
        for part in (slice(8 * truth.size), slice(8 * truth.size, None))
    )
    return Smooth("phase-retrieval", seen, unseen)


def nmf() -> Smooth:
    """Each column has its own code, so there is no validation data."""
    return Smooth("nmf", digits_nmf())


def matrix_completion() -> Smooth:
    """An image from half of its pixels; the other half validates."""
    image = sample_image("china", shrink=8)
    seen, mask = masked_matrix(image, 5, batch_size=64)
    unseen = MatrixCompletion(image.shape, np.argwhere(~mask), image[~mask], 5, batch_size=64)
    return Smooth("matrix-completion", seen, unseen)


SMOOTH: dict[str, Callable[[], Workload]] = {
    "logistic-breast-cancer": logistic_breast_cancer,
    "logistic-digits": logistic_digits,
    "phase-retrieval": phase_retrieval,
    "nmf": nmf,
    "matrix-completion": matrix_completion,
}


def digit_images(count: int, noise: Any = 0.0) -> tuple[Split, Split]:
    """Return scikit-learn's 1797 images of 8 x 8, plus `noise`, and labels: `count` to train."""
    bunch = load_digits()
    images = torch.tensor((bunch.images / 16 + noise)[:, None], dtype=torch.float32)
    labels = torch.tensor(bunch.target)
    order = torch.tensor(np.random.default_rng(0).permutation(len(images)))
    train, valid = order[:count], order[count:]
    return (images[train], labels[train]), (images[valid], labels[valid])


def digits(model: str) -> Network:
    train, valid = digit_images(1437)
    make = {"mlp": networks.mlp, "cnn": networks.digits_cnn}[model]
    return Network(
        f"{model}-digits",
        make,
        **classifier(),
        data=train,
        budget=1500,
        valid=valid,
        full_grad=True,
    )


def mnist(model: str) -> Network:
    train, valid = pictures("mnist")
    return Network(
        f"{model}-mnist",
        {"cnn": networks.mnist_cnn, "autoencoder": networks.autoencoder}[model],
        **(classifier(_unit) if model == "cnn" else {"loss": _pixels}),
        data=train,
        budget=1200,
        valid=valid,
        batch_size=64,
        full_grad=True,
    )


def cifar10(model: str) -> Network:
    settings: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
        "bncnn": (networks.batchnorm_cnn, 800, 1000),
        "resnet": (networks.small_resnet, 400, 500),
    }
    make, budget, measured = settings[model]
    workload = on_cifar10(f"{model}-cifar10", make, budget)
    workload.measured = measured  # a forward pass is expensive
    return workload


def on_cifar10(
    name: str,
    make: Callable[[], nn.Module],
    budget: int,
    choose: Callable[[Split], Split] = lambda examples: examples,
) -> Network:
    """A classifier on CIFAR-10, or on the examples that `choose` returns."""
    train, valid = map(choose, pictures("cifar10"))
    return Network(name, make, **classifier(standard), data=train, budget=budget, valid=valid)


def shakespeare() -> Network:
    return Characters(data.load("shakespeare"))


class Characters(Network):
    """A small GPT on characters: windows of 64, the next character at every place."""

    length = 64

    def __init__(self, text: data.Text) -> None:
        train, valid = (torch.as_tensor(part) for part in (text.train, text.test))
        fixed_train, fixed_valid = (
            self._windows(part, torch.arange(100) * (len(part) // 101)) for part in (train, valid)
        )
        super().__init__(
            "gpt-shakespeare",
            lambda: networks.GPT(len(text.vocabulary), self.length),
            **classifier(),
            data=fixed_train,
            budget=1000,
            valid=fixed_valid,
            batch_size=8,
        )
        self.text = train
        self.batches = math.ceil(len(train) / self.length / self.batch_size)

    def _windows(self, codes: Tensor, starts: Tensor) -> Split:
        windows = codes[starts[:, None] + torch.arange(self.length + 1)]
        return windows[:, :-1], windows[:, 1:]

    def samples(self, seed: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1000 + seed)
        last = len(self.text) - self.length - 1
        while True:
            starts = torch.randint(last, (self.batch_size,), generator=generator)
            yield self._windows(self.text, starts)


@lru_cache
def pictures(name: str) -> tuple[Split, Split]:
    found = data.load(name)
    assert isinstance(found, data.Images)
    train = torch.from_numpy(found.train_x), torch.from_numpy(found.train_y)
    return train, (torch.from_numpy(found.test_x), torch.from_numpy(found.test_y))


def _unit(x: Tensor) -> Tensor:
    return x.float() / 255


def standard(x: Tensor) -> Tensor:
    mean, std = (x.new_tensor(v, dtype=torch.float32)[:, None, None] for v in CIFAR_MEAN_STD)
    return (x.float() / 255 - mean) / std


def classifier(prepare: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Any]:
    """Return the loss and the measures of a classifier; `prepare` turns its inputs into floats."""

    def loss(model: nn.Module, batch: Split) -> Tensor:
        return F.cross_entropy(model(prepare(batch[0])), batch[1])

    def measures(model: nn.Module, batch: Split) -> dict[str, Tensor]:
        """Cross entropy and accuracy from one forward pass."""
        logits, targets = model(prepare(batch[0])), batch[1]
        accuracy = (logits.argmax(1) == targets).double().mean()
        return {"loss": F.cross_entropy(logits, targets), "accuracy": accuracy}

    return {"loss": loss, "measures": measures}


def _pixels(model: nn.Module, batch: Split) -> Tensor:
    """Binary cross entropy of reconstructed pixels, averaged over the image."""
    images = _unit(batch[0])
    return F.binary_cross_entropy_with_logits(model(images), images.flatten(1))


# By data set and model.
NETWORKS: dict[str, dict[str, Callable[[], Network]]] = {
    "digits": {model: partial(digits, model) for model in ("mlp", "cnn")},
    "mnist": {model: partial(mnist, model) for model in ("cnn", "autoencoder")},
    "cifar10": {model: partial(cifar10, model) for model in ("bncnn", "resnet")},
    "shakespeare": {"gpt": shakespeare},
}
# By name.
EVERY: dict[str, Callable[[], Workload]] = SMOOTH | {
    f"{model}-{data}": make for data, makes in NETWORKS.items() for model, make in makes.items()
}
