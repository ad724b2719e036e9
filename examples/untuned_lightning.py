"""Untuned in Lightning: validated, checkpointed and left at the average, by one callback.

    python examples/untuned_lightning.py [--epochs N] [--out FOLDER]

There is no learning rate to find. Without the callback Lightning would validate and save the
iterate, and a warning would say so.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from stormplus import Untuned
from stormplus.integrations.lightning import UntunedCallback


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Untuned(self.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="out/untuned_lightning")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    loader = DataLoader(TensorDataset(x[:1408], y[:1408]), batch_size=32, shuffle=True)
    held_out = DataLoader(TensorDataset(x[1408:], y[1408:]), batch_size=389)

    model, best = Digits(), ModelCheckpoint(args.out, monitor="accuracy", mode="max")
    trainer = Trainer(
        max_epochs=args.epochs,
        callbacks=[UntunedCallback(recalibrate_batches=20), best],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, held_out)

    opt = trainer.optimizers[0]
    assert isinstance(opt, Untuned)
    where = "average" if opt.at_average else "iterate"
    print(f"{trainer.global_step} steps, {opt.grad_evaluations} gradients, left at the {where}")
    saved = torch.load(best.best_model_path, weights_only=True)
    model.load_state_dict(saved["state_dict"])
    print(f"best checkpoint: accuracy {float(best.best_model_score or 0):.3f}")
    (again,) = trainer.validate(model, held_out, verbose=False)
    print(f"accuracy on rows not trained on: {again['accuracy']:.3f}")


if __name__ == "__main__":
    main()
