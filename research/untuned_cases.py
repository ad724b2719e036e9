"""Reported cases that `stormplus robust` does not have: `python research/untuned_cases.py SEED...`.

Each is Untuned beside Adam at 1e-3. Rows go to research/results/untuned_cases.jsonl;
research/untuned_study.py makes their table.
"""

import json
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import torch
from common import parser
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from untuned_docstrings import PACKAGES, chosen, package

from stormplus import Untuned
from stormplus_bench.train import robust
from stormplus_bench.train.robust import Case, FromZero, fixed
from stormplus_bench.train.steppers import AtAverage, OneGradient
from stormplus_bench.train.training import Training

ROWS = Path(__file__).parent / "results" / "untuned_cases.jsonl"
METHODS: dict[str, Callable[[Any], OneGradient]] = {
    "Untuned": lambda parameters: AtAverage(Untuned(parameters)),
    "Adam": lambda parameters: OneGradient(torch.optim.Adam(parameters, lr=1e-3)),
}


def text() -> Case:
    """Tf-idf of docstrings, one words-to-classes matrix; the value is the test error."""
    packages = PACKAGES[:12]
    found = [chosen(p, package(p), k) for k, p in enumerate(packages)]
    labels = torch.cat([torch.full((len(texts),), k) for k, texts in enumerate(found)])
    vectors = TfidfVectorizer(ngram_range=(1, 2)).fit_transform(chain(*found))
    order = torch.randperm(len(labels), generator=fixed(0))
    test, train = order[:400], order[400:]

    def logits(model: nn.Module, i: Tensor) -> Tensor:
        scores: Tensor = model(torch.tensor(vectors[i.numpy()].toarray(), dtype=torch.float32))
        return scores

    return Case(
        2000,
        partial(nn.Linear, vectors.shape[1], len(packages)),
        lambda _, generator: train[torch.randint(len(train), (32,), generator=generator)],
        lambda model, i: F.cross_entropy(logits(model, i), labels[i]),
        1.0,
        value=lambda model: (logits(model, test).argmax(1) != labels[test]).float().mean(),
    )


def clicks(*shape: int) -> Case:
    """Twenty of 30,000 features per example, by Zipf's law; weights of this shape from zero."""
    odds = 1 / torch.arange(10.0, 30_010)
    truth = torch.randn(30_000, generator=fixed(8)) / 2

    def draw(count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        i = torch.multinomial(odds, count * 20, True, generator=generator).view(count, 20)
        return i, torch.bernoulli(truth[i].sum(1).sigmoid(), generator=generator)

    return Case(
        3000,
        partial(FromZero, shape),
        lambda _, generator: draw(64, generator),
        lambda model, sample: F.binary_cross_entropy_with_logits(
            model[0][sample[0]].flatten(1).sum(1), sample[1]
        ),
        0.7,
        everything=draw(4000, fixed(12)),
    )


def tanh_layers() -> nn.Module:
    """Twenty layers without a norm."""
    sizes = [64] * 20 + [10]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Matrices(nn.Module):
    """Three matrices without a task, and their initial values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.randn(64, 64) / 8 for _ in range(3))
        self.start = [p.detach().clone() for p in self.layers]


def matrices(draw: Callable[[Generator], Tensor]) -> Case:
    """Three matrices whose gradients are noise; the value is the distance over the start."""

    def distance(model: Any) -> Tensor:
        moved = torch.stack([p - start for p, start in zip(model.layers, model.start)])
        found: Tensor = moved.norm() / torch.stack(model.start).norm()
        return found

    return Case(
        1000,
        Matrices,
        lambda _, generator: draw(generator),
        lambda model, gradient: (torch.stack([*model.layers]) * gradient).sum(),
        1000.0,
        value=distance,
        walk=True,
    )


def skewed(generator: Generator) -> Tensor:
    return torch.where(torch.rand(3, 64, 64, generator=generator) < 0.02, 49.0, -1.0)


def shared(generator: Generator) -> Tensor:
    return torch.randn(1, generator=generator)


CASES: dict[str, Callable[[], Case]] = {
    "text, one matrix": text,
    "clicks, one vector": partial(clicks, 30_000),
    "clicks, an embedding": partial(clicks, 30_000, 1),
    "twenty tanh layers": partial(robust.on_digits, tanh_layers, 1500),
    "skewed noise, matrices": partial(matrices, skewed),
    "noise in one direction, matrices": partial(matrices, shared),
}
GAN = "GAN on a ring"


def gan(make: Callable[[Any], OneGradient], seed: int) -> float:
    """Return the energy distance of a GAN's samples to a ring of eight Gaussians."""
    torch.manual_seed(seed)
    corners = torch.arange(8) * torch.pi / 4
    centres = 2 * torch.stack([corners.cos(), corners.sin()], 1)

    def real(count: int) -> Tensor:
        return centres[torch.randint(8, (count,))] + 0.05 * torch.randn(count, 2)

    def network(inputs: int, outputs: int) -> nn.Module:
        layers = nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
        return nn.Sequential(*layers, nn.Linear(128, outputs))

    generator, critic = network(16, 2), network(2, 1)
    g, c = (make(list(module.parameters())).optimizer for module in (generator, critic))
    for _ in range(3000):
        fake = generator(torch.randn(128, 16))
        c.zero_grad()
        loss = F.softplus(-critic(real(128))).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        c.step()
        g.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        g.step()
    if isinstance(g, Untuned):
        g.eval()
    with torch.no_grad():
        x, y = generator(torch.randn(2000, 16)), real(2000)
        distance = 2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean()
        return float(distance - torch.cdist(y, y).mean())


def run(name: str, method: str, seed: int) -> dict[str, Any]:
    if name == GAN:
        return {"value": gan(METHODS[method], seed)}
    case = CASES[name]()
    training = Training(case, lambda t: METHODS[method](t.parameters), seed).finish()
    row: dict[str, Any] = {"value": training.curve["train_loss"][-1]}
    optimizer: Any = training.stepper.optimizer  # type: ignore[attr-defined]
    if case.walk and isinstance(optimizer, Untuned):
        entries = optimizer.state_dict()["state"].values()
        row["evidence"] = max(float(entry["evidence"]) for entry in entries)
    return row


def main(seeds: list[int]) -> None:
    torch.set_num_threads(1)
    found = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    done = {(row["case"], row["method"], row["seed"]) for row in found}
    for seed, name, method in product(seeds, [*CASES, GAN], METHODS):
        if (name, method, seed) not in done:
            row = {"case": name, "method": method, "seed": seed, **run(name, method, seed)}
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("seeds", nargs="+", type=int)
    main(options.parse_args().seeds)
