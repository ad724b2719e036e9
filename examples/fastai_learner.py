"""fastai: a Learner that takes two gradients per batch.

python examples/fastai_learner.py [--epochs N]
"""

from __future__ import annotations

import argparse

import torch
from fastai.callback.training import GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.metrics import accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from stormplus.integrations.fastai import StormPlusCallback, opt_func


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    pairs = list(zip(images, labels))
    dls = DataLoaders(
        DataLoader(pairs[:1400], bs=64, shuffle=True, drop_last=True),
        DataLoader(pairs[1400:], bs=256),
        device=torch.device("cpu"),
    )
    model = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    )
    learn = Learner(
        dls, model, F.cross_entropy, metrics=accuracy,
        opt_func=opt_func(), cbs=[StormPlusCallback(), GradientClip(10.0)],  # the one line
    )  # fmt: skip
    with learn.no_logging(), learn.removed_cbs(learn.progress):
        learn.fit(epochs)
        _, score = learn.validate()
    taken = learn.opt.opt.diagnostics()
    print(
        f"{taken['step']:.0f} batches, {taken['grad_evaluations']:.0f} evaluations, running "
        f"statistics moved {int(model[1].num_batches_tracked)} times, accuracy {score:.3f}"
    )


if __name__ == "__main__":
    main()
