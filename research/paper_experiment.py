"""The paper's experiment: ResNet34 on CIFAR-10, batches of 100, every method at its best rate.

    python research/paper_experiment.py --data FOLDER --rows FILE    # run, or go on
    python research/paper_experiment.py --figures                    # table and figures

Rates come from 2-epoch sweeps over half decades, extended until the best one (lowest training loss)
lies between two others. Every method then trains for 15 epochs at its best rate with two seeds, and
with one seed at the rate of the best test accuracy, if that is another one. A run of a sweep is the
beginning of the long run at that rate. Every epoch appends a row to FILE and saves a checkpoint
beside it, so a killed process goes on where it stopped. Processes with different `--methods` may
run at once. Without --rows the committed rows are read. Columns of a row:

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
import statistics
from collections.abc import Callable, Iterator
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

ROWS = Path(__file__).parent / "results" / "paper_experiment.jsonl"
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
            buffers = list(self.model.buffers())
            before = copy.deepcopy(buffers)
            loss = evaluate()
            torch._foreach_copy_(buffers, before)  # BatchNorm's statistics move once per sample
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


class Experiment:
    """The images, the rows so far, and the order of the runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        args.rows.parent.mkdir(parents=True, exist_ok=True)
        lines = args.rows.read_text().splitlines() if args.rows.exists() else []
        self.rows = [row for row in map(json.loads, lines) if row["images"] == args.images]

    def load(self) -> None:
        """Read the data: of each of the ten classes the first training images, equally many."""
        found = cifar10(self.args.data)
        labels = torch.from_numpy(found.train_y)
        places = [torch.nonzero(labels == k)[: self.args.images // 10, 0] for k in range(10)]
        chosen = torch.cat(places).sort().values
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
        with self.args.rows.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def best(self, name: str, metric: str) -> tuple[Any, Any]:
        """Return rate and c of the best run of a sweep, None where a method has none."""
        ends = self.find(method=name, seed=0, epoch=self.args.sweep_epochs, status="done")
        sign = -1 if metric == "test_accuracy" else 1
        nothing = {"lr": None, "c": None}
        best = min(ends, key=lambda row: sign * row[metric], default=nothing)
        return best["lr"], best["c"]

    def sweep(self, name: str) -> None:
        """Try rates, and with each of them values of c, until the best lie inside."""
        start, start_c = METHODS[name].start, METHODS[name].start_c

        def loss_at(k: int, c: float | None = None) -> float:
            return Run(self, name, float(f"{10 ** (k / 2):.3g}"), c).advance(self.args.sweep_epochs)

        if start_c is not None:
            lowest(start_c, lambda n: lowest(start, partial(loss_at, c=10.0**n)))
        elif start is not None:
            lowest(start, loss_at)
        kept = [self.best(name, metric) for metric in CHOSEN_BY]
        for row in self.find(method=name, seed=0):
            if (row["lr"], row["c"]) not in kept:
                Run(self, name, row["lr"], row["c"]).checkpoint.unlink(missing_ok=True)

    def run(self) -> None:
        """Sweep, then train to the end: a first seed, a second, and at the best test accuracy."""
        names = self.args.methods
        for seed, metric in ((0, "train_loss"), (1, "train_loss"), (0, "test_accuracy")):
            for name in names:
                self.sweep(name)
                run = Run(self, name, *self.best(name, metric), seed=seed)
                run.advance(self.args.epochs)
                run.checkpoint.unlink(missing_ok=True)


def lowest(start: int, loss_at: Callable[[int], float]) -> float:
    """Return the lowest loss over integers around `start`, more of them until it lies inside."""
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
        args = experiment.args
        self.key: Row = {"method": name, "lr": lr, "c": c, "seed": seed, "images": args.images}
        label = re.sub(r"[^\w.]+", "-", "-".join(map(str, self.key.values())))
        self.checkpoint = args.rows.with_suffix(f".{label}.pt")

    def advance(self, epochs: int) -> float:
        """Train until the end of an epoch, unless rows have it; return its training loss."""
        find = self.experiment.find
        if not find(**self.key, epoch=epochs):
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
            if not all(math.isfinite(v) for v in row.values() if isinstance(v, float)):
                raise FloatingPointError
        except FloatingPointError:
            row = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
            row["status"] = "diverged"
        print(row, flush=True)
        if not self.experiment.find(**self.key, epoch=self.epoch):  # as if killed before the save
            self.experiment.append(row)
        if row["status"] == "done":
            states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({"epoch": self.epoch, **states}, self.checkpoint.with_suffix(".half"))
            os.replace(self.checkpoint.with_suffix(".half"), self.checkpoint)

    def step(self, images: Tensor, labels: Tensor) -> float:
        def closure() -> Tensor:
            return self.gradient(self.model, images, labels)

        if isinstance(self.optimizer, PairedOptimizer):
            closure = same_sample(self.optimizer, self.model)(closure)
        return float(self.optimizer.step(closure))

    def gradient(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        model.zero_grad(set_to_none=self.method.set_to_none)
        loss = F.cross_entropy(model(images), labels)
        if not math.isfinite(loss.item()):
            raise FloatingPointError("loss")
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def measure(self, test: bool) -> Row:
        """Return losses and accuracies of the model which the method would hand to its user."""
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
        """Return |grad f|^2, |d - grad f|^2, and E|g - grad f|^2 of a mini-batch.

        The full gradient over all images is too expensive. F and F' are mean gradients over the two
        halves of 2,000 training images, always the same ones. They are almost independent, so
        F . F', (d - F) . (d - F') and the mean of |g|^2 less F . F' have almost no bias; a small
        number may come out negative.
        """
        model = copy.deepcopy(self.model)  # whose running statistics may move
        params, size = list(model.parameters()), min(SUBSET, self.experiment.args.images) // 2
        means, squares = [[torch.zeros_like(p) for p in params] for _ in range(2)], []
        for place in range(0, 2 * size, BATCH):
            images, labels = (part[place : place + BATCH] for part in self.experiment.train)
            self.gradient(model, standard(images), labels)
            g = [p.grad for p in params]
            torch._foreach_add_(means[place // size], g, alpha=BATCH / size)
            squares.append(dot(g, g))
        d = [self.optimizer.state[p]["estimator"] for p in self.model.parameters()]
        full, error = dot(*means), dot(*([a - b for a, b in zip(d, mean)] for mean in means))
        batch_error = statistics.fmean(squares) - full
        return {"full_grad_sq": full, "error_sq": error, "batch_error_sq": batch_error}


CHOSEN_BY = ("train_loss", "test_accuracy")
METRICS = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")
LOSSES = {"train_loss": "training loss", "test_accuracy": "test accuracy"}
ESTIMATOR = {
    "gain": "gain",
    "d_over_g": "|d| / |g|",
    "error_ratio": "|d - grad f|² / E|g - grad f|²",
}


def report(experiment: Experiment) -> None:
    """Print the table of the last epoch, and draw the figures."""
    runs, appendix, docs = {}, {}, Path(__file__).parents[1] / "docs"
    print("| method | rate chosen by | lr | c | seeds | " + " | ".join(METRICS) + " |")
    print("|" + "---|" * (5 + len(METRICS)))
    for name in METHODS:
        for chosen in CHOSEN_BY:
            lr, c = experiment.best(name, chosen)
            last = experiment.args.epochs
            ends = experiment.find(method=name, lr=lr, c=c, epoch=last, status="done")
            texts = []
            for values in ([row[metric] for row in ends] for metric in METRICS if ends):
                half = (max(values) - min(values)) / 2
                texts.append(f"{statistics.fmean(values):.4g} ± {half:.2g}")
            print(f"| {name} | {chosen} | {lr} | {c} | {len(ends)} | {' | '.join(texts)} |")
        lr, c = experiment.best(name, "train_loss")
        runs[name] = experiment.find(method=name, lr=lr, c=c, seed=0, status="done")
        for row in (row for row in runs[name] if "error_sq" in row):
            row["error_ratio"] = row["error_sq"] / row["batch_error_sq"]
    draw(runs, LOSSES, docs / "figures/paper_experiment.png")
    draw(runs, ESTIMATOR, docs / "figures/paper_experiment_estimator.png")
    # The runs over 100 epochs on 1,000 images.
    rows = map(json.loads, (docs / "results/course.jsonl").read_text().splitlines()[1:])
    done = [row for row in rows if row["seed"] == 0 and row["status"] == "done"]
    for row in sorted(done, key=lambda row: -row["curve"]["train_loss"][-1]):  # the best one last
        columns = (row["curve"][key] for key in ("samples", "train_loss", "valid_accuracy"))
        names = ("epoch", "train_loss", "test_accuracy")
        appendix[row["method"]] = [dict(zip(names, (n / 10, *rest))) for n, *rest in zip(*columns)]
    draw(appendix, LOSSES, docs / "figures/paper_course.png")


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
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file to read and append to")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--figures", action="store_true", help="print the table and draw")
    experiment = Experiment(parser.parse_args())
    if experiment.args.figures:
        report(experiment)
    else:
        experiment.load()
        experiment.run()
