"""What each rank of a test of Untuned does."""

import torch
import torch.distributed.checkpoint as dcp
from ddp_jobs import place
from fsdp_jobs import sharded
from small_models import Loop, Tanh, batches, share, whole
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

from stormplus import Untuned
from stormplus.integrations.untuned import Average


def grouped(model):
    """Two parameter groups, the second with a factor of its own."""
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "factor": 0.5}]


def everything(model, opt, calls=None):
    """Parameters, buffers, numbers, and what `eval` puts into the parameters."""
    names = ("z_minus_x", "grad_rms", "initial_sample")
    out = {
        "x": [whole(p) for p in model.parameters()],
        "d": [whole(opt.state[p][name]) for p in model.parameters() for name in names],
        "numbers": opt.diagnostics(),
        "calls": calls,
    }
    opt.eval()
    out["d"] += [whole(p) for p in model.parameters()]
    opt.train()
    return out


def train(loop, samples, where=None):
    for batch in samples:
        loop.step(batch if where is None else share(batch, *where))


def one_process(steps, **options):
    model = Tanh()
    loop = Loop(model, Untuned(grouped(model), **options))
    train(loop, batches(steps))
    return everything(model, loop.opt, loop.calls)


def validating(steps, kind=None):
    """As `parity`, with a look at the average every few steps, and at the iterate before it.

    A forward pass without a backward one: FSDP2 then holds the root's parameters gathered.
    """
    model = Tanh() if kind is None else {"fsdp": sharded, "ddp": lambda: DDP(Tanh())}[kind]()
    loop, seen = Loop(model, Untuned(grouped(model))), []
    samples = batches(steps)
    inputs = samples[0][0]
    for i, batch in enumerate(samples):
        train(loop, [batch], None if kind is None else place())
        if i % 5 == 4:
            with torch.no_grad():
                seen.append(model(inputs))
                loop.opt.eval()
                seen.append(model(inputs))
                loop.opt.train()
    out = everything(model, loop.opt, loop.calls)
    return out | {"x": [*out["x"], *seen]}


def parity(steps, kind, **options):
    model = {"fsdp": sharded, "ddp": lambda: DDP(Tanh())}[kind]()
    loop = Loop(model, Untuned(grouped(model), **options))
    train(loop, batches(steps), place())
    return everything(model, loop.opt, loop.calls)


def one_bad_sample(steps, kind, bad_step):
    """Rank 1 alone has a sample that is not finite."""
    model = {"fsdp": sharded, "ddp": lambda: DDP(Tanh())}[kind]()
    loop, errors = Loop(model, Untuned(grouped(model))), []
    for step, batch in enumerate(batches(steps)):
        u, y = share(batch, *place())
        if step == bad_step and place()[0] == 1:
            u = u * float("nan")
        try:
            loop.step((u, y))
        except FloatingPointError as error:
            errors.append(str(error))
    return everything(model, loop.opt) | {"errors": errors}


def saved(steps, cut, folder):
    """Train a part on shards, and save."""
    model = sharded()
    loop = Loop(model, Untuned(grouped(model)))
    train(loop, batches(steps)[:cut], place())
    weights, state = get_state_dict(model, loop.opt)
    dcp.save({"model": weights, "opt": state}, checkpoint_id=folder)


def loaded(steps, cut, folder):
    """Load what others have saved, and go on."""
    model = sharded()
    loop = Loop(model, Untuned(grouped(model)))
    weights, state = get_state_dict(model, loop.opt)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=folder)
    set_state_dict(model, loop.opt, model_state_dict=weights, optim_state_dict=state)
    train(loop, batches(steps)[cut:], place())
    return everything(model, loop.opt)


def resumed(steps, cut, folder, averaged):
    """Train, save with torch's distributed checkpoint, load into a fresh model, and go on."""
    model = sharded()
    loop = Loop(model, Untuned(grouped(model)))
    samples = batches(steps)
    train(loop, samples[:cut], place())
    new_model = sharded()
    with torch.no_grad():
        for p in new_model.parameters():
            p.zero_()
    new_loop = Loop(new_model, Untuned(grouped(new_model)))
    if averaged:
        loop.opt.eval()
        new_loop.opt.eval()
    weights, state = get_state_dict(model, loop.opt)
    dcp.save({"model": weights, "opt": state}, checkpoint_id=folder)
    weights, state = get_state_dict(new_model, new_loop.opt)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=folder)
    set_state_dict(new_model, new_loop.opt, model_state_dict=weights, optim_state_dict=state)
    new_loop.opt.train()
    train(new_loop, samples[cut:], place())
    return everything(new_model, new_loop.opt)


def follow_joined_statistics():
    """A save on rank 0 alone would take the statistics of all ranks anew, and wait for ever."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
    opt, errors = Untuned(net.parameters()), []
    for count in (0, 4):
        try:
            Average([opt], net, count).follow(net).close()
        except ValueError as error:
            errors.append(str(error))
    return errors
