"""The trainer of Hugging Face: options are those of `TrainingArguments`, and `trainer`."""

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments

from stormplus.integrations.huggingface import StormPlusTrainer, UntunedCallback
from tests.support.trainer_cases import BATCHES, ROWS, data, loss_of, snapshot


class Model(nn.Module):
    """Returns the loss as the trainer expects it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        return {"loss": loss_of(self.net, x, labels)}


def rows(x, y):
    return [{"x": u, "labels": v} for u, v in zip(x, y)]


class Recorder(TrainerCallback):
    def __init__(self, s):
        self.s = s

    def on_step_end(self, *args, **kwargs):
        self.s.record()

    def on_prediction_step(self, args, state, *_, **kwargs):
        self.s.run.validated[state.global_step] = snapshot(self.s.run.net)


class InOrder:
    """Rows in their order, and a seed before each sample: the number of its first batch."""

    seen = 0

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args, **kwargs):
        batches = len(self.train_dataset) // ROWS
        if self.seen % batches % self.args.gradient_accumulation_steps == 0:
            torch.manual_seed(self.seen)
        self.seen += 1
        return super().training_step(*args, **kwargs)


class OrderedTrainer(InOrder, StormPlusTrainer):
    pass


class OrderedPlainTrainer(InOrder, Trainer):
    pass


def arguments(folder, **options):
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "label_names": ["labels"],
    }
    return TrainingArguments(**settings | options)


def train(s):
    run, options = s.run, dict(s.options)
    model = Model(s.network())
    opt = s.optimizer(model.parameters())
    make = options.pop("trainer", OrderedTrainer if s.tool and s.pairs else OrderedPlainTrainer)
    own = [UntunedCallback(recalibrate_batches=s.recalibrate_batches)]
    if s.watch:
        watching = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch"}
        options = watching | options
    args = arguments(
        s.folder, num_train_epochs=s.epochs, gradient_accumulation_steps=s.accumulate,
        max_grad_norm=s.clip or 0.0, bf16=s.half is not None and not s.scale, **options,
    )  # fmt: skip
    trainer = run.trainer = make(
        model, args, train_dataset=rows(*s.data()), eval_dataset=rows(*data(1, s.dtype)),
        optimizers=(opt, s.schedule and LambdaLR(opt, s.schedule)),
        callbacks=[Recorder(s), *s.callbacks, *own * (s.tool and not s.pairs)],
    )  # fmt: skip
    trainer.seen = BATCHES if s.resume else 0
    if s.scale:  # Accelerate has fp16 for other devices only: a scaler for the CPU by hand
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=s.scale)
        trainer.accelerator.native_amp = True
        trainer.accelerator.state._mixed_precision = "fp16"
    run.scaler = trainer.accelerator.scaler
    path = str(s.folder / f"checkpoint-{BATCHES}") if s.resume is True else s.resume or None
    trainer.train(resume_from_checkpoint=path)
    for path in s.folder.glob("checkpoint-*"):
        saved = load_file(path / "model.safetensors").items()
        run.saved[int(path.name.split("-")[1])] = {k.removeprefix("net."): v for k, v in saved}


def again(run):
    run.trainer.train()
