"""Your model: Adam, Schedule-Free, Untuned and STORM+ side by side.

    pip install . ./benchmark            # in a clone
    python examples/your_model.py [--evaluations N] [--seeds N] [--out FOLDER]

Replace the model, the loss and the data by yours, and add your optimizer to the others. Each method
gets the same number of gradient evaluations, the same start and the same batches; STORM+ takes two
gradients per step, hence half as many steps. The folder gets the curves, and the rows, which
`stormplus report` merges with others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from schedulefree import AdamWScheduleFree
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from stormplus import StormPlus, Untuned
from stormplus_bench import compare

pixels, digits = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


METHODS = {  # functions of the parameters; (function, rates) is run at each rate
    "Adam": (torch.optim.Adam, [1e-3, 3e-3, 1e-2]),
    "Schedule-Free": AdamWScheduleFree,
    "Untuned": Untuned,
    "STORM+": StormPlus,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--evaluations", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/your_model"))
    chosen = parser.parse_args()
    workload = {
        **{"name": "your-model", "model": model, "loss": loss, "accuracy": accuracy},
        **{"data": (inputs[:1400], targets[:1400]), "valid": (inputs[1400:], targets[1400:])},
        **{"budget": chosen.evaluations, "batch_size": 32},
    }
    found = compare(METHODS, workload, seeds=chosen.seeds)
    print(found)  # in a notebook, the last line `found` shows table and picture
    journal = found.save(chosen.out / "rows.jsonl")
    found.plot().savefig(chosen.out / "curves.png", dpi=130)
    print(f"wrote {journal} and {chosen.out / 'curves.png'}")


if __name__ == "__main__":
    main()
