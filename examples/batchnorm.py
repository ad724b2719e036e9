"""BatchNorm and dropout under two evaluations per sample: one line, `same_sample`.

python examples/batchnorm.py [--samples N]
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from stormplus import StormPlus, same_sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=300)
    samples = parser.parse_args().samples
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.1), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    opt = StormPlus(model.parameters())

    for _ in range(samples):
        index = torch.randint(len(images), (64,))  # the sample, drawn outside the closure
        x, y = images[index], labels[index]

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(same_sample(opt, model)(closure))  # the one line

    seen = int(model[1].num_batches_tracked)
    model.eval()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"{samples} samples, running statistics moved {seen} times, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
