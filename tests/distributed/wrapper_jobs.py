"""What each rank of a test of other wrappers does, its assertions included."""

import warnings

import pytest
import torch
import torch.distributed as dist
from small_models import Loop, Tanh, batches, bounded_loss, place, result
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from stormplus import StormPlus

with warnings.catch_warnings():
    # torch's own: these modules define TorchScript interfaces when they are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import (
        PostLocalSGDOptimizer,
        ZeroRedundancyOptimizer,
        _apply_optimizer_in_backward,
    )
    from torch.distributed.optim.optimizer import _LocalOptimizer


def zero_redundancy():
    with pytest.raises(RuntimeError, match=r"zero_redundancy_optimizer gives .*fully_shard"):
        ZeroRedundancyOptimizer(Tanh().parameters(), StormPlus, lr=0.1)


def distributed_optimizer():
    class Remote:  # an RRef that lives here
        def local_value(self):
            return nn.Parameter(torch.ones(2))

    _LocalOptimizer(StormPlus, [Remote()])


def optimizer_in_backward():
    _apply_optimizer_in_backward(StormPlus, Tanh().parameters(), {"lr": 0.1})


def post_local_sgd():
    model = Tanh()
    opt = PostLocalSGDOptimizer(StormPlus(model.parameters()), PeriodicModelAverager(period=4))
    bounded_loss(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    with pytest.raises(TypeError, match="needs a closure"):
        opt.step()


def fsdp1(use_orig_params, before=False):
    """`before`: the optimizer is made first, which keeps its parameters if they are the original
    ones, and finds out at its first step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: FSDP1 is deprecated, and slow on CPUs
        model = Tanh()
        opt = StormPlus(model.parameters()) if before else None
        model = FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        with pytest.raises(RuntimeError, match="FullyShardedDataParallel"):
            Loop(model, opt or StormPlus(model.parameters())).step(batches(1)[0])


def partial_sum():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = {}
    for placement in (Partial(), Shard(0), Replicate()):
        params[placement] = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [placement]))
    StormPlus([params[Shard(0)], params[Replicate()]])
    with pytest.raises(RuntimeError, match="is only a part of a sum"):
        StormPlus([params[Partial()]])


def partial_gradient(steps, ranks=None, **options):
    """A replicated parameter whose gradient is still a sum; with `ranks`, all of it here."""
    start = torch.linspace(-1, 1, 5, dtype=torch.float64)
    size = ranks or place()[1]
    mesh = None if ranks else init_device_mesh("cpu", (size,))
    p = nn.Parameter(start if ranks else DTensor.from_local(start, mesh, [Replicate()]))
    opt = StormPlus([p], **options)
    rows = torch.randn(steps, size, 5, generator=torch.Generator().manual_seed(4)).double()
    for row in rows:

        def closure():
            x = (p.detach() if ranks else p.detach().to_local()).clone().requires_grad_()
            mine = row if ranks else row[place()[0]].unsqueeze(0)
            loss = torch.log1p((x * mine).tanh().square().sum(dim=1)).sum()
            (g,) = torch.autograd.grad(loss, x)
            p.grad = g if ranks else DTensor.from_local(g, mesh, [Partial()])

        opt.step(closure)
    return (p.detach() if ranks else p.detach().to_local()).clone(), opt.diagnostics()


def pipeline(steps):
    """Each process has the layers of its stage, and an optimizer for those alone."""
    rank, size = place()
    mine = Tanh()
    mine.layers = mine.layers[:2] if rank == 0 else mine.layers[2:]
    data = batches(steps)
    example = torch.zeros(4, mine.layers[0].in_features, dtype=torch.float64)  # half a batch
    stage = PipelineStage(mine, rank, size, torch.device("cpu"), input_args=(example,))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=bounded_loss)
    opt = StormPlus(mine.parameters(), check_finite=False)
    for u, y in data:

        def closure():
            opt.zero_grad()
            if rank == 0:
                schedule.step(u)
            else:
                schedule.step(target=y, losses=[])

        opt.step(closure)
    return result(mine, opt)
