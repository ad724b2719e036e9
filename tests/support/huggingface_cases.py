"""Models and trainers of Hugging Face for the tests, in one process and in several."""

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from trainer_cases import (
    BATCHES,
    EPOCHS,
    ROWS,
    Run,
    data,
    loss_of,
    make,
    network,
    nothing,
    snapshot,
)
from transformers import Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

from stormplus import StormPlus
from stormplus.integrations.huggingface import StormPlusTrainer, UntunedCallback
from stormplus.torch import PairedOptimizer


class Model(nn.Module):
    """Returns the loss as the trainer expects it."""

    def __init__(self, dtype=torch.float64, dropout=0.3):
        super().__init__()
        self.net = network(dtype, dropout)

    def forward(self, x, labels):
        return {"loss": loss_of(self.net, x, labels)}


class Rows(torch.utils.data.Dataset):
    def __init__(self, batches=BATCHES, dtype=torch.float64):
        self.x, self.y = data(batches, dtype)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Recorder(TrainerCallback):
    """Records the network after every step, and where it was evaluated."""

    def __init__(self, run, after):
        self.run, self.after = run, after

    def on_step_end(self, *args, **kwargs):
        self.run.states.append(snapshot(self.run.net))
        self.after(self.run.net)

    def on_prediction_step(self, args, state, *_, **kwargs):
        self.run.validated[state.global_step] = snapshot(self.run.net)


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
        "num_train_epochs": EPOCHS,
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
    return Arguments(**settings | options)


def weights_of(folder):
    saved = load_file(folder / "model.safetensors")
    return {name.removeprefix("net."): value for name, value in saved.items()}


def fit(
    folder, *callbacks, kind=StormPlus, tool=True, run=None, epochs=EPOCHS, accumulate=1, clip=None,
    dtype=torch.float64, half=None, scale=None, schedule=None, setup=nothing, after=nothing, lr=1.0,
    watch=False, resume=False, recalibrate_batches=0, batches=BATCHES, dropout=0.3, trainer=None,
    **options,
):  # fmt: skip
    run, pairs = run or Run(), issubclass(kind, PairedOptimizer)
    model = Model(dtype, dropout)
    setup(model.net)
    opt = run.opt = make(kind, model.parameters(), lr)
    run.net = model.net
    own = [UntunedCallback(recalibrate_batches=recalibrate_batches)] * (tool and not pairs)
    watching = (
        {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch"} if watch else {}
    )
    given = arguments(
        folder, num_train_epochs=epochs, gradient_accumulation_steps=accumulate,
        max_grad_norm=clip or 0.0, bf16=half is not None and not scale,
        **(watching if watch else {}) | options,
    )  # fmt: skip
    run.trainer = (trainer or (OrderedTrainer if tool and pairs else OrderedPlainTrainer))(
        model, given, train_dataset=Rows(batches, dtype), eval_dataset=Rows(1, dtype),
        optimizers=(opt, schedule and LambdaLR(opt, schedule)),
        callbacks=[Recorder(run, after), *callbacks, *own],
    )  # fmt: skip
    run.trainer.seen = BATCHES if resume else 0
    if scale:  # Accelerate has fp16 for other devices only: a scaler for the CPU by hand
        run.trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        run.trainer.accelerator.native_amp = True
        run.trainer.accelerator.state._mixed_precision = "fp16"
    run.scaler = run.trainer.accelerator.scaler
    path = str(folder / f"checkpoint-{BATCHES}") if resume is True else resume or None
    run.trainer.train(resume_from_checkpoint=path)
    run.saved = {
        int(path.name.split("-")[1]): weights_of(path) for path in folder.glob("checkpoint-*")
    }
    return run


def again(run):
    run.trainer.train()
