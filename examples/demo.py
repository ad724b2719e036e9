"""STORM+ untuned against SGD, Adam and AdaGrad at their defaults, on data that ships with
scikit-learn. Every method gets the same number of gradient evaluations; STORM+ spends two a
step.

    make demo        (python examples/demo.py [--evaluations N] [--out DIR])
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from stormplus import StormPlus

METHODS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "STORM+": StormPlus,
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdaGrad": torch.optim.Adagrad,
}
COLOURS = dict(zip(METHODS, ["#D55E00", "#0072B2", "#009E73", "#CC79A7"], strict=True))


class Logistic:
    """Logistic regression with a bounded non-convex regulariser, on the breast-cancer data."""

    name = "breast cancer, non-convex logistic regression"

    def __init__(self) -> None:
        x, y = load_breast_cancer(return_X_y=True)
        x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
        self.x, self.y = x, torch.tensor(2 * y - 1, dtype=torch.float32)

    def model(self) -> nn.Module:
        model = nn.Linear(self.x.shape[1], 1)
        nn.init.zeros_(model.weight)
        return model

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        w = torch.cat([p.flatten() for p in model.parameters()])
        return F.softplus(-y * model(x).squeeze(1)).mean() + 0.01 * (w**2 / (1 + w**2)).sum()


class Digits:
    """A small network on the digits data."""

    name = "digits, 64-64-10 tanh network"

    def __init__(self) -> None:
        x, y = load_digits(return_X_y=True)
        self.x, self.y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)


def measure(problem: Logistic | Digits, model: nn.Module) -> tuple[float, float]:
    """Loss and gradient norm on all the data."""
    loss = problem.loss(model, problem.x, problem.y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.sqrt(sum(g.square().sum() for g in gradients)).item()


def train(
    problem: Logistic | Digits, method: str, evaluations: int, tick: Callable[[int], None]
) -> list[tuple[int, float, float]]:
    torch.manual_seed(0)
    model = problem.model()
    opt = METHODS[method](list(model.parameters()))
    batches = torch.Generator().manual_seed(1)
    spent, rows = 0, []
    next_row = 1.0
    while spent < evaluations:
        index = torch.randint(len(problem.x), (32,), generator=batches)
        x, y = problem.x[index], problem.y[index]
        before = spent

        def closure() -> Tensor:
            nonlocal spent
            spent += 1
            opt.zero_grad()
            loss = problem.loss(model, x, y)
            loss.backward()
            return loss

        opt.step(closure)
        tick(spent - before)
        if spent >= next_row or spent >= evaluations:
            rows.append((spent, *measure(problem, model)))
            next_row = spent * 1.15 + 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=6000, help="gradients a method may take")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the figure")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small
    console = Console()
    problems = [Logistic(), Digits()]
    figure, axes = plt.subplots(2, len(problems), figsize=(10, 7), sharex=True)
    columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    tables = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=args.evaluations * len(METHODS) * len(problems))
        for column, problem in zip(axes.T, problems):
            table = Table(title=f"{problem.name}, after {args.evaluations} gradient evaluations")
            for heading in ("method (defaults)", "training loss", "gradient norm"):
                table.add_column(heading, justify="left" if "method" in heading else "right")
            for method in METHODS:
                progress.update(task, description=f"{method} on {problem.name.split(',')[0]}")
                rows = train(problem, method, args.evaluations, lambda n: progress.advance(task, n))
                spent, losses, norms = zip(*rows)
                for axis, values in zip(column, (losses, norms)):
                    axis.loglog(spent, values, color=COLOURS[method], label=method)
                table.add_row(method, f"{losses[-1]:.4f}", f"{norms[-1]:.2e}")
            column[0].set_title(problem.name, fontsize=10)
            column[1].set_xlabel("gradient evaluations (batches of 32)")
            tables.append(table)
    axes[0][0].set_ylabel("training loss, all data")
    axes[1][0].set_ylabel("gradient norm, all data")
    axes[0][0].legend()
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "demo.png"
    figure.savefig(target, dpi=120)
    for table in tables:
        console.print(table)
    console.print(f"figure: {target}", soft_wrap=True)


if __name__ == "__main__":
    main()
