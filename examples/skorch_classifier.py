"""skorch: a scikit-learn classifier that trains with STORM+.

python examples/skorch_classifier.py [--epochs N]
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from skorch import NeuralNetClassifier
from torch import nn

from stormplus.integrations.skorch import StormPlusNetMixin


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
        )


class Net(StormPlusNetMixin, NeuralNetClassifier):
    """BatchNorm counts each batch once, and lr is 1."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    net = Net(
        Network, criterion=nn.CrossEntropyLoss, max_epochs=epochs, batch_size=64,
        iterator_train__shuffle=True, train_split=None, verbose=0,
    )  # fmt: skip
    scores = cross_val_score(net, x, y, cv=3)
    net.fit(x, y)
    taken = net.optimizer_.diagnostics()
    print(
        f"{taken['step']:.0f} batches, {taken['grad_evaluations']:.0f} evaluations, running "
        f"statistics moved {int(net.module_[1].num_batches_tracked)} times, cross-validated "
        f"accuracy {scores.mean():.3f}"
    )


if __name__ == "__main__":
    main()
