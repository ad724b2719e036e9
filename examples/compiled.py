"""A compiled model, compiled optimizer kernels, activation checkpointing and dropout.

python examples/compiled.py [--samples N]
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stormplus import StormPlus, verify_closure


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200)
    samples = parser.parse_args().samples
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = Network()
    compiled = torch.compile(model)
    opt = StormPlus(model.named_parameters(), fused=True)
    evaluations = 0

    for i in range(samples):
        index = torch.randint(len(images), (64,))

        def closure() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            opt.zero_grad()
            loss = F.cross_entropy(compiled(images[index]), labels[index])
            loss.backward()
            return loss

        if i == 0:
            verify_closure(opt, closure)  # dropout, compiled and recomputed: is it replayed?
            evaluations = 0
        opt.step(closure)

    model.eval()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"{samples} samples, {evaluations} evaluations, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
