"""Rows as the paper's experiment writes them, a few points each."""

from __future__ import annotations

from stormplus.bench import rows
from stormplus.bench.paper_claims import with_epochs
from stormplus.bench.paper_plan import SOLVERS, Scale

TWO_GRADIENTS = ("STORM", "STORM+", "STORM+ mean")
SCALE = Scale(1000, 20, 1000, 40, rates=(0.01, 0.1, 1.0))


def run(workload, method, lr, losses, accuracies=None, price=1):
    points = len(losses)
    evaluations = [20 * k for k in range(points)]
    accuracies = accuracies or [0.1 + 0.1 * k for k in range(points)]
    return {
        "workload": workload,
        "method": method,
        "lr": lr,
        "default": False,
        "seed": 0,
        "status": "diverged" if losses[-1] is None else "done",
        "budget": evaluations[-1],
        "batch_size": 100,
        "peak_memory_mb": 1.0,
        "state_mb": 1.0,
        "curve": {
            "evaluations": evaluations,
            "samples": [e // price for e in evaluations],
            "seconds": evaluations,
            "train_loss": losses,
            "valid_loss": losses,
            "train_accuracy": accuracies,
            "valid_accuracy": accuracies,
            "grad_norm": [None] * points,
        },
        "versions": {"stormplus": "0.1.0", "torch": "2.13.0"},
        "machine": "a machine",
    }


def journal_of(path, runs):
    path.parent.mkdir(exist_ok=True)
    for one in runs:
        rows.append(path, one)
    return path


def sweep_runs(best):
    """Every method at every rate; loss 1 at its best rate and 2 elsewhere."""
    return [
        run(SCALE.sweep_name, m, lr, [3.0, 1.0 if lr == best[m] else 2.0])
        for m in SOLVERS
        for lr in SCALE.rates
    ]


def long_frame(tmp_path, losses, accuracies):
    runs = [
        run(SCALE.long_name, m, 0.1, losses[m], accuracies[m], 2 if m in TWO_GRADIENTS else 1)
        for m in SOLVERS
    ]
    return with_epochs(rows.load(journal_of(tmp_path / "l", runs)), SCALE.images)
