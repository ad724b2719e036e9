"""The paper's experiment: ResNet34 on CIFAR-10, batches of 100, every method at its best rate.

    python research/paper_experiment.py --data FOLDER    # of cifar-10-batches-bin; runs or goes on
    python research/paper_experiment.py --figures        # table and figures; copies the rows

Rates come from 2-epoch sweeps over half decades, extended until the best one (lowest training loss)
lies between two others. Every method then trains for 15 epochs at its best rate with two seeds, and
with one seed at the rate of the best test accuracy, if that is another one. A run of a sweep is the
beginning of the long run at that rate. Every epoch saves a checkpoint, OUT/<run>.pt, and appends a
row to OUT/rows.jsonl, so a killed process goes on where it stopped. Processes with different
`--methods` may run at once. Columns of a row:

    gradients                   gradient evaluations of a mini-batch so far
    epoch_loss                  mean over the epoch's mini-batches, each before its step
    train_loss, train_accuracy  in eval mode, on 2,000 training images, always the same
    test_loss, test_accuracy    in eval mode, on all 10,000 test images, at the end of some epochs
    gain, step_size, d_over_g   a, eta and |d| / |g| after the epoch's last step
    full_grad_sq, error_sq, batch_error_sq     see `Run.estimator_error`
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, Optimizer

from stormplus import SimplifiedStormPlus, StormPlus, Untuned, recalibrate, same_sample
from stormplus.torch import PairedOptimizer
from stormplus_bench.data import cifar10
from stormplus_bench.train.catalogue import standard
from stormplus_bench.train.networks import resnet34

BATCH = 100
SUBSET = 2000  # training images in a measurement
CALIBRATION = 50  # mini-batches for BatchNorm's statistics at the average of Untuned
MOST_VALUES = 9  # of a rate, or of c, in a sweep
Row = dict[str, Any]
Rule = Callable[[Row, float, list[Tensor]], tuple[float, float]]  # gives gain and step size


class TwoGradients(Optimizer):
    """d <- g + (1 - a)(d - g~) in plain torch, for rules which the library does not have.

    Scalars live in the parameter group, so `state_dict` has them. The first gradient is kept as a
    reference, as in the authors' code of STORM+: if the closure zeroes `.grad` in place, the second
    gradient overwrites it, and the correction g - g~ is zero.
    """

    def __init__(self, model: nn.Module, lr: float, rule: Rule, c: float | None = None) -> None:
        scalars = ("sum_g_sq", "sum_d_sq_over_a", "largest_g_sq", "gain", "step_size")
        super().__init__(model.parameters(), {"lr": lr, "c": c, **dict.fromkeys(scalars, 0.0)})
        self.model, self.rule = model, rule

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        group, evaluate = self.param_groups[0], torch.enable_grad()(closure)
        params = group["params"]
        if not self.state:
            loss = evaluate()
            for p in params:
                self.state[p]["estimator"] = p.grad.clone()
        else:
            with kept_buffers(self.model):  # BatchNorm's statistics move once per sample
                loss = evaluate()
            first = [p.grad for p in params]
            for p in params:
                p.add_(self.state[p]["estimator"], alpha=-group["lr"] * group["step_size"])
            evaluate()
            for p, g_tilde in zip(params, first):
                self.state[p]["estimator"].sub_(g_tilde).mul_(1 - group["gain"]).add_(p.grad)
        g, d = [p.grad for p in params], [self.state[p]["estimator"] for p in params]
        group["gain"], group["step_size"] = self.rule(group, dot(g, g), d)
        group["grad_norm"], group["estimator_norm"] = dot(g, g) ** 0.5, dot(d, d) ** 0.5
        return loss

    def diagnostics(self) -> Row:
        return self.param_groups[0]


def authors_rule(group: Row, g_sq: float, d: list[Tensor]) -> tuple[float, float]:
    """STORM+ in its authors' code: mean squares in place of squared norms, both sums from 1 on."""
    size = sum(part.numel() for part in d)
    group["sum_g_sq"] += g_sq / size
    gain = (1 + group["sum_g_sq"]) ** (-2 / 3)
    group["sum_d_sq_over_a"] += dot(d, d) / size / gain
    return gain, (1 + group["sum_d_sq_over_a"]) ** (-1 / 3)


def clipped_storm_rule(group: Row, g_sq: float, d: list[Tensor]) -> tuple[float, float]:
    """STORM with k = w = 0.1, both knobs (lr and c), and |d| at most the largest |g| so far."""
    group["largest_g_sq"], d_sq = max(group["largest_g_sq"], g_sq), dot(d, d)
    if d_sq > group["largest_g_sq"]:
        torch._foreach_mul_(d, math.sqrt(group["largest_g_sq"] / d_sq))
    group["sum_g_sq"] += g_sq
    eta = 0.1 / (0.1 + group["sum_g_sq"]) ** (1 / 3)
    return min(1.0, group["c"] * eta**2), eta


def dot(left: list[Tensor], right: list[Tensor]) -> float:
    return sum(float(torch.dot(a.flatten(), b.flatten())) for a, b in zip(left, right))


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put running statistics back afterwards."""
    buffers = copy.deepcopy(list(model.buffers()))
    yield
    with torch.no_grad():
        for b, saved in zip(model.buffers(), buffers):
            b.copy_(saved)


@dataclass(frozen=True)
class Method:
    make: Callable[[nn.Module, float, float], Optimizer]  # from the model, the rate and c
    start: int | None  # the sweep starts with rates 10^(k/2), k = start - 1 to start + 1
    gradients: int = 1  # per step
    set_to_none: bool = True  # how the closure zeroes gradients
    start_c: int | None = None  # c is swept over 10^k, as the rate is


METHODS = {
    "STORM+ unit=first": Method(lambda m, lr, c: StormPlus(m.parameters(), lr, unit="first"), 0, 2),
    "SGD": Method(lambda m, lr, c: SGD(m.parameters(), lr), -3),
    "Adam": Method(lambda m, lr, c: Adam(m.parameters(), lr), -7),
    "STORM+ printed": Method(lambda m, lr, c: StormPlus(m.parameters(), lr), -1, 2),
    "Untuned": Method(lambda m, lr, c: Untuned(m.parameters()), None),
    "SGD momentum": Method(lambda m, lr, c: SGD(m.parameters(), lr, momentum=0.9), -4),
    "AdaGrad": Method(lambda m, lr, c: Adagrad(m.parameters(), lr), -5),
    "simplified STORM+ unit=first": Method(
        lambda m, lr, c: SimplifiedStormPlus(m.parameters(), lr, unit="first"), 0, 2
    ),
    "STORM clipped": Method(
        lambda m, lr, c: TwoGradients(m, lr, clipped_storm_rule, c), -1, 2, start_c=4
    ),
    "authors' recipe": Method(lambda m, lr, c: TwoGradients(m, lr, authors_rule), -3, 2),
    "authors' recipe, zeroed in place": Method(
        lambda m, lr, c: TwoGradients(m, lr, authors_rule), -3, 2, set_to_none=False
    ),
}


def balanced(labels: Tensor, count: int) -> Tensor:
    """Return the indices of the first images of each of the ten classes, equally many, in order."""
    if count % 10:
        raise ValueError(f"images must be a multiple of 10 classes, got {count}")
    places = [torch.nonzero(labels == k)[: count // 10, 0] for k in range(10)]
    return torch.cat(places).sort().values


class Experiment:
    """The images, the rows so far, and the order of the runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.file = args, args.out / "rows.jsonl"
        args.out.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.rows = [row for row in map(json.loads, lines) if row["images"] == args.images]

    def load(self) -> None:
        found = cifar10(self.args.data)
        labels = torch.from_numpy(found.train_y)
        chosen = balanced(labels, self.args.images)
        self.train = torch.from_numpy(found.train_x)[chosen], labels[chosen]
        self.test = torch.from_numpy(found.test_x), torch.from_numpy(found.test_y)

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The mini-batches of an epoch, counted from 1; they depend on the arguments alone."""
        generator = torch.Generator().manual_seed(1000 + seed)
        for _ in range(epoch):
            order = torch.randperm(self.args.images, generator=generator)
        for chosen in order.split(BATCH):
            yield standard(self.train[0][chosen]), self.train[1][chosen]

    def find(self, **values: Any) -> list[Row]:
        return [row for row in self.rows if all(row[name] == values[name] for name in values)]

    def append(self, row: Row) -> None:
        self.rows.append(row)
        with self.file.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def best(self, name: str, metric: str) -> tuple[Any, Any] | None:
        """Rate and c of the best run of a sweep, (None, None) without rates, None without runs."""
        if METHODS[name].start is None:
            return None, None
        ends = self.find(method=name, seed=0, epoch=self.args.sweep_epochs, status="done")
        sign = -1 if metric == "test_accuracy" else 1
        best = min(ends, key=lambda row: sign * row[metric], default=None)
        return best and (best["lr"], best["c"])

    def sweep(self, name: str) -> None:
        """Try rates, and with each of them values of c, until the best lie inside."""
        method = METHODS[name]
        if method.start is None:
            return

        def loss_at(k: int, c: float | None = None) -> float:
            return Run(self, name, float(f"{10 ** (k / 2):.3g}"), c).advance(self.args.sweep_epochs)

        if method.start_c is None:
            lowest(method.start, loss_at)
        else:
            lowest(method.start_c, lambda n: lowest(method.start, partial(loss_at, c=10.0**n)))
        kept = [self.best(name, metric) for metric in ("train_loss", "test_accuracy")]
        for row in self.find(method=name, seed=0):
            if (row["lr"], row["c"]) not in kept:
                Run(self, name, row["lr"], row["c"]).checkpoint.unlink(missing_ok=True)

    def finish(self, name: str, metric: str = "train_loss", seed: int = 0) -> None:
        """Train at the best rate to the end."""
        run = Run(self, name, *self.best(name, metric), seed=seed)
        run.advance(self.args.epochs)
        run.checkpoint.unlink(missing_ok=True)

    def run(self, names: list[str]) -> None:
        for name in names:
            self.sweep(name)
            self.finish(name)
        for name in names:
            self.finish(name, seed=1)
        for name in names:
            self.finish(name, metric="test_accuracy")


def lowest(start: int, loss_at: Callable[[int], float]) -> float:
    """The lowest loss over integers around `start`, more of them until it lies inside."""
    losses = {k: loss_at(k) for k in (start - 1, start, start + 1)}
    while len(losses) < MOST_VALUES:
        best = min(sorted(losses), key=lambda k: losses[k])
        if min(losses) < best < max(losses):
            break
        beyond = best - 1 if best == min(losses) else best + 1
        losses[beyond] = loss_at(beyond)
    return min(losses.values())


class Run:
    """One method at one rate with one seed."""

    def __init__(self, experiment: Experiment, name: str, lr: Any, c: Any, *, seed: int = 0):
        self.experiment, self.method, self.seed = experiment, METHODS[name], seed
        images = experiment.args.images
        self.key: Row = {"method": name, "lr": lr, "c": c, "seed": seed, "images": images}
        label = "-".join(map(str, self.key.values())).replace("+", "plus")
        self.checkpoint = experiment.args.out / (re.sub(r"[^\w.]+", "-", label) + ".pt")

    def advance(self, epochs: int) -> float:
        """Train until the end of an epoch, unless rows have it; return its training loss."""
        find = self.experiment.find
        if not find(**self.key, epoch=epochs) and not find(**self.key, status="diverged"):
            self.restore()
            while self.epoch < epochs and not find(**self.key, status="diverged"):
                self.train_epoch(epochs)
        ends = find(**self.key, epoch=epochs, status="done")
        return ends[0]["train_loss"] if ends else math.inf

    def restore(self) -> None:
        """Start, or go on from the checkpoint."""
        torch.manual_seed(self.seed)
        self.model = resnet34().to(memory_format=torch.channels_last)  # a fifth faster
        self.epoch = 0
        self.optimizer = self.method.make(self.model, self.key["lr"], self.key["c"])
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.epoch = saved["epoch"]

    def train_epoch(self, last: int) -> None:
        args, batches = self.experiment.args, self.experiment.batches(self.seed, self.epoch + 1)
        self.epoch += 1
        row = {**self.key, "epoch": self.epoch, "status": "done"}
        steps, price = self.epoch * math.ceil(args.images / BATCH), self.method.gradients
        row["gradients"] = price * steps - (price - 1)  # the first step takes one
        every_third = self.epoch % 3 == 0 or self.epoch == last
        try:
            row["epoch_loss"] = statistics.fmean(self.step(*batch) for batch in batches)
            row |= self.measure(test=every_third or self.epoch == args.sweep_epochs)
            if self.method.gradients == 2:
                seen = self.optimizer.diagnostics()
                row |= {name: seen[name] for name in ("gain", "step_size", "grad_norm")}
                row["d_over_g"] = seen["estimator_norm"] / seen["grad_norm"]
                if every_third or self.epoch == 1:
                    row |= self.estimator_error()
        except FloatingPointError:
            row["status"] = "diverged"
        finite = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
        row = finite if len(finite) == len(row) else {**finite, "status": "diverged"}
        print(row, flush=True)
        if not self.experiment.find(**self.key, epoch=self.epoch):  # as if killed before the save
            self.experiment.append(row)
        if row["status"] == "done":
            states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({"epoch": self.epoch, **states}, self.checkpoint.with_suffix(".half"))
            os.replace(self.checkpoint.with_suffix(".half"), self.checkpoint)

    def step(self, images: Tensor, labels: Tensor) -> float:
        def closure() -> Tensor:
            return self.gradient(images, labels)

        if isinstance(self.optimizer, PairedOptimizer):
            closure = same_sample(self.optimizer, self.model)(closure)
        return float(self.optimizer.step(closure))

    def gradient(self, images: Tensor, labels: Tensor) -> Tensor:
        self.model.zero_grad(set_to_none=self.method.set_to_none)
        loss = F.cross_entropy(self.model(images), labels)
        if not math.isfinite(loss.item()):
            raise FloatingPointError("loss")
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def measure(self, test: bool) -> Row:
        """Losses and accuracies of the model which the method would hand to its user."""
        model, found = self.model, {}
        if isinstance(self.optimizer, Untuned):
            self.optimizer.eval()
            model = copy.deepcopy(model)
            batches = self.experiment.batches(self.seed + 10_000, epoch=1)
            recalibrate(model, [images for _, (images, _) in zip(range(CALIBRATION), batches)])
            self.optimizer.train()
        model.eval()
        splits = {"train": [part[:SUBSET] for part in self.experiment.train]}
        if test:
            splits["test"] = self.experiment.test
        for split, (images, labels) in splits.items():
            logits = torch.cat([model(standard(part)) for part in images.split(500)])
            found[f"{split}_loss"] = float(F.cross_entropy(logits, labels))
            found[f"{split}_accuracy"] = float((logits.argmax(1) == labels).double().mean())
        model.train()
        return found

    def estimator_error(self) -> Row:
        """|grad f|^2, |d - grad f|^2, and E|g - grad f|^2 of a mini-batch.

        The full gradient over all images is too expensive. F and F' are mean gradients over the two
        halves of 2,000 training images, always the same ones. They are almost independent, so
        F . F', (d - F) . (d - F') and the mean of |g|^2 less F . F' have almost no bias; a small
        number may come out negative.
        """
        params, size = list(self.model.parameters()), min(SUBSET, self.experiment.args.images) // 2
        means, squares = [[torch.zeros_like(p) for p in params] for _ in range(2)], []
        for place in range(0, 2 * size, BATCH):
            images, labels = (part[place : place + BATCH] for part in self.experiment.train)
            with kept_buffers(self.model):
                self.gradient(standard(images), labels)
            g = [p.grad for p in params]
            torch._foreach_add_(means[place // size], g, alpha=BATCH / size)
            squares.append(dot(g, g))
        d = [self.optimizer.state[p]["estimator"] for p in params]
        full, error = dot(*means), dot(*([a - b for a, b in zip(d, mean)] for mean in means))
        batch_error = statistics.fmean(squares) - full
        return {"full_grad_sq": full, "error_sq": error, "batch_error_sq": batch_error}


METRICS = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")
LOSSES = {"train_loss": "training loss", "test_accuracy": "test accuracy"}
ESTIMATOR = {
    "gain": "gain",
    "d_over_g": "|d| / |g|",
    "error_ratio": "|d - grad f|² / E|g - grad f|²",
}


def report(experiment: Experiment) -> None:
    """Print the table of the last epoch, draw the figures, and copy the rows."""
    draw_appendix()
    print("| method | rate chosen by | lr | c | seeds | " + " | ".join(METRICS) + " |")
    print("|" + "---|" * (5 + len(METRICS)))
    for name in METHODS:
        for chosen in ("train_loss", "test_accuracy"):
            lr, c = experiment.best(name, chosen) or (None, None)
            last = experiment.args.epochs
            ends = experiment.find(method=name, lr=lr, c=c, epoch=last, status="done")
            texts = []
            for values in ([row[metric] for row in ends] for metric in METRICS if ends):
                half = (max(values) - min(values)) / 2
                texts.append(f"{statistics.fmean(values):.4g} ± {half:.2g}")
            print(f"| {name} | {chosen} | {lr} | {c} | {len(ends)} | {' | '.join(texts)} |")
    runs = {}
    for name in METHODS:
        lr, c = experiment.best(name, "train_loss") or (None, None)
        runs[name] = experiment.find(method=name, lr=lr, c=c, seed=0, status="done")
        for row in (row for row in runs[name] if "error_sq" in row):
            row["error_ratio"] = row["error_sq"] / row["batch_error_sq"]
    figures = Path(__file__).parents[1] / "docs/figures"
    draw(runs, LOSSES, figures / "paper_experiment.png")
    draw(runs, ESTIMATOR, figures / "paper_experiment_estimator.png")
    shutil.copy(experiment.file, experiment.args.results / "paper_experiment.jsonl")


def draw_appendix() -> None:
    """Draw the runs over 100 epochs on 1,000 images, at each method's best rate."""
    docs, runs = Path(__file__).parents[1] / "docs", {}
    rows = map(json.loads, (docs / "results/course.jsonl").read_text().splitlines()[1:])
    done = [row for row in rows if row["seed"] == 0 and row["status"] == "done"]
    for row in sorted(done, key=lambda row: -row["curve"]["train_loss"][-1]):  # the best one last
        columns = (row["curve"][key] for key in ("samples", "train_loss", "valid_accuracy"))
        names = ("epoch", "train_loss", "test_accuracy")
        runs[row["method"]] = [dict(zip(names, (n / 10, *rest))) for n, *rest in zip(*columns)]
    draw(runs, LOSSES, docs / "figures/paper_course.png")


def draw(runs: dict[str, list[Row]], panels: dict[str, str], file: Path) -> None:
    """Draw a metric per panel against epochs: seed 0 of every method at its best rate."""
    from matplotlib.figure import Figure

    figure = Figure((5.5 * len(panels), 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (metric, title) in zip(axes, panels.items()):
        for i, (name, rows) in enumerate(runs.items()):
            shown = [row for row in rows if metric in row]
            if shown:
                x, y = ([row[key] for row in shown] for key in ("epoch", metric))
                axis.plot(x, y, ".-" if i < 10 else ".--", color=f"C{i % 10}", label=name)
        axis.set(xlabel="epochs", title=title)
        axis.set_yscale("linear" if "accuracy" in metric else "log")
    figure.legend(handles=axes[0].get_lines(), loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10, see `stormplus data`")
    parser.add_argument("--images", type=int, default=10_000, help="of training; at most 50,000")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--sweep-epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/paper_experiment"))
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="share them out"
    )
    parser.add_argument("--figures", action="store_true", help="print the table, draw, copy rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    experiment = Experiment(parser.parse_args())
    if experiment.args.figures:
        report(experiment)
    else:
        experiment.load()
        experiment.run(experiment.args.methods)
