"""Sharded training with a checkpoint that another number of processes can resume.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --steps 100 --save out/fsdp2
    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py --steps 200 --resume out/fsdp2

Parameters, gradients and the optimizer's one buffer are divided among the processes; the
norms in its rules are those of the whole model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from stormplus import StormPlus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="to be at when done")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint")
    parser.add_argument("--resume", type=Path, help="folder of a checkpoint")
    parser.add_argument("--replicas", type=int, default=1, help="more than 1: hybrid sharding")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)

    mesh = init_device_mesh("cpu", (size,))
    if args.replicas > 1:
        mesh = init_device_mesh(
            "cpu", (args.replicas, size // args.replicas), mesh_dim_names=("replicate", "shard")
        )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())
    model.append(nn.Linear(96, 10))
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = StormPlus(model.parameters(), lr=0.5)  # after fully_shard, which replaces parameters

    if args.resume:
        weights, state = get_state_dict(model, opt)
        dcp.load({"model": weights, "opt": state}, checkpoint_id=args.resume)
        set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    done = int(opt.diagnostics()["step"])

    for step in range(done, args.steps):
        sampler = torch.Generator().manual_seed(step)
        rows = torch.randint(1400, (64,), generator=sampler).chunk(size)[rank]

        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            return loss

        opt.step(closure)

    with torch.no_grad():
        accuracy = (model(x[1400:]).argmax(dim=1) == y[1400:]).float().mean()
    if args.save:
        weights, state = get_state_dict(model, opt)
        dcp.save({"model": weights, "opt": state}, checkpoint_id=args.save)
    here = sum(p.to_local().numel() for p in model.parameters())
    everywhere = sum(p.numel() for p in model.parameters())
    numbers = opt.diagnostics()
    if rank == 0:
        print(f"{size} processes, steps {done} to {args.steps}, {here} of {everywhere} here")
        print(f"|g| {numbers['grad_norm']:.6f}  eta {numbers['step_size']:.6f}")
        print(f"accuracy on rows not trained on: {float(accuracy):.3f}")
    dist.barrier()  # a process that leaves while gloo still works can crash on its way out
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
