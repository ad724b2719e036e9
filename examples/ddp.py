"""Data parallel: BatchNorm, dropout and gradient accumulation on handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py [--steps N]

Every process evaluates its own rows; DDP averages the gradients, so all take the same step.
`same_sample` replays dropout in the second evaluation and moves the running statistics once.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from stormplus import StormPlus, same_sample

ROWS = 64  # per step, over all processes
MICRO_BATCHES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)

    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
        )
    )
    torch.manual_seed(1 + rank)  # each process drops different units
    opt = StormPlus(model.parameters(), lr=0.5)

    sampler = torch.Generator().manual_seed(0)  # the same on every process
    for step in range(steps):
        rows = torch.randint(1400, (ROWS,), generator=sampler).chunk(size)[rank]

        def closure() -> Tensor:
            opt.zero_grad()
            total = torch.zeros(())
            for i, part in enumerate(rows.chunk(MICRO_BATCHES)):
                last = i == MICRO_BATCHES - 1
                with nullcontext() if last else model.no_sync():  # send the gradients once
                    loss = F.cross_entropy(model(x[part]), y[part]) / MICRO_BATCHES
                    loss.backward()
                total += loss.detach()
            return total

        loss = opt.step(same_sample(opt, model)(closure))
        if rank == 0 and step % 50 == 0:
            print(f"step {step:4d}  loss {float(loss):.3f}  {opt.diagnostics()['step_size']:.4f}")

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(gathered, weights)
    model.eval()
    with torch.no_grad():
        accuracy = (model.module(x[1400:]).argmax(dim=1) == y[1400:]).float().mean()
    if rank == 0:
        print("identical on all processes:", all(torch.equal(w, weights) for w in gathered))
        counted = int(model.module[1].num_batches_tracked)
        print(f"BatchNorm counted {counted} micro-batches in {steps} steps")
        print(f"accuracy on rows not trained on: {float(accuracy):.3f}")
    dist.barrier()  # a process that leaves while gloo still works can crash on its way out
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
