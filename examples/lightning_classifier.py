"""Lightning: handwritten digits with BatchNorm, dropout and gradient accumulation.

    python examples/lightning_classifier.py [--epochs N] [--accumulate N]

One callback is all that differs from any other Lightning module. It evaluates all
micro-batches of a step twice, moves the running statistics once, and logs the optimizer's
diagnostics under "stormplus/".
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from stormplus import StormPlus
from stormplus.integrations.lightning import StormPlusCallback


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
        )
        self.evaluations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.evaluations += 1
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return StormPlus(self.parameters(), lr=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    loader = DataLoader(TensorDataset(x[:1408], y[:1408]), batch_size=32, shuffle=True)

    model = Digits()
    trainer = Trainer(
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        callbacks=[StormPlusCallback()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)

    model.eval()
    with torch.no_grad():
        accuracy = (model.net(x[1408:]).argmax(dim=1) == y[1408:]).float().mean().item()
    batches = args.epochs * len(loader)
    print(
        f"{batches} micro-batches in {trainer.global_step} steps, {model.evaluations} evaluations, "
        f"running statistics moved {int(model.net[1].num_batches_tracked)} times"
    )
    print(f"loss of the last epoch {trainer.callback_metrics['loss']:.3f}")
    print(f"accuracy on rows not trained on: {accuracy:.3f}")


if __name__ == "__main__":
    main()
