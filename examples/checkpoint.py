"""Train, be killed at any moment, resume: the end is the same, bit for bit.

    python examples/checkpoint.py --out run      # interrupt it, run it again, and again

What a checkpoint holds: model, optimizer, scheduler, loss scale, random state, the uniform
iterate and the number of samples taken. It is made between two steps, written to a temporary file
and renamed, so that a kill never leaves half of one.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from stormplus import StormPlus, UniformIterate, scaled_step


class Run:
    def __init__(self, folder: Path, samples: int) -> None:
        torch.manual_seed(0)
        x, y = load_digits(return_X_y=True)
        self.x, self.y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
        self.model = nn.Sequential(
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 10)
        )
        self.opt = StormPlus(self.model.parameters(), lr=0.5)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, samples)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=50)
        self.iterate = UniformIterate(self.model)
        self.samples, self.taken = samples, 0
        self.file = folder / "checkpoint.pt"
        folder.mkdir(parents=True, exist_ok=True)

    def parts(self) -> dict[str, object]:
        return {
            name: getattr(self, name) for name in ("model", "opt", "schedule", "scaler", "iterate")
        }

    def save(self) -> None:
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state |= {"taken": self.taken, "random": torch.get_rng_state()}
        temporary = self.file.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self.file)

    def resume(self) -> None:
        if self.file.exists():
            state = torch.load(self.file, weights_only=True)
            for name, part in self.parts().items():
                part.load_state_dict(state[name])
            self.taken = state["taken"]
            torch.set_rng_state(state["random"])

    def take(self) -> None:
        # The batch is a function of the sample's number, so that a resumed run finds it.
        draw = torch.Generator().manual_seed(self.taken)
        index = torch.randint(len(self.x), (64,), generator=draw)

        def closure() -> torch.Tensor:
            self.opt.zero_grad()
            loss = F.cross_entropy(self.model(self.x[index]), self.y[index])
            self.scaler.scale(loss).backward()
            return loss

        scaled_step(self.opt, self.scaler, closure, self.model)

    def train(self) -> None:
        while self.taken < self.samples:
            self.take()
            self.schedule.step()
            self.iterate.update()
            self.taken += 1
            self.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/checkpoint"))
    parser.add_argument("--samples", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(args.out, args.samples)
    run.resume()
    print(f"starting from sample {run.taken}", flush=True)
    run.train()
    run.model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(run.model(run.x), run.y).item()
    print(f"training loss {loss:.4f} after {run.taken} samples, iterate {run.iterate.chosen} kept")


if __name__ == "__main__":
    main()
