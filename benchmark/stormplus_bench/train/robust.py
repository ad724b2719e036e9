"""The cases of `stormplus robust`: small models that have broken an optimizer, or could.

Each takes seconds on one core. A case has no validation data: its value is the loss over everything
that it samples from.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from typing import Any

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from stormplus_bench.train.networks import add_low_rank, perceptron
from stormplus_bench.train.workload import Workload, seeded


@dataclass(eq=False)
class Case(Workload):
    """One case.

    Attributes:
        budget: Gradients of a run.
        make: Makes the model.
        draw: Returns the sample of step t = 1, 2, ..., with a generator.
        criterion: The loss of the model and a sample.
        chance: The value of a model that has learned nothing; of a walk, the largest distance.
        everything: The sample whose loss is the final value.
        value: The final value instead, of the model.
        walk: Whether there is nothing to learn, and the value is the distance of the weights from
            their start relative to their norm.
    """

    budget: int
    make: Callable[[], nn.Module]
    draw: Callable[[int, Generator], Any]
    criterion: Callable[[Any, Any], Tensor]
    chance: float
    everything: Any = None
    value: Callable[[Any], Tensor] | None = None
    walk: bool = False
    name: str = ""
    batch_size = batches = measured = 1
    fractions = (0, 1)

    def model(self, seed: int) -> nn.Module:
        return seeded(self.make, seed)

    def samples(self, seed: int) -> Iterator[Any]:
        generator = fixed(1000 + seed)
        for t in count(1):
            yield self.draw(t, generator)

    def loss(self, model: nn.Module, sample: Any) -> Tensor:
        return self.criterion(model, sample)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        return {"train_loss": float(self.full_loss(model))}

    def full_loss(self, model: nn.Module) -> Tensor:
        return self.value(model) if self.value else self.criterion(model, self.everything)


def fixed(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def indices(high: int, *shape: int) -> Callable[[int, Generator], Tensor]:
    """Return a `draw` of random indices below `high`."""
    return lambda _, generator: torch.randint(high, shape, generator=generator)


def grid(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the indices of all entries of a matrix."""
    return torch.arange(rows)[:, None], torch.arange(columns)


def _tokens(vocabulary: int, activation: str, scale: float) -> nn.Module:
    """nn.Embedding's N(0, 1) weights, scaled, and three linear layers."""
    act = {"relu": nn.ReLU, "gelu": nn.GELU}[activation]
    embedding = nn.Embedding(vocabulary, 64)
    with torch.no_grad():
        embedding.weight.mul_(scale)
    return nn.Sequential(
        embedding, nn.Linear(64, 128), act(), nn.Linear(128, 128), act(), nn.Linear(128, vocabulary)
    )


def permutation(vocabulary: int, activation: str, scale: float, steps: int) -> Case:
    """Predict the one successor of each token."""
    after = torch.randperm(vocabulary, generator=fixed(100))
    return Case(
        steps,
        partial(_tokens, vocabulary, activation, scale),
        indices(vocabulary, 64),
        lambda model, i: F.cross_entropy(model(i), after[i]),
        math.log(vocabulary),
        everything=torch.arange(vocabulary),
    )


@lru_cache
def _chain(vocabulary: int) -> tuple[Tensor, Tensor]:
    odds = torch.softmax(2.5 * torch.randn(vocabulary, vocabulary, generator=fixed(7)), 1)
    return odds, odds.cumsum(1)


def markov(vocabulary: int, activation: str, scale: float, steps: int) -> Case:
    """A Markov chain: most of the loss is noise, and rare classes give the head large gradients."""
    odds, sums = _chain(vocabulary)

    def draw(_: int, generator: Generator) -> tuple[Tensor, Tensor]:
        i = torch.randint(vocabulary, (64,), generator=generator)
        j = torch.searchsorted(sums[i], torch.rand(64, 1, generator=generator)).squeeze(1)
        return i, j.clamp_max(vocabulary - 1)

    return Case(
        steps,
        partial(_tokens, vocabulary, activation, scale),
        draw,
        lambda model, pair: F.cross_entropy(model(pair[0]), pair[1]),
        math.log(vocabulary),
        everything=(torch.arange(vocabulary), odds),
    )


@lru_cache
def _digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def plain() -> nn.Sequential:
    return perceptron(64, 64, 64, 10)


def on_digits(
    make: Callable[[], nn.Module] = plain,
    steps: int = 1000,
    batch_size: int = 32,
    factor: Callable[[int], float] = lambda t: 1.0,
) -> Case:
    """Digits, with the loss of step t multiplied by `factor(t)`."""
    x, y = _digits()
    draw = indices(len(x), batch_size)

    def loss(model: nn.Module, sample: tuple[float, Any]) -> Tensor:
        scale, i = sample
        return F.cross_entropy(model(x[i]), y[i]) * scale

    return Case(
        steps,
        make,
        lambda t, generator: (factor(t), draw(t, generator)),
        loss,
        math.log(10),
        everything=(1.0, slice(None)),
    )


def zero_last(model: nn.Sequential) -> nn.Module:
    for p in model[-1].parameters():
        nn.init.zeros_(p)
    return model


def unbalanced() -> nn.Module:
    """The same function as `plain`, with weights of very different sizes."""
    model: Any = plain()
    with torch.no_grad():
        model[0].weight.mul_(100)
        model[0].bias.mul_(100)
        model[2].weight.div_(100)
    return model  # type: ignore[no-any-return]


def factorisation() -> Case:
    """Two embeddings whose products are the entries of a matrix of rank 4."""
    n, generator = 500, fixed(3)
    left, right = (torch.randn(n, 4, generator=generator) for _ in range(2))
    matrix = left @ right.T / 2

    def loss(model: Any, place: Any) -> Tensor:
        i, j = place
        return F.mse_loss((model[0](i) * model[1](j)).sum(-1), matrix[i, j])

    return Case(
        2000,
        lambda: nn.ModuleList([nn.Embedding(n, 16), nn.Embedding(n, 16)]),
        indices(n, 2, 256),
        loss,
        float(matrix.square().mean()),
        everything=grid(n, n),
    )


def rare_rows() -> Case:
    """A thousand rows with one target each, one row per step."""
    goal = torch.randn(1000, 4, generator=fixed(4))
    return Case(
        10_000,
        lambda: nn.Embedding(1000, 4),
        lambda t, _: torch.tensor([t % 1000]),
        lambda model, i: 0.5 * F.mse_loss(model(i), goal[i], reduction="sum") / len(i),
        0.5 * float((1 + goal.square()).sum(1).mean()),  # weights N(0, 1) that never moved
        everything=torch.arange(1000),
    )


def rare_network() -> Case:
    """Tokens 0 to 9 in every step; each of a thousand others once in a thousand steps."""
    tokens = 1010
    after = torch.randperm(tokens, generator=fixed(5))

    def draw(t: int, generator: Generator) -> Tensor:
        often = torch.randint(10, (63,), generator=generator)
        return torch.cat([often, torch.tensor([10 + t % 1000])])

    def value(model: nn.Module) -> Tensor:  # as sampled: one of 64 tokens is a rare one
        each = F.cross_entropy(model(torch.arange(tokens)), after, reduction="none")
        return (63 * each[:10].mean() + each[10:].mean()) / 64

    return Case(
        3000,
        partial(_tokens, tokens, "relu", 1.0),
        draw,
        lambda model, i: F.cross_entropy(model(i), after[i]),
        math.log(tokens),
        value=value,
    )


def bag_of_words() -> Case:
    """A wide sparse linear layer: hard for a bound on a tensor's distance."""
    words, generator = 20_000, fixed(8)
    truth = torch.randn(words, generator=generator)
    odds = 1 / torch.arange(10.0, words + 10)  # Zipf

    def texts(count: int, generator: Generator) -> Tensor:
        return torch.multinomial(odds, count * 50, True, generator=generator).view(count, 50)

    def make() -> nn.Module:
        model = nn.EmbeddingBag(words, 2, mode="sum")
        with torch.no_grad():
            model.weight.copy_(nn.Linear(words, 2).weight.T)
        return model

    return Case(
        1000,
        make,
        lambda _, generator: texts(32, generator),
        lambda model, i: F.cross_entropy(model(i), (truth[i].sum(1) > 0).long()),
        math.log(2),
        everything=texts(1000, generator),
    )


class FromZero(nn.ParameterList):
    """Numbers to find, from zero; one tensor per shape."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__(torch.zeros(shape) for shape in shapes)


def copying(*shape: int) -> Case:
    """A tensor whose natural scale is far below its solution's."""
    target = torch.randn(shape, generator=fixed(9))
    make = partial(FromZero, shape)
    return Case(1500, make, lambda *_: None, lambda model, _: F.mse_loss(model[0], target), 1.0)


def item_response() -> Case:
    """Abilities and difficulties, one number each: who answers which question."""
    people, questions, generator = 500, 50, fixed(11)
    ability = torch.randn(people, 1, generator=generator)
    logits = ability - torch.randn(questions, generator=generator)
    answers = torch.bernoulli(logits.sigmoid(), generator=generator)

    def loss(model: Any, place: Any) -> Tensor:
        i, j = place
        return F.binary_cross_entropy_with_logits(model[0][i] - model[1][j], answers[i, j])

    def draw(_: int, generator: Generator) -> tuple[Tensor, Tensor]:
        pairs = torch.randint(people * questions, (64,), generator=generator)
        return pairs // questions, pairs % questions

    make = partial(FromZero, (people,), (questions,))
    return Case(1500, make, draw, loss, math.log(2), everything=grid(people, questions))


def raw_targets() -> Case:
    """Regression on targets of about 150, the diabetes data of scikit-learn."""
    bunch = load_diabetes()
    inputs = torch.tensor(bunch.data / bunch.data.std(0), dtype=torch.float32)
    targets = torch.tensor(bunch.target, dtype=torch.float32)
    return Case(
        1000,
        partial(nn.Linear, 10, 1),
        indices(len(targets), 32),
        lambda model, i: F.mse_loss(model(inputs[i]).squeeze(1), targets[i]),
        float(targets.square().mean()),
        everything=slice(None),
    )


class Walker(nn.Module):
    """Weights without a task, and their initial values."""

    origin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1000))
        self.register_buffer("origin", self.weight.detach().clone())

    def distance(self) -> Tensor:
        found: Tensor = (self.weight - self.origin).norm() / self.origin.norm()
        return found


def walk(steps: int, draw: Callable[[int, Generator], Tensor], furthest: float) -> Case:
    """A run whose gradients are those that `draw` returns."""
    return Case(
        steps,
        Walker,
        draw,
        lambda model, gradient: (model.weight * gradient).sum(),
        furthest,
        value=Walker.distance,
        walk=True,
    )


def noise(_: int, generator: Generator, numbers: int = 1000) -> Tensor:
    """One random number per weight, or a single one, which agrees with itself for a while."""
    return torch.randn(numbers, generator=generator).expand(1000)


def skewed_noise(_: int, generator: Generator) -> Tensor:
    """Looks like a direction until the rare gradient of the other sign comes."""
    return torch.where(torch.rand(1000, generator=generator) < 0.02, 49.0, -1.0)


CASES: dict[str, Callable[[], Case]] = {
    f"{task.__name__}, {v} tokens, {act}, embedding x {scale:g}": partial(
        task, v, act, scale, 1500 if v == 2000 else steps
    )
    for v in (50, 500, 2000)  # with 2000 no method learns anything in fewer steps
    for act, steps in (("relu", 1000), ("gelu", 500))
    for scale in (1.0, 0.02, 10.0)
    for task in (permutation, markov)
}
CASES |= {
    "markov, 500 tokens, relu, 3,000 steps": partial(markov, 500, "relu", 1.0, 3000),
    "digits": on_digits,
    "digits, loss x 1e6": partial(on_digits, factor=lambda t: 1e6),
    "digits, loss x 1e-6": partial(on_digits, factor=lambda t: 1e-6),
    "digits, a layer x 100, the next / 100": partial(on_digits, unbalanced),
    "digits, batches of 1": partial(on_digits, steps=2000, batch_size=1),
    "digits, last layer zero": partial(on_digits, lambda: zero_last(plain())),
    "digits, linear, all zero": partial(on_digits, lambda: zero_last(perceptron(64, 10))),
    "digits, ten ReLU layers": partial(on_digits, partial(perceptron, *[64] * 10, 10), 1500),
    "digits, gradients zero for 500 steps": partial(
        on_digits, steps=1500, factor=lambda t: float(t > 500)
    ),
    "digits, gradients shrink to 1e-20": partial(on_digits, factor=lambda t: 10 ** (-t / 50)),
    "digits, LoRA with B = 0": partial(on_digits, lambda: add_low_rank(plain(), rank=4)),
    "matrix factorisation, N(0, 1)": factorisation,
    "rows that wake once in a thousand steps": rare_rows,
    "a network with such rows": rare_network,
    "bag of 20,000 words": bag_of_words,
    "a vector of 50,000 numbers from zero": partial(copying, 50_000),
    "an image of 3 x 128 x 128 from zero": partial(copying, 3, 128, 128),
    "abilities and difficulties from zero": item_response,
    "linear regression on raw targets": raw_targets,
    # The distance must not feed itself: no step is longer than R, so T steps lead T R away.
    "constant gradient": partial(walk, 10_000, lambda *_: torch.ones(1000), 10_000),
    # The steps must shrink: with R / sqrt(t) a random walk is R sqrt(1 + log T) away.
    "pure noise": partial(walk, 30_000, noise, math.sqrt(1 + math.log(30_000))),
    "skewed noise": partial(walk, 1000, skewed_noise, 1000),
    "noise in one direction": partial(
        walk,
        1000,
        partial(noise, numbers=1),
        math.sqrt(1000),  # steps of R
    ),
}


def case(name: str) -> Case:
    """Return a case by its name."""
    return replace(CASES[name](), name=name)
