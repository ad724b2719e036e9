"""Models and trainers of Hugging Face for the tests, in one process and in several."""

import torch
from torch import nn
from trainer_cases import ROWS, data, loss_of, network, snapshot
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback
from transformers import TrainingArguments as Arguments

from stormplus import StormPlus
from stormplus.integrations.huggingface import StormPlusTrainer


class Model(nn.Module):
    """BatchNorm and dropout, and an answer as the trainer expects it."""

    def __init__(self, dtype=torch.float64, dropout=0.3):
        super().__init__()
        self.net, self.evaluations = network(dtype, dropout), 0

    def forward(self, x, labels):
        self.evaluations += 1
        return {"loss": loss_of(self.net, x, labels)}


class Rows(torch.utils.data.Dataset):
    def __init__(self, batches, dtype=torch.float64):
        self.x, self.y = data(batches, dtype)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


def bert(dropout=0.1):
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=17, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16, num_labels=3,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
            attn_implementation="eager",
        )
    )  # fmt: skip


class Recorder(TrainerCallback):
    """The network after every step."""

    def __init__(self, model):
        self.model, self.states = model, []

    def on_step_end(self, *args, **kwargs):
        self.states.append(snapshot(self.model))


class InOrder:
    """Rows in their order, and a seed before the first batch."""

    batches_seen = 0

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args, **kwargs):
        if self.batches_seen == 0:
            torch.manual_seed(0)
        self.batches_seen += 1
        return super().training_step(*args, **kwargs)


class OrderedTrainer(InOrder, StormPlusTrainer):
    pass


def arguments(folder, **options):
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "num_train_epochs": 1,
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


def run(
    folder, batches, dtype=torch.float64, trainer=OrderedTrainer, resume=None, lr=1.0, **options
):
    model = options.pop("model", None) or Model(dtype, options.pop("dropout", 0.3))
    setup = options.pop("setup", lambda trainer: None)
    checked = options.pop("eval_dataset", None)
    recorder = Recorder(getattr(model, "net", model))
    made = trainer(
        model, arguments(folder, **options), train_dataset=Rows(batches, dtype),
        optimizers=(StormPlus(model.parameters(), lr=lr), None), callbacks=[recorder],
        eval_dataset=checked,
    )  # fmt: skip
    setup(made)
    made.train(resume_from_checkpoint=resume)
    return recorder.states, made, model
