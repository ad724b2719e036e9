"""TensorBoard: the gain, the step size and the norms of a run.

python examples/tensorboard_diagnostics.py [--samples N] [--out FOLDER]
tensorboard --logdir out/tensorboard
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from stormplus import StormPlus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("out/tensorboard"))
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    opt = StormPlus(model.parameters())

    with SummaryWriter(args.out) as writer:
        for step in range(1, args.samples + 1):
            index = torch.randint(len(images), (64,))
            x, y = images[index], labels[index]

            def closure() -> torch.Tensor:
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            loss = opt.step(closure)
            writer.add_scalar("loss", loss, step)
            for name, value in opt.diagnostics().items():
                writer.add_scalar(f"storm/{name}", value, step)

    numbers = ", ".join(f"{name} {value:.3g}" for name, value in opt.diagnostics().items())
    print(f"{args.samples} samples logged in {args.out}: {numbers}")


if __name__ == "__main__":
    main()
