"""Hugging Face Trainer: a small model, built from a config, on handwritten digits.

    python examples/huggingface_trainer.py [--epochs N] [--out FOLDER]

Nothing is downloaded. `StormPlusTrainer` takes the place of `Trainer`, and the optimizer is
passed in. Accumulation, BatchNorm and dropout need nothing else.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

from stormplus import StormPlus
from stormplus.integrations.huggingface import StormPlusTrainer


class DigitsConfig(PretrainedConfig):
    model_type = "digits"
    width: int = 64
    dropout: float = 0.2


class DigitsModel(PreTrainedModel):
    config_class = DigitsConfig

    def __init__(self, config: DigitsConfig) -> None:
        super().__init__(config)
        self.net = nn.Sequential(
            nn.Linear(64, config.width),
            nn.BatchNorm1d(config.width),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.width, 10),
        )
        self.evaluations = 0
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.evaluations += self.training
        logits = self.net(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="out/huggingface_trainer")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32)
    rows = [{"pixel_values": x, "labels": int(y)} for x, y in zip(pixels, labels)]

    model = DigitsModel(DigitsConfig())
    trainer = StormPlusTrainer(
        model,
        TrainingArguments(
            output_dir=args.out,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=2,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # the default, 1.0, would clip the two gradients separately
            logging_steps=44,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows[:1408],
        eval_dataset=rows[1408:],
        optimizers=(StormPlus(model.parameters(), lr=0.5), None),
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean()},
    )
    trainer.train()
    print(
        f"{trainer.state.global_step} steps of 2 micro-batches, {model.evaluations} evaluations, "
        f"running statistics moved {int(model.net[1].num_batches_tracked)} times"
    )
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy on rows not trained on: {accuracy:.3f}")


if __name__ == "__main__":
    main()
