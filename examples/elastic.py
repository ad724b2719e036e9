"""A run that may be killed: it resumes from its last checkpoint and ends with the same weights.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py --out out/elastic

If a process dies, torchrun starts all of them again; without the first line they may try to
reach the dead one (pytorch/pytorch#135712). If the machine dies, run the same command
again. With the same number of processes the final weights are, bit for bit, those
of a run that was never interrupted.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from stormplus import StormPlus


def newest_checkpoint(folder: Path) -> Path | None:
    # `.metadata` is written last: a checkpoint that was cut short has none.
    complete = sorted(file.parent for file in folder.glob("step-*/.metadata"))
    return complete[-1] if complete else None


def snapshot(model: nn.Module, opt: StormPlus, schedule: CosineAnnealingLR) -> dict[str, Any]:
    weights, state = get_state_dict(model, opt)
    return {"model": weights, "opt": state, "schedule": schedule.state_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="for checkpoints and weights")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.GELU(),
        nn.Dropout(0.1), nn.Linear(96, 10),
    )  # fmt: skip
    fully_shard(model)
    opt = StormPlus(model.parameters(), lr=0.5)
    schedule = CosineAnnealingLR(opt, args.steps)

    found = newest_checkpoint(args.out)
    if found is not None:
        saved = snapshot(model, opt, schedule)
        dcp.load(saved, checkpoint_id=found)
        set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["opt"])
        schedule.load_state_dict(saved["schedule"])
    done = int(opt.diagnostics()["step"])
    print(f"rank {rank} is process {os.getpid()} and starts after step {done}", flush=True)

    for step in range(done, args.steps):
        # Data and dropout follow from the step and the rank alone, so that there is no
        # random state to save.
        sampler = torch.Generator().manual_seed(step)
        rows = torch.randint(1400, (64,), generator=sampler).chunk(size)[rank]
        torch.manual_seed(1 + step * size + rank)

        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            return loss

        opt.step(closure)
        schedule.step()
        if (step + 1) % args.every == 0:
            folder = args.out / f"step-{step + 1:06d}"
            dcp.save(snapshot(model, opt, schedule), checkpoint_id=folder)

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.eval()
    with torch.no_grad():
        accuracy = (model(x[1400:]).argmax(dim=1) == y[1400:]).float().mean()
    if rank == 0:
        torch.save(weights, args.out / "weights.pt")
        print(f"accuracy on rows not trained on: {float(accuracy):.3f}")
    dist.barrier()  # a process that leaves while gloo still works can crash on its way out
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
