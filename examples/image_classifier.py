"""A convolutional network on images, in plain PyTorch: digits, or MNIST if you have it.

    python examples/image_classifier.py [--data mnist] [--lr LR] [--evaluations N]

The digits ship inside scikit-learn. `--data mnist` reads the four idx files, as released,
from the folder `$STORMPLUS_DATA/mnist`. STORM+ and Adam get the same number of gradient
evaluations; STORM+ takes two per step, so Adam sees twice as many batches. Prints the test
accuracy of each, and the final gain and step size of STORM+.
"""

from __future__ import annotations

import argparse
import gzip
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from stormplus import StormPlus, same_sample

BATCH = 64
Data = tuple[Tensor, Tensor, Tensor, Tensor]


def digits() -> Data:
    """1,797 images of 8 by 8: 1,400 to train on, the rest to test."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return x[train], y[train], x[test], y[test]


def mnist() -> Data:
    """60,000 images of 28 by 28, and the first 2,000 of the test images, from the idx files."""
    folder = Path(os.environ.get("STORMPLUS_DATA", ".")) / "mnist"
    if not folder.is_dir():
        raise SystemExit(f"no MNIST in {folder}: set STORMPLUS_DATA to the folder above mnist/")

    def read(name: str, header: int) -> Tensor:
        with gzip.open(folder / f"{name}.gz") as file:
            return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)

    parts = []
    for split in ("train", "t10k"):
        parts.append(read(f"{split}-images-idx3-ubyte", 16).view(-1, 1, 28, 28).float() / 255)
        parts.append(read(f"{split}-labels-idx1-ubyte", 8).long())
    return parts[0], parts[1], parts[2][:2000], parts[3][:2000]


def network(side: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * (side // 4) ** 2, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    right = sum((model(a).argmax(1) == b).sum().item() for a, b in zip(x.split(500), y.split(500)))
    model.train()
    return right / len(y)


def train(opt: torch.optim.Optimizer, model: nn.Module, data: Data, evaluations: int) -> float:
    x_train, y_train, x_test, y_test = data
    batches = torch.Generator().manual_seed(1)
    spent, shown = 0, 0
    while spent < evaluations:
        index = torch.randint(len(x_train), (BATCH,), generator=batches)
        x, y = x_train[index], y_train[index]  # the sample, drawn outside the closure

        def closure() -> Tensor:
            nonlocal spent
            spent += 1
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if isinstance(opt, StormPlus):
            # Called twice. `same_sample` lets BatchNorm's statistics move once all the same.
            loss = opt.step(same_sample(opt, model)(closure))
        else:
            loss = opt.step(closure)
        if spent * 5 >= evaluations * (shown + 1):
            shown += 1
            test = accuracy(model, x_test, y_test)
            print(f"{spent:11d}  {loss.item():10.3f}  {test:13.3f}")
    return accuracy(model, x_test, y_test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=("digits", "mnist"), default="digits")
    parser.add_argument("--lr", type=float, default=1.0, help="of STORM+; Adam keeps its default")
    parser.add_argument("--evaluations", type=int, default=1200, help="gradients a method may take")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the network is small
    data = digits() if args.data == "digits" else mnist()
    final = {}
    for name in ("STORM+", "Adam"):
        model = network(data[0].shape[-1])
        if name == "STORM+":
            opt: torch.optim.Optimizer = StormPlus(model.parameters(), lr=args.lr)
        else:
            opt = torch.optim.Adam(model.parameters())
        print(f"\n{name} on {args.data}\nevaluations  batch loss  test accuracy")
        final[name] = train(opt, model, data, args.evaluations)
        if isinstance(opt, StormPlus):
            now = opt.diagnostics()
            print(f"gain {now['gain']:.2e}, step size {now['step_size']:.2e}")
    print("\nat equal gradient evaluations:", *(f"{k} {v:.3f}" for k, v in final.items()))


if __name__ == "__main__":
    main()
