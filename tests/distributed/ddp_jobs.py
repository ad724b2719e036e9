"""What each rank of a DDP test does."""

import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from small_models import (
    Loop,
    Normalised,
    Tanh,
    batches,
    bounded_loss,
    make_optimizer,
    place,
    result,
    share,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from stormplus import StormPlus, UniformIterate, same_sample


def parity(steps, dtype=torch.float64, halves=False, ddp=None, **options):
    model = DDP(Tanh(dtype), **(ddp or {}))
    loop = Loop(model, make_optimizer(model, **options))
    for batch in batches(steps, dtype=dtype):
        (loop.move_and_estimate if halves else loop.step)(share(batch, *place()))
    return loop.result()


def accumulation(steps, micro, set_to_none=True):
    """Micro-batches, with the gradients sent once an evaluation; returns what was sent too."""
    model, reduced = DDP(Tanh()), []

    def count(_, bucket):
        reduced.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, count)
    opt, calls = make_optimizer(model), 0
    for batch in batches(steps):
        u, y = share(batch, *place())

        def closure():
            nonlocal calls
            calls += 1
            opt.zero_grad(set_to_none=set_to_none)
            for i, (u_i, y_i) in enumerate(zip(u.chunk(micro), y.chunk(micro), strict=True)):
                with model.no_sync() if i < micro - 1 else nullcontext():
                    (bounded_loss(model(u_i), y_i) / micro).backward()

        opt.step(closure)
    return result(model, opt, calls) | {"reduced": len(reduced)}


class TwoBranches(nn.Module):
    """Which branch a sample takes is part of the sample."""

    def __init__(self):
        super().__init__()
        self.trunk, self.branches = Tanh(), nn.ModuleList([Tanh(seed=2), Tanh(seed=3)])

    def forward(self, u, branch):
        return self.trunk(u) + self.branches[branch](u)


def unused_parameters(steps, size=None):
    """With `size`, one process that takes the shares of so many ranks."""
    model = TwoBranches() if size else DDP(TwoBranches(), find_unused_parameters=True)
    ranks, size = (range(size), size) if size else ([place()[0]], place()[1])
    opt, missing = StormPlus(model.parameters()), 0
    for step, batch in enumerate(batches(steps)):

        def closure():
            nonlocal missing
            opt.zero_grad()
            losses = []
            for rank in ranks:
                branch = (0, 1, rank % 2)[step % 3]  # all take 0, all take 1, the ranks differ
                u, y = share(batch, rank, size)
                losses.append(bounded_loss(model(u, branch), y))
            torch.stack(losses).mean().backward()
            missing += sum(p.grad is None for p in model.parameters())

        opt.step(closure)
    return result(model, opt) | {"missing": missing}


def normalised(steps, halves=False):
    """BatchNorm and dropout; returns the statistics of what each layer saw, and its buffers."""
    rank, size = place()
    model = DDP(Normalised())
    torch.manual_seed(100 + rank)  # every rank drops other units
    opt = StormPlus(model.parameters())
    kept, loop = UniformIterate(model), Loop(model, opt)
    norms = {"fixed": model.module.fixed, "cumulative": model.module.cumulative}
    seen, history, buffers, masks = {}, [], [], []

    def watch(name):
        def hook(module, inputs):
            u = inputs[0].detach()
            seen[name] = {"running_mean": u.mean(dim=0), "running_var": u.var(dim=0)}

        return hook

    for name, module in norms.items():
        module.register_forward_pre_hook(watch(name))
    model.module.drop.register_forward_hook(
        lambda _, inputs, out: masks.append((out == 0) & (inputs[0] != 0))
    )
    for batch in batches(steps, rows=16):
        mine = share(batch, rank, size)
        if halves:
            with same_sample(opt, model):
                loop.move_and_estimate(mine)
        else:
            opt.step(same_sample(opt, model)(lambda: loop.evaluate(mine)))
        history.append({name: dict(values) for name, values in seen.items()})
        buffers.append({n: {k: b.clone() for k, b in m.named_buffers()} for n, m in norms.items()})
        kept.update()
    return loop.result(seen=history, buffers=buffers, masks=masks, chosen=kept.chosen)


def one_bad_sample(make_model, steps, bad_call, **options):
    """Rank 1 alone has a sample that is not finite."""
    model = make_model()
    opt, errors = make_optimizer(model, **options), []
    loop = Loop(model, opt)
    for batch in batches(steps):
        u, y = share(batch, *place())

        def closure():
            bad = place()[0] == 1 and loop.calls + 1 == bad_call
            return loop.evaluate((u * float("nan") if bad else u, y))

        try:
            opt.step(closure)
        except FloatingPointError as error:
            errors.append(str(error))
    return loop.result(errors=errors)


def ddp_model():
    return DDP(Tanh())


def one_bad_gradient_after_the_average(seconds):
    """Rank 1 alone spoils its gradient when DDP has averaged it, in the third step's first half."""
    rank, _ = place()
    model = DDP(Tanh(), process_group=dist.new_group(timeout=timedelta(seconds=seconds)))
    opt, error = StormPlus(model.parameters()), ""

    def spoil():
        if rank == 1 and loop.calls == 4:
            next(model.parameters()).grad.fill_(float("nan"))

    def values():
        return [p.detach().clone() for p in model.parameters()]

    loop, start = Loop(model, opt, spoil), time.monotonic()
    for batch in batches(3):
        before = values()
        try:
            loop.train([batch])
        except (FloatingPointError, RuntimeError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    moved = any(not torch.equal(a, b) for a, b in zip(before, values()))
    waited = time.monotonic() - start
    time.sleep(max(0.0, seconds + 2 - waited))  # until the others have given up
    return {"error": error, "moved": moved, "waited": waited, "pending": opt.pending}
