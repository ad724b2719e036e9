"""What each rank of a test does. A job returns what the test compares."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

from stormplus import StormPlus, UniformIterate, Untuned
from stormplus.integrations.untuned import Average
from tests.distributed.small_models import Loop, make_optimizer, place, result, share
from tests.support.problems import EVEN, Tanh, batches, bounded_loss

with warnings.catch_warnings():
    # torch's own: these modules define TorchScript interfaces when they are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import (
        PostLocalSGDOptimizer,
        ZeroRedundancyOptimizer,
        _apply_optimizer_in_backward,
    )
    from torch.distributed.optim.optimizer import _LocalOptimizer

# -- models --------------------------------------------------------------------------------------


def ddp(dtype=torch.float64, **options):
    return DDP(Tanh(dtype), **options)


def fsdp(dtype=torch.float64, mesh=None):
    """Every layer is sharded as a unit of its own; a mesh is (replicas, shards)."""
    if mesh is not None:
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    model = Tanh(dtype)
    for layer in model.layers[:2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# -- equal to one process ------------------------------------------------------------------------


def parity(make, steps, dtype=torch.float64, halves=False, layout=None, **options):
    model = make(dtype, **(layout or {}))
    loop = Loop(model, make_optimizer(model, **options))
    for batch in batches(steps, dtype=dtype):
        (loop.move_and_estimate if halves else loop.step)(share(batch, *place()))
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return loop.result(shards=[part.numel() for part in parts])


def partly_sharded(steps, **options):
    """The first layer is sharded; the closure averages the gradients of the others."""
    model = Tanh()
    fully_shard(model.layers[0])
    plain = [p for layer in model.layers[1:] for p in layer.parameters()]

    def average():
        for p in plain:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    return Loop(model, make_optimizer(model, **options), average).train(batches(steps)).result()


class Collectives(TorchDispatchMode):
    """Records (name, elements) of every collective that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")):
            first = args[0]
            while isinstance(first, (list, tuple)):
                first = first[0]
            self.seen.append((name.split(".")[1], first.numel()))
        return func(*args, **(kwargs or {}))


def collectives_per_step(steps, make, layout=None, **options):
    """Returns those of the optimizer, without those of the backward passes."""
    model, seen = make(**(layout or {})), []
    loop = Loop(model, make_optimizer(model, **options))
    for batch in batches(steps):
        mine, collectives = share(batch, *place()), Collectives()
        if loop.opt.started:
            loop.evaluate(mine)
            with collectives:
                loop.opt.move()
        loop.evaluate(mine)
        with collectives:
            loop.opt.estimate()
        seen.append(collectives.seen)
    return seen


def tensor_parallel(steps, mesh, **options):
    """Colwise and rowwise layers; with two dimensions, sharded over the first as well."""
    names = ("data", "tensor")[-len(mesh) :]
    mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    model = Tanh(widths=EVEN)
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    data_rank, data_size = 0, 1
    if "data" in names:
        data_rank, data_size = mesh["data"].get_local_rank(), mesh["data"].size()
        fully_shard(model, mesh=mesh["data"])
    loop = Loop(model, make_optimizer(model, **options))
    for batch in batches(steps):
        loop.step(share(batch, data_rank, data_size))
    return loop.result(placements=str(next(model.parameters()).placements))


# -- bad gradients -------------------------------------------------------------------------------


def one_bad_gradient(make, steps, bad_call, value=float("nan"), mesh=None, **options):
    """Spoil rank 1's sample under DDP; under FSDP2 its shard, after the gradients were reduced."""
    model = make(**({} if mesh is None else {"mesh": mesh}))
    errors, pending, unmoved = [], [], []

    def bad():
        return place()[0] == 1 and loop.calls == bad_call

    def spoil_shard():
        if bad() and make is fsdp:
            model.layers[0].weight.grad.to_local()[0, 0] = value

    def spoil_input(module, inputs):
        return (inputs[0] * value,) if bad() and make is ddp else None

    model.register_forward_pre_hook(spoil_input)
    loop = Loop(model, make_optimizer(model, **options), spoil_shard)
    for batch in batches(steps):
        before = result(model, loop.opt)["x"]
        try:
            loop.train([batch])
        except FloatingPointError as error:
            after = result(model, loop.opt)["x"]
            errors.append(str(error))
            pending.append(getattr(loop.opt, "pending", False))
            unmoved.append(all(torch.equal(a, b) for a, b in zip(before, after)))
    return loop.result(errors=errors, pending=pending, unmoved=unmoved)


# -- state ---------------------------------------------------------------------------------------


def cosine(opt):
    return torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)


def part_of_a_run(first, last, load=None, save=None, averaged=False, **options):
    """Take steps `first` to `last` of 40; returns the state that was loaded, and the last one.

    A checkpoint is saved and loaded at the average of Untuned if `averaged`.
    """
    model = fsdp()
    opt = make_optimizer(model, **options)
    schedule, loop = cosine(opt), Loop(model, opt)

    def checkpoint():
        if averaged:
            opt.eval()
        weights, state = get_state_dict(model, opt)
        return {"model": weights, "opt": state, "schedule": schedule.state_dict()}

    if load is not None:
        for p in model.parameters():
            nn.init.zeros_(p)
        saved = checkpoint()
        dcp.load(saved, checkpoint_id=load)
        set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["opt"])
        schedule.load_state_dict(saved["schedule"])
        if averaged:
            opt.train()
    began = loop.result(schedule=schedule.state_dict())
    for batch in batches(40)[first:last]:
        loop.train([batch])
        schedule.step()
    ended = loop.result(schedule=schedule.state_dict())
    if save is not None:
        dcp.save(checkpoint(), checkpoint_id=save)
    return began, ended


def validating(steps, make=None):
    """Look at the iterate and the average of Untuned every few steps; without `make`, alone.

    A forward pass without a backward one: FSDP2 then holds the root's parameters gathered.
    """
    model = make() if make else Tanh()
    loop, seen, samples = Loop(model, make_optimizer(model, "untuned")), [], batches(steps)
    for i, batch in enumerate(samples):
        loop.step(share(batch, *place()) if make else batch)
        if i % 5 == 4:
            with torch.no_grad():
                seen.append(model(samples[0][0]))
                loop.opt.eval()
                seen.append(model(samples[0][0]))
                loop.opt.train()
    out = loop.result()
    return out | {"x": [*out["x"], *seen]}


def uniform_iterate(steps, of):
    """The kept iterate of a sharded model is one of the run's; returns which."""
    model = fsdp()
    source = model if of == "module" else list(model.parameters())
    loop, kept, trail = Loop(model, make_optimizer(model)), UniformIterate(source, seed=3), []
    for batch in batches(steps):
        trail.append(loop.train([batch]).result()["x"])
        with torch.no_grad():  # a validation leaves the root's parameters gathered
            model(batch[0])
        kept.update()
    with torch.no_grad():
        model(batch[0])
    kept.copy_to()
    assert kept.chosen < steps  # not the last, which would prove nothing
    twin = Tanh()
    for ours, p, expected in zip(
        loop.result()["x"], twin.parameters(), trail[kept.chosen - 1], strict=True
    ):
        assert torch.equal(ours, expected)
        p.data = expected
    with torch.no_grad():
        torch.testing.assert_close(model(batch[0]), twin(batch[0]), rtol=1e-12, atol=1e-12)
    return kept.chosen


def follow_joined_statistics():
    """A save on rank 0 alone would recompute the statistics of all ranks, and wait for ever."""
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    opt = Untuned(net.parameters())
    Average([opt], net).follow(net).close()
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        Average([opt], net, recalibrate_batches=4).follow(net)


# -- other wrappers ------------------------------------------------------------------------------


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
