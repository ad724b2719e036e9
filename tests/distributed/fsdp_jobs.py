"""What each rank of an FSDP2 or tensor-parallel test does."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counting import Collectives
from ddp_jobs import place
from small_models import OPTIMIZERS, Loop, Tanh, batches, result, share
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from stormplus import StormPlus, UniformIterate


def sharded(dtype=torch.float64, mesh=None):
    """Every layer a unit of its own, and the rest in the root's."""
    model = Tanh(dtype)
    for layer in model.layers[:2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def grouped(model):
    """Two parameter groups, the second with an lr of its own."""
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.5}]


def train(model, steps, dtype=torch.float64, method="storm+", halves=False, **options):
    loop = Loop(model, OPTIMIZERS[method](grouped(model), **options))
    for batch in batches(steps, dtype=dtype):
        (loop.move_and_estimate if halves else loop.step)(share(batch, *place()))
    return loop


def shard_sizes(model):
    return [p.to_local().numel() for p in model.parameters()]


def hybrid(mesh):
    return mesh and init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))


def parity(steps, dtype=torch.float64, mesh=None, **options):
    model = sharded(dtype, hybrid(mesh))
    loop = train(model, steps, dtype, **options)
    return result(model, loop.opt, loop.calls) | {"shards": shard_sizes(model)}


def mixed(steps, **options):
    """The first layer is sharded; the others are plain, averaged by the closure."""
    model = Tanh()
    fully_shard(model.layers[0])
    plain = [p for layer in model.layers[1:] for p in layer.parameters()]

    def average():
        for p in plain:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    loop = Loop(model, StormPlus(model.parameters(), **options), average)
    for batch in batches(steps):
        loop.step(share(batch, *place()))
    return result(model, loop.opt, loop.calls)


def unwatched(collectives, evaluate):
    """A closure whose own collectives are not counted."""

    def closure():
        collectives.watching = False
        loss = evaluate()
        collectives.watching = True
        return loss

    return closure


def counted(steps, mesh=None, **options):
    """What the optimizer sends in each step, the closures' own collectives left out."""
    model = sharded(mesh=hybrid(mesh))
    loop = Loop(model, StormPlus(grouped(model), **options))
    with Collectives() as collectives:
        for batch in batches(steps):
            mine = share(batch, *place())
            collectives.seen.append("step")
            loop.opt.step(unwatched(collectives, lambda: loop.evaluate(mine)))
    return collectives.seen


def one_bad_shard(steps, bad_call, bad_rank, value, mesh=None, **options):
    """One element of one rank's shard is not finite, after the gradients were reduced."""
    rank, _ = place()
    model = sharded(mesh=hybrid(mesh))
    errors, pending, before = [], [], []

    def spoil():
        if rank == bad_rank and loop.calls == bad_call:
            model.layers[0].weight.grad.to_local()[0, 0] = value

    loop = Loop(model, StormPlus(model.named_parameters(), **options), spoil)
    for batch in batches(steps):
        before = result(model, loop.opt)
        try:
            loop.step(share(batch, *place()))
        except FloatingPointError as error:
            errors.append(str(error))
            pending.append(loop.opt.pending)
            after = result(model, loop.opt)
            unmoved = all(torch.equal(a, b) for a, b in zip(before["x"], after["x"]))
    return result(model, loop.opt, loop.calls) | {
        "errors": errors, "pending": pending, "unmoved": unmoved,
    }  # fmt: skip


def _with_schedule(model, **options):
    opt = StormPlus(model.parameters(), **options)
    return opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)


def save(steps, folder, **options):
    """Train, then checkpoint; returns the state as it was saved."""
    model = sharded()
    opt, schedule = _with_schedule(model, **options)
    loop = Loop(model, opt)
    for batch in batches(40)[:steps]:
        loop.step(share(batch, *place()))
        schedule.step()
    weights, state = get_state_dict(model, opt)
    dcp.save(
        {"model": weights, "opt": state, "schedule": schedule.state_dict()}, checkpoint_id=folder
    )
    return result(model, opt) | {"schedule": schedule.state_dict(), "keys": _header(opt)}


def _header(opt):
    """The numbers of the run, as a checkpoint has them."""
    (scalars,) = (e["scalars"] for e in opt.state_dict()["state"].values() if "scalars" in e)
    return {k: v for k, v in scalars.items() if k != "rng"}


def load(steps, folder, **options):
    """Resume from another number of processes; returns the state as loaded, and the run."""
    model = sharded()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    opt, schedule = _with_schedule(model, **options)
    weights, state = get_state_dict(model, opt)
    saved = {"model": weights, "opt": state, "schedule": schedule.state_dict()}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    schedule.load_state_dict(saved["schedule"])
    loaded = result(model, opt) | {"schedule": schedule.state_dict(), "keys": _header(opt)}
    loop = Loop(model, opt)
    for batch in batches(40)[steps:]:
        loop.step(share(batch, *place()))
        schedule.step()
    return loaded, result(model, opt)


# torch's tensor parallelism wants a hidden dimension that divides evenly.
EVEN = (6, 8, 5, 1)


def tensor_parallel(steps, mesh, **options):
    """Colwise and rowwise layers; with two dimensions, sharded over the first as well."""
    names = ("data", "tensor")[-len(mesh) :]
    mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    model = Tanh(widths=EVEN)
    parallelize_module(
        model,
        mesh["tensor"],
        {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()},
    )
    data_rank, data_size = 0, 1
    if "data" in names:
        data_rank, data_size = mesh["data"].get_local_rank(), mesh["data"].size()
        fully_shard(model, mesh=mesh["data"])
    loop = Loop(model, StormPlus(model.parameters(), **options))
    collectives = Collectives()
    with collectives:
        for batch in batches(steps):
            mine = share(batch, data_rank, data_size)
            loop.opt.step(unwatched(collectives, lambda: loop.evaluate(mine)))
        collectives.watching = False
    placements = [str(getattr(p, "placements", "plain")) for p in model.parameters()]
    return result(model, loop.opt, loop.calls) | {
        "placements": placements, "sent": len(collectives.seen),
    }  # fmt: skip


def uniform_iterate(steps, of):
    """The kept iterate of a sharded model, whole."""
    model = sharded()
    opt = StormPlus(model.parameters())
    source = model if of == "module" else list(model.parameters())
    loop, kept, trail = Loop(model, opt), UniformIterate(source, seed=3), []
    for batch in batches(steps):
        loop.step(share(batch, *place()))
        trail.append(result(model, opt)["x"])
        with torch.no_grad():  # a validation leaves the root's parameters gathered
            model(batch[0])
        kept.update()
    with torch.no_grad():
        model(batch[0])
    kept.copy_to()
    out = {"x": result(model, opt)["x"], "expected": trail[kept.chosen - 1], "at": kept.chosen}
    twin = Tanh()
    with torch.no_grad():
        for p, x in zip(twin.parameters(), out["expected"], strict=True):
            p.copy_(x)
        torch.testing.assert_close(model(batch[0]), twin(batch[0]), rtol=1e-12, atol=1e-12)
    return out
