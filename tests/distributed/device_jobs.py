"""Jobs for any device: what can run on the CPU is run there, the rest waits for GPUs."""

import torch
from ddp_jobs import place
from fsdp_jobs import grouped
from small_models import Loop, Normalised, Tanh, batches, result, share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from stormplus import StormPlus, same_sample


def here(kind):
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(place()[0])
    return torch.device("cuda", place()[0])


def on(device, batch):
    return tuple(part.to(device) for part in batch)


def on_cpu(run):
    """Results travel between processes as CPU tensors."""
    return run | {key: [t.cpu() for t in run[key]] for key in run.keys() & {"x", "d", "buffers"}}


def replicated(kind, steps):
    device = here(kind)
    model = DDP(Tanh().to(device))
    loop = Loop(model, StormPlus(grouped(model)))
    for batch in batches(steps):
        loop.step(on(device, share(batch, *place())))
    return on_cpu(result(model, loop.opt, loop.calls))


def sharded(kind, steps, **options):
    device = here(kind)
    mesh = init_device_mesh(kind, (place()[1],))
    model = fully_shard(Tanh().to(device), mesh=mesh)
    loop = Loop(model, StormPlus(grouped(model), **options))
    for batch in batches(steps):
        loop.step(on(device, share(batch, *place())))
    return on_cpu(result(model, loop.opt, loop.calls))


class NormalisedOnly(Normalised):
    """Without dropout, which differs between the ranks by design."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Identity()


def _train_normalised(model, steps, of_batch):
    opt = StormPlus(model.parameters())
    loop = Loop(model, opt)
    for batch in batches(steps, rows=16):
        mine = of_batch(batch)
        opt.step(same_sample(opt, model)(lambda: loop.evaluate(mine)))
    return on_cpu(result(model, opt, loop.calls) | {"buffers": list(model.buffers())})


def sync_batchnorm(kind, steps):
    device = here(kind)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(NormalisedOnly()).to(device)
    ddp = DDP(model, device_ids=[device.index])
    return _train_normalised(ddp, steps, lambda batch: on(device, share(batch, *place())))


def joined_batchnorm(steps):
    return _train_normalised(NormalisedOnly(), steps, lambda batch: batch)
