"""What each rank of an FSDP2 or tensor-parallel test does."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import EVEN, Loop, Tanh, batches, make_optimizer, place, result, share
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

from stormplus import UniformIterate, Untuned
from stormplus.integrations.untuned import Average


def sharded(dtype=torch.float64, mesh=None):
    """Every layer a unit of its own, and the rest in the root's; a mesh is (replicas, shards)."""
    if mesh is not None:
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    model = Tanh(dtype)
    for layer in model.layers[:2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parity(steps, dtype=torch.float64, mesh=None, halves=False, **options):
    model = sharded(dtype, mesh)
    loop = Loop(model, make_optimizer(model, **options))
    for batch in batches(steps, dtype=dtype):
        (loop.move_and_estimate if halves else loop.step)(share(batch, *place()))
    return loop.result(shards=[p.to_local().numel() for p in model.parameters()])


def mixed(steps, **options):
    """The first layer is sharded; the others are plain, averaged by the closure."""
    model = Tanh()
    fully_shard(model.layers[0])
    plain = [p for layer in model.layers[1:] for p in layer.parameters()]

    def average():
        for p in plain:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    return Loop(model, make_optimizer(model, **options), average).train(batches(steps)).result()


class Collectives(TorchDispatchMode):
    """Records (name, elements) of every collective that torch dispatches outside `evaluate`."""

    def __init__(self):
        super().__init__()
        self.seen, self.watching = [], True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if self.watching and name.startswith(("c10d.", "_c10d_functional.")):
            first = args[0]
            while isinstance(first, (list, tuple)):
                first = first[0]
            self.seen.append((name.split(".")[1], first.numel()))
        return func(*args, **(kwargs or {}))

    def step(self, loop, batch):
        def closure():
            self.watching = False
            loss = loop.evaluate(batch)
            self.watching = True
            return loss

        with self:
            loop.opt.step(closure)


def counted(steps, mesh=None, **options):
    """What the optimizer sends in each step, the closures' own collectives left out."""
    model = sharded(mesh=mesh)
    loop, collectives = Loop(model, make_optimizer(model, **options)), Collectives()
    for batch in batches(steps):
        collectives.seen.append("step")
        collectives.step(loop, share(batch, *place()))
    return collectives.seen


def one_bad_shard(steps, bad_call, bad_rank, value, mesh=None, **options):
    """One element of one rank's shard is not finite, after the gradients were reduced."""
    model = sharded(mesh=mesh)
    errors, pending = [], []

    def spoil():
        if place()[0] == bad_rank and loop.calls == bad_call:
            model.layers[0].weight.grad.to_local()[0, 0] = value

    loop = Loop(model, make_optimizer(model, **options), spoil)
    for batch in batches(steps):
        before = result(model, loop.opt)["x"]
        try:
            loop.train([batch])
        except FloatingPointError as error:
            errors.append(str(error))
            pending.append(loop.opt.pending)
            after = result(model, loop.opt)["x"]
            unmoved = all(torch.equal(a, b) for a, b in zip(before, after))
    return loop.result(errors=errors, pending=pending, unmoved=unmoved)


def cosine(opt):
    return torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)


def _go_on(loop, schedule, samples):
    for batch in samples:
        loop.train([batch])
        schedule.step()
    return result(loop.model, loop.opt) | {"schedule": schedule.state_dict()}


def save(steps, folder, averaged=False, **options):
    """Train, then checkpoint, at the average of Untuned if asked; returns the state as saved."""
    model = sharded()
    opt = make_optimizer(model, **options)
    schedule = cosine(opt)
    saved = _go_on(Loop(model, opt), schedule, batches(40)[:steps])
    if averaged:
        opt.eval()
    weights, state = get_state_dict(model, opt)
    dcp.save(
        {"model": weights, "opt": state, "schedule": schedule.state_dict()}, checkpoint_id=folder
    )
    return saved


def load(steps, folder, averaged=False, **options):
    """Resume from another number of processes; returns the state as loaded, and the run."""
    model = sharded()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    opt = make_optimizer(model, **options)
    schedule = cosine(opt)
    if averaged:
        opt.eval()
    weights, state = get_state_dict(model, opt)
    saved = {"model": weights, "opt": state, "schedule": schedule.state_dict()}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    schedule.load_state_dict(saved["schedule"])
    if averaged:
        opt.train()
    loop = Loop(model, opt)
    return _go_on(loop, schedule, []), _go_on(loop, schedule, batches(40)[steps:])


def uninterrupted(**options):
    model = sharded()
    opt = make_optimizer(model, **options)
    return _go_on(Loop(model, opt), cosine(opt), batches(40))


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
    loop, collectives = Loop(model, make_optimizer(model, **options)), Collectives()
    for batch in batches(steps):
        collectives.step(loop, share(batch, data_rank, data_size))
    first = next(model.parameters())
    return loop.result(placements=str(first.placements), sent=len(collectives.seen))


def validating(steps, kind):
    """Look at the iterate and the average of Untuned every few steps.

    A forward pass without a backward one: FSDP2 then holds the root's parameters gathered.
    """
    model = {"alone": Tanh, "fsdp": sharded, "ddp": lambda: DDP(Tanh())}[kind]()
    loop, seen, samples = Loop(model, make_optimizer(model, "untuned")), [], batches(steps)
    for i, batch in enumerate(samples):
        loop.step(batch if kind == "alone" else share(batch, *place()))
        if i % 5 == 4:
            with torch.no_grad():
                seen.append(model(samples[0][0]))
                loop.opt.eval()
                seen.append(model(samples[0][0]))
                loop.opt.train()
    out = loop.result()
    return out | {"x": [*out["x"], *seen]}


def uniform_iterate(steps, of):
    """The kept iterate of a sharded model, whole."""
    model = sharded()
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
    out = {"x": loop.result()["x"], "expected": trail[kept.chosen - 1], "at": kept.chosen}
    twin = Tanh()
    with torch.no_grad():
        for p, x in zip(twin.parameters(), out["expected"], strict=True):
            p.copy_(x)
        torch.testing.assert_close(model(batch[0]), twin(batch[0]), rtol=1e-12, atol=1e-12)
    return out


def follow_joined_statistics():
    """A save on rank 0 alone would take the statistics of all ranks anew, and wait for ever."""
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    opt, errors = Untuned(net.parameters()), []
    for count in (0, 4):
        try:
            Average([opt], net, count).follow(net).close()
        except ValueError as error:
            errors.append(str(error))
    return errors
