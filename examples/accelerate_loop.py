"""Accelerate: your own loop with micro-batches, on one device or under torchrun.

    python examples/accelerate_loop.py [--epochs N]
    torchrun --nproc_per_node 2 examples/accelerate_loop.py

`prepare` of this package takes the place of `accelerator.prepare`; the closure covers all
micro-batches of a step, so that both evaluations do.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from stormplus import StormPlus
from stormplus.integrations.accelerate import prepare

MICRO_BATCHES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    loader = DataLoader(TensorDataset(x[:1408], y[:1408]), batch_size=64, shuffle=True)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    )
    opt = StormPlus(model.parameters(), lr=0.5)

    accelerator = Accelerator(cpu=True)
    model, opt, loader = prepare(accelerator, model, opt, loader)
    samples = evaluations = 0
    for _ in range(epochs):
        for inputs, targets in loader:

            def closure() -> Tensor:
                nonlocal evaluations
                opt.zero_grad()
                total = torch.zeros(())
                parts = list(zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)))
                for i, (u, v) in enumerate(parts):
                    last = i == len(parts) - 1
                    with nullcontext() if last else accelerator.no_sync(model):
                        loss = F.cross_entropy(model(u), v) / len(parts)
                        accelerator.backward(loss)
                    total += loss.detach()
                    evaluations += 1
                return total

            opt.step(closure)
            samples += 1

    plain = accelerator.unwrap_model(model).eval()
    with torch.no_grad():
        accuracy = (plain(x[1408:]).argmax(dim=1) == y[1408:]).float().mean().item()
    counted = int(plain[1].num_batches_tracked)
    accelerator.print(
        f"{samples} samples, {evaluations} evaluations of micro-batches, "
        f"running statistics moved {counted} times"
    )
    accelerator.print(f"accuracy on rows not trained on: {accuracy:.3f}")
    accelerator.wait_for_everyone()  # a process that leaves early can leave the others hanging
    time.sleep(0.2)  # torch 2.13 can hang if it ends a group whose last barrier is not tidied up
    accelerator.end_training()


if __name__ == "__main__":
    main()
