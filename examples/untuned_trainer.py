"""Untuned in Hugging Face's Trainer: evaluated, saved and left at the average, by one callback.

    python examples/untuned_trainer.py [--epochs N] [--out FOLDER]

Nothing is downloaded, and there is no learning rate to find: `TrainingArguments.learning_rate`
is not used. Without the callback Trainer would save the iterate, unless it has just evaluated.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from stormplus import Untuned
from stormplus.integrations.huggingface import UntunedCallback


class DigitsConfig(PretrainedConfig):
    model_type = "digits"
    width: int = 64


class DigitsModel(PreTrainedModel):
    config_class = DigitsConfig

    def __init__(self, config: DigitsConfig) -> None:
        super().__init__(config)
        self.net = nn.Sequential(
            nn.Linear(64, config.width),
            nn.BatchNorm1d(config.width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(config.width, 10),
        )
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="out/untuned_trainer")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32)
    rows = [{"pixel_values": x, "labels": int(y)} for x, y in zip(pixels, labels)]

    model = DigitsModel(DigitsConfig())
    opt = Untuned(model.parameters())
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=args.out,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=32,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="epoch",
            save_total_limit=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows[:1408],
        eval_dataset=rows[1408:],
        optimizers=(opt, None),
        callbacks=[UntunedCallback(recalibrate_batches=20)],
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean()},
    )
    trainer.train()

    where = "average" if opt.at_average else "iterate"
    steps = trainer.state.global_step
    print(f"{steps} steps, {opt.grad_evaluations} gradients, left at the {where}")
    saved = DigitsModel.from_pretrained(f"{args.out}/checkpoint-{steps}")
    same = all(torch.equal(p, q) for p, q in zip(saved.parameters(), model.parameters()))
    print(f"the last checkpoint is {'the same' if same else 'another'} model")
    print(f"accuracy on rows not trained on: {trainer.evaluate()['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
