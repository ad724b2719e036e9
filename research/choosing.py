"""Three rules, two units, a grid of learning rates: the training loss on the digits.

    python research/choosing.py [perceptron | convolutions | plain_convolutions | --draw-only]

Writes docs/figures/choosing.png and docs/results/choosing.json; about eight minutes on one core.
Every run takes the same number of gradient evaluations, in batches of 64. Adam has its own grid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import COLORS, DOCS, WIDTH, load, parser, save, versions
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from stormplus import SimplifiedStormPlus, Storm, StormPlus, same_sample
from stormplus.torch import PairedOptimizer

EVALUATIONS, SEEDS, BATCH = 600, (0, 1), 64
RULES: dict[str, type[PairedOptimizer]] = {
    "STORM+": StormPlus,
    "simplified STORM+": SimplifiedStormPlus,
    "STORM": Storm,
}
UNITS: tuple[float | str, ...] = (1.0, "first")
RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
METHODS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[float, ...]]] = {
    "Adam": (torch.optim.Adam, (0.001, 0.003, 0.01, 0.03, 0.1))
} | {
    f"{name}, unit {unit}": (partial(rule, unit=unit), RATES)
    for unit in UNITS
    for name, rule in RULES.items()
}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    """The network of `examples/image_classifier.py`, without its dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def plain_convolutions() -> nn.Module:
    """The same without BatchNorm."""
    return nn.Sequential(*(m for m in convolutions() if not isinstance(m, nn.BatchNorm2d)))


MODELS = {
    "perceptron, 64-64-10": perceptron,
    "two convolutions, BatchNorm": convolutions,
    "two convolutions, no BatchNorm": plain_convolutions,
}


def run(
    build: Callable[[], nn.Module],
    make: Callable[[Any], torch.optim.Optimizer],
    images: Tensor,
    labels: Tensor,
    seed: int,
) -> tuple[float, float]:
    """Return the final loss, and the norm of the first gradient (NaN for Adam)."""
    torch.manual_seed(seed)
    model = build()
    opt = make(model.parameters())
    stream = torch.Generator().manual_seed(100 + seed)
    spent, first = 0, float("nan")

    def evaluate(index: Tensor) -> Tensor:
        nonlocal spent
        spent += 1
        opt.zero_grad()
        loss = F.cross_entropy(model(images[index]), labels[index])
        loss.backward()
        return loss

    while spent < EVALUATIONS:
        index = torch.randint(len(images), (BATCH,), generator=stream)
        closure = partial(evaluate, index)
        if isinstance(opt, PairedOptimizer):
            opt.step(same_sample(opt, model)(closure))
            first = opt.diagnostics()["grad_norm"] if spent == 1 else first
        else:
            opt.step(closure)
    with torch.no_grad():  # in train mode: BatchNorm over the whole set, no running statistics
        return F.cross_entropy(model(images), labels).item(), first


def measure(wanted: str | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(targets)
    numbers = load("choosing.json")
    numbers |= {"evaluations": EVALUATIONS, "batch": BATCH, "seeds": list(SEEDS)}
    for title, build in MODELS.items():
        if wanted not in (None, build.__name__):
            continue
        table: dict[str, dict[str, float]] = {}
        for name, (method, rates) in METHODS.items():
            table[name] = {}
            for lr in rates:
                ends = [run(build, partial(method, lr=lr), images, labels, s) for s in SEEDS]
                table[name][f"{lr:g}"] = float(f"{np.mean([loss for loss, _ in ends]):.3g}")
                numbers[f"first gradient, {title}"] = float(f"{ends[0][1]:.3g}")
            print(title, name, table[name], flush=True)
        numbers[title] = table
    return numbers | {"versions": versions() | {"torch": torch.__version__}}


def draw(numbers: dict[str, Any]) -> None:
    figure = Figure(figsize=(WIDTH, 8.6), layout="constrained")
    panels = figure.subplots(len(MODELS), 2, sharey="row")
    for row, title in zip(panels, MODELS):
        table = numbers[title]
        best = min(table["Adam"].values())
        for axis, unit in zip(row, UNITS):
            for name, marker in zip(RULES, "o^D"):
                losses = list(table[f"{name}, unit {unit}"].values())
                axis.loglog(RATES, losses, f"{marker}-", color=COLORS[name], label=name)
            adam = COLORS["Adam"]
            axis.axhline(best, color=adam, linestyle=":", label="Adam, best of its grid")
            axis.set_title(f"{title}, unit={unit!r}", fontsize=9)
            axis.set_ylim(best / 2, 30)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"training loss, {EVALUATIONS} gradients")
    for axis in panels[-1]:
        axis.set_xlabel("lr")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(DOCS / "figures" / "choosing.png", dpi=130)


def main() -> None:
    options = parser(__doc__)
    names = [build.__name__ for build in MODELS.values()]
    options.add_argument("model", nargs="?", choices=names)
    options.add_argument("--draw-only", action="store_true")
    given = options.parse_args()
    if not given.draw_only:
        save("choosing.json", measure(given.model))
    numbers = load("choosing.json")
    if all(title in numbers for title in MODELS):
        draw(numbers)


if __name__ == "__main__":
    main()
