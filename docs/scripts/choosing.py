"""Three rules, two norms, a grid of learning rates: what each reaches on the digits.

    python docs/scripts/choosing.py [--draw-only]

Writes `docs/figures/choosing.png` and `docs/results/choosing.json`; about five minutes on
one core. Every run takes the same number of gradient evaluations, in batches of 64; the
loss is that of the training set. Adam, at the rates of a grid of its own, is the yardstick.
`--draw-only` draws the committed numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from stormplus import SimplifiedStormPlus, Storm, StormPlus, same_sample
from stormplus.theory.palette import PALETTE, WIDTH
from stormplus.theory.rates import versions
from stormplus.torch import PairedOptimizer

DOCS = Path(__file__).parents[1]
RESULT = DOCS / "results" / "choosing.json"
EVALUATIONS, SEEDS, BATCH = 600, (0, 1), 64
RULES: dict[str, type[PairedOptimizer]] = {
    "STORM+": StormPlus,
    "simplified STORM+": SimplifiedStormPlus,
    "STORM": Storm,
}
RATES = {
    "raw": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    "mean": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
}
ADAM_RATES = (0.001, 0.003, 0.01, 0.03, 0.1)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    """The network of `examples/image_classifier.py`, without its dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


MODELS = {"perceptron, 64-64-10": perceptron, "two convolutions, BatchNorm": convolutions}


def run(
    build: Callable[[], nn.Module],
    make: Callable[[Any], torch.optim.Optimizer],
    images: Tensor,
    labels: Tensor,
    seed: int,
) -> tuple[float, float]:
    """The final loss, and the norm of the first gradient (NaN for Adam, which has no say)."""
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


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(targets)
    numbers: dict[str, Any] = {
        "command": "python docs/scripts/choosing.py",
        "evaluations": EVALUATIONS, "batch": BATCH, "seeds": list(SEEDS),
    }  # fmt: skip
    plan: list[tuple[str, Callable[..., torch.optim.Optimizer], tuple[float, ...]]] = [
        ("Adam", torch.optim.Adam, ADAM_RATES)
    ]
    for norm, rates in RATES.items():
        plan += [
            (f"{name}, {norm}", partial(rule, norm=norm), rates) for name, rule in RULES.items()
        ]
    for title, build in MODELS.items():
        table: dict[str, dict[str, float]] = {}
        for name, method, rates in plan:
            table[name] = {}
            for lr in rates:
                ends = [run(build, partial(method, lr=lr), images, labels, s) for s in SEEDS]
                table[name][f"{lr:g}"] = float(f"{np.mean([loss for loss, _ in ends]):.3g}")
                numbers[f"first gradient, {title}"] = float(f"{ends[0][1]:.3g}")
            print(title, name, table[name], flush=True)
        numbers[title] = table
    return numbers | {"versions": versions() | {"torch": torch.__version__}}


def draw(numbers: dict[str, Any]) -> None:
    figure = Figure(figsize=(WIDTH, 6.0), layout="constrained")
    panels = figure.subplots(len(MODELS), 2, sharey="row")
    for row, title in zip(panels, MODELS):
        table = numbers[title]
        best = min(table["Adam"].values())
        for axis, (norm, rates) in zip(row, RATES.items()):
            for name, marker in zip(RULES, "o^D"):
                losses = list(table[f"{name}, {norm}"].values())
                axis.loglog(rates, losses, f"{marker}-", color=PALETTE[name], label=name)
            adam = PALETTE["Adam"]
            axis.axhline(best, color=adam, linestyle=":", label="Adam, best of its grid")
            axis.set_title(f'{title}, norm="{norm}"', fontsize=9)
            axis.set_ylim(best / 2, 30)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"training loss, {EVALUATIONS} gradients")
    for axis in panels[-1]:
        axis.set_xlabel("lr")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(DOCS / "figures" / "choosing.png", dpi=130)


def main() -> None:
    if "--draw-only" not in sys.argv:
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n")
    draw(json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main()
