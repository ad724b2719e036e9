"""Gradient accumulation and clipping: the closure covers all micro-batches, then clips.

    python examples/accumulation.py [--samples N]

Under DDP, run all micro-batches but the last inside `model.no_sync()`, in the closure, so that
it holds for both evaluations.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from stormplus import StormPlus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200)
    samples = parser.parse_args().samples
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    opt = StormPlus(model.parameters())
    micro_batches, backwards = 4, 0

    for _ in range(samples):
        index = torch.randint(len(images), (128,))

        def closure() -> torch.Tensor:
            nonlocal backwards
            opt.zero_grad()
            total = torch.zeros(())
            for part in index.chunk(micro_batches):
                loss = F.cross_entropy(model(images[part]), labels[part]) / micro_batches
                loss.backward()
                backwards += 1
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)  # each gradient by itself
            return total

        opt.step(closure)

    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"{samples} samples, {backwards} backward passes, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
