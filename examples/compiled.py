"""A compiled model, with activation checkpointing and dropout; with Untuned, a compiled step.

    python examples/compiled.py [--samples N] [--untuned]

STORM+ calls the compiled model twice per sample, and `verify_closure` checks that its dropout is
replayed. A step of `Untuned` has no closure, so `torch.compile` can trace it as a whole. On a CPU
compiling takes half a minute and the native passes are faster: it is for devices without Triton.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stormplus import StormPlus, Untuned, verify_closure


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--untuned", action="store_true", help="compile a step of Untuned instead")
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = Network()
    compiled = torch.compile(model)
    if args.untuned:
        opt = Untuned(model.parameters())
        step = torch.compile(opt.step, fullgraph=True)
    else:
        opt = StormPlus(model.named_parameters())
    evaluations = 0

    for i in range(args.samples):
        index = torch.randint(len(images), (64,))

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            opt.zero_grad()
            loss = F.cross_entropy(compiled(images[index]), labels[index])
            loss.backward()
            return loss

        if args.untuned:
            closure()
            step()
            continue
        if i == 0:
            verify_closure(opt, closure)  # dropout, compiled and recomputed: is it replayed?
            evaluations = 0
        opt.step(closure)

    model.eval()
    if args.untuned:
        opt.eval()  # the average
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"{args.samples} samples, {evaluations} evaluations, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
