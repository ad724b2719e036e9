"""Three rules, two norms, a grid of learning rates: what each reaches on the digits.

    python docs/scripts/choosing.py

Writes `docs/figures/choosing.png` and `docs/results/choosing.json`; about five minutes on
one core. Every run takes the same number of gradient evaluations, in batches of 64; the
loss is that of the training set. Adam, at the rates of a grid of its own, is the yardstick.
"""

from __future__ import annotations

import json
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
from stormplus.theory.rates.report import versions
from stormplus.torch.optimizer import StormOptimizer

DOCS = Path(__file__).parents[1]
EVALUATIONS, SEEDS, BATCH = 600, (0, 1), 64
RULES: dict[str, type[StormOptimizer]] = {
    "STORM+": StormPlus,
    "simplified STORM+": SimplifiedStormPlus,
    "STORM": Storm,
}
RATES = {
    "raw": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    "mean": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
}
ADAM_RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
COLOURS = dict(zip(RULES, ("#D55E00", "#0072B2", "#009E73"), strict=True))


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
        if isinstance(opt, StormOptimizer):
            opt.step(same_sample(opt, model)(closure))
            first = opt.diagnostics()["grad_norm"] if spent == 1 else first
        else:
            opt.step(closure)
    with torch.no_grad():  # in train mode: BatchNorm over the whole set, no running statistics
        return F.cross_entropy(model(images), labels).item(), first


def main() -> None:
    torch.set_num_threads(1)
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(targets)
    numbers: dict[str, Any] = {
        "command": "python docs/scripts/choosing.py",
        "evaluations": EVALUATIONS, "batch": BATCH, "seeds": list(SEEDS),
    }  # fmt: skip
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    panels = figure.subplots(len(MODELS), 2, sharey="row")
    for row, (title, build) in zip(panels, MODELS.items()):
        adam = {}
        for lr in ADAM_RATES:
            make = partial(torch.optim.Adam, lr=lr)
            adam[lr] = np.mean([run(build, make, images, labels, s)[0] for s in SEEDS])
        best = min(adam.values())
        table: dict[str, Any] = {"Adam": {f"{lr:g}": float(f"{v:.3g}") for lr, v in adam.items()}}
        for axis, (norm, rates) in zip(row, RATES.items()):
            for name, rule in RULES.items():
                losses = []
                for lr in rates:
                    chosen = partial(rule, lr=lr, norm=norm)
                    ends = [run(build, chosen, images, labels, s) for s in SEEDS]
                    losses.append(float(np.mean([loss for loss, _ in ends])))
                    numbers[f"first gradient, {title}"] = float(f"{ends[0][1]:.3g}")
                entry = {f"{lr:g}": float(f"{loss:.3g}") for lr, loss in zip(rates, losses)}
                table[f"{name}, {norm}"] = entry
                print(title, norm, name, entry, flush=True)
                axis.loglog(rates, losses, "o-", color=COLOURS[name], label=name)
            axis.axhline(best, color="grey", linestyle=":", label="Adam, best of its grid")
            axis.set_title(f'{title}, norm="{norm}"', fontsize=10)
            axis.set_ylim(best / 2, 30)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"training loss, {EVALUATIONS} gradients")
        numbers[title] = table
    for axis in panels[-1]:
        axis.set_xlabel("lr")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(DOCS / "figures" / "choosing.png", dpi=90)
    numbers["versions"] = versions() | {"torch": torch.__version__}
    (DOCS / "results" / "choosing.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
