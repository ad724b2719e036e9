"""Loops under Accelerate for the tests."""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from trainer_cases import BATCHES, EPOCHS, ROWS, Run, data, loss_of, make, network, snapshot

from stormplus import StormPlus, Untuned
from stormplus.integrations.accelerate import prepare
from stormplus.torch import PairedOptimizer


def closure_for(accelerator, model, opt, x, y, half=None):
    """All micro-batches of a sample, the last one outside `no_sync`."""
    parts = list(zip(x.split(ROWS), y.split(ROWS)))

    def closure():
        opt.zero_grad()
        total = 0.0
        for i, (u, v) in enumerate(parts):
            with nullcontext() if i == len(parts) - 1 else accelerator.no_sync(model):
                loss = loss_of(model, u, v, half) / len(parts)
                accelerator.backward(loss)
            total += loss.detach()
        return total

    return closure


def fit(
    folder, *, kind=StormPlus, tool=None, run=None, epochs=EPOCHS, accumulate=1, clip=None,
    dtype=torch.float64, half=None, scale=None, schedule=lambda step: 1.0, setup=lambda net: None,
    lr=1.0, batches=BATCHES, dropout=0.3, first=0, save=None, load=None,
):  # fmt: skip
    run = run or Run()
    pairs = issubclass(kind, PairedOptimizer)
    # An ordinary optimizer accumulates as Accelerate has it, one batch after another.
    window = 1 if pairs else accumulate
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if half and not scale else "no",
        gradient_accumulation_steps=window,
    )  # fmt: skip
    if scale:  # Accelerate has fp16 for other devices only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    run.scaler = accelerator.scaler
    net = run.net = network(dtype, dropout)
    setup(net)
    opt = run.opt = make(kind, net.parameters(), lr)
    rows = ROWS * accumulate // window
    loader = DataLoader(TensorDataset(*data(batches, dtype)), batch_size=rows)
    scheduler = run.scheduler = LambdaLR(opt, schedule)
    prepared = prepare if (pairs if tool is None else tool) else Accelerator.prepare
    model, opt, loader, scheduler = prepared(accelerator, net, opt, loader, scheduler)
    run.wrapper, run.model = opt, model
    if load:
        accelerator.load_state(load)
    for epoch in range(first, epochs):
        for i, (x, y) in enumerate(loader):
            if i % window == 0:
                torch.manual_seed(epoch * batches + i * accumulate // window)
            closure = closure_for(accelerator, model, opt, x, y, half if scale else None)
            if pairs:
                opt.step(closure, max_grad_norm=clip)
                scheduler.step()
                run.states.append(snapshot(net))
                continue
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x, y))
                opt.step()
                opt.zero_grad()
            if accelerator.sync_gradients:
                run.states.append(snapshot(net))
    if save:
        accelerator.save_state(save)
    return run


def in_two(folder):
    first = fit(folder, epochs=1, save=str(folder))
    return first, fit(folder, first=1, load=str(folder))


RESUMES = {"load_state": in_two}


def untuned(folder, first=0, epochs=EPOCHS, load=None, prepared=prepare, steps=1, **options):
    """A loop that knows `model.train()` and `model.eval()` only."""
    run = Run()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    net = run.net = network()
    run.opt = Untuned(net.parameters())
    rows = DataLoader(TensorDataset(*data()), batch_size=ROWS)
    model, opt, rows = prepared(accelerator, net, run.opt, rows, **options)
    run.validated, run.saved = {}, {}
    if load:
        accelerator.load_state(load)
    for epoch in range(first, epochs):
        model.train()
        for i, (x, y) in enumerate(rows):
            if i % steps == 0:
                torch.manual_seed(epoch * BATCHES + i)
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x, y))
                opt.step()
                opt.zero_grad()
            if accelerator.sync_gradients:
                run.states.append(snapshot(net))
        model.eval()
        with torch.no_grad():
            model(data(1)[0])
        done = (epoch + 1) * BATCHES // steps
        run.validated[done] = snapshot(net)
        model.train()
        accelerator.save_state(folder / str(done))
        run.saved[done] = load_file(folder / str(done) / "model.safetensors")
    return run


def untuned_in_two(folder):
    first = untuned(folder, epochs=1)
    return first, untuned(folder, first=1, load=folder / str(BATCHES))
