"""Models and trainers of Hugging Face for the tests, in one process and in several."""

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from trainer_cases import BATCHES, EPOCHS, ROWS, Run, data, loss_of, make, network, snapshot
from transformers import Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

from stormplus import StormPlus, Untuned
from stormplus.integrations.huggingface import StormPlusTrainer, UntunedCallback
from stormplus.torch import PairedOptimizer


class Model(nn.Module):
    """An answer as the trainer expects it."""

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
    """The network after every step."""

    def __init__(self, run):
        self.run = run

    def on_step_end(self, *args, **kwargs):
        self.run.states.append(snapshot(self.run.net))


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
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return Arguments(**settings | options)


def put_scaler(trainer, scale):
    """Accelerate has fp16 for other devices only; a scaler for this one is put in by hand."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trainer.accelerator.native_amp = True
    trainer.accelerator.state._mixed_precision = "fp16"


def fit(
    folder, *, kind=StormPlus, tool=None, run=None, epochs=EPOCHS, accumulate=1, clip=0.0,
    dtype=torch.float64, half=None, scale=None, schedule=None, setup=lambda net: None, lr=1.0,
    batches=BATCHES, trainer=None, dropout=0.3, seen=0, resume=None, callbacks=(),
    eval_dataset=None, **options,
):  # fmt: skip
    run = run or Run()
    tool = issubclass(kind, PairedOptimizer) if tool is None else tool
    model = Model(dtype, dropout)
    setup(model.net)
    opt = run.opt = make(kind, model.parameters(), lr)
    run.net = model.net
    given = arguments(
        folder, num_train_epochs=epochs, gradient_accumulation_steps=accumulate,
        max_grad_norm=clip or 0.0, bf16=half is not None, **options,
    )  # fmt: skip
    run.trainer = (trainer or (OrderedTrainer if tool else OrderedPlainTrainer))(
        model, given, train_dataset=Rows(batches, dtype), eval_dataset=eval_dataset,
        optimizers=(opt, schedule and LambdaLR(opt, schedule)),
        callbacks=[Recorder(run), *callbacks],
    )  # fmt: skip
    run.trainer.seen = seen
    if scale:
        put_scaler(run.trainer, scale)
    run.scaler = run.trainer.accelerator.scaler
    run.trainer.train(resume_from_checkpoint=resume)
    return run


def in_two(folder):
    # The whole run is asked for both times, because the trainer plans by it.
    saving = {"save_strategy": "steps", "save_steps": BATCHES, "save_total_limit": 4}
    first = fit(folder, **saving)
    first.states = first.states[:BATCHES]
    first.net.evaluations = 2 * BATCHES - 1
    return first, fit(folder, resume=str(folder / f"checkpoint-{BATCHES}"), seen=BATCHES)


RESUMES = {"resume_from_checkpoint": in_two}


class Validated(TrainerCallback):
    """Where the network was evaluated, by the number of steps so far."""

    def __init__(self, run):
        self.run = run
        run.validated = {}

    def on_prediction_step(self, args, state, *_, **kwargs):
        self.run.validated[state.global_step] = snapshot(self.run.net)


def untuned(folder, callback=None, **options):
    run = Run()
    tool = [UntunedCallback()] if callback is None else callback
    settings = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "epoch"}
    settings |= {"label_names": ["labels"], "per_device_eval_batch_size": ROWS}
    fit(
        folder, kind=Untuned, run=run, callbacks=[Validated(run), *tool], eval_dataset=Rows(1),
        **settings | options,
    )  # fmt: skip
    run.trainer.save_model(folder / f"checkpoint-{run.trainer.state.global_step}")
    run.saved = {
        int(path.name.split("-")[1]): weights_of(path) for path in folder.glob("checkpoint-*")
    }
    return run


def weights_of(folder):
    saved = load_file(folder / "model.safetensors")
    return {name.removeprefix("net."): value for name, value in saved.items()}


def untuned_in_two(folder):
    saving = {"save_steps": BATCHES, "eval_strategy": "no"}
    first = untuned(folder, **saving)
    first.states = first.states[:BATCHES]
    half = str(folder / f"checkpoint-{BATCHES}")
    return first, untuned(folder, resume=half, seen=BATCHES, **saving)
