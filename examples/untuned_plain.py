"""Untuned in a plain loop: handwritten digits, no learning rate, the average at the end.

    python examples/untuned_plain.py [--epochs N]

Three lines differ from a loop with Adam: no `lr`, `opt.eval()` before the model is validated or
saved, `opt.train()` before it is trained again. With BatchNorm, `recalibrate` is a fourth.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from stormplus import Untuned, recalibrate


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    return (model(x).argmax(dim=1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    loader = DataLoader(TensorDataset(x[:1408], y[:1408]), batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    )

    opt = Untuned(model.parameters())  # nothing to set
    for epoch in range(args.epochs):
        model.train()
        opt.train()  # the iterate is in the parameters
        for u, v in loader:
            opt.zero_grad()
            F.cross_entropy(model(u), v).backward()
            opt.step()
        iterate = accuracy(model, x[1408:], y[1408:])
        opt.eval()  # the average is in the parameters
        recalibrate(model, loader)
        average = accuracy(model, x[1408:], y[1408:])
        reached = f"{iterate:.3f} of the iterate, {average:.3f} of the average"
        print(f"epoch {epoch + 1}: accuracy {reached}")

    steps = int(opt.diagnostics()["step"])
    print(f"{steps} steps, {opt.grad_evaluations} gradients")
    print(f"accuracy on rows not trained on: {average:.3f}")


if __name__ == "__main__":
    main()
