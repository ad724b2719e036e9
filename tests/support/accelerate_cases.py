"""Loops under Accelerate for the tests."""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from trainer_cases import (
    BATCHES,
    EPOCHS,
    ROWS,
    Run,
    data,
    loss_of,
    make,
    network,
    nothing,
    snapshot,
)

from stormplus import StormPlus
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
    folder, *, kind=StormPlus, tool=True, run=None, epochs=EPOCHS, accumulate=1, clip=None,
    dtype=torch.float64, half=None, scale=None, schedule=None, setup=nothing, after=nothing, lr=1.0,
    watch=False, resume=False, recalibrate_batches=0, batches=BATCHES, dropout=0.3,
):  # fmt: skip
    """A loop that knows `model.train()` and `model.eval()`, but not `opt.eval()`."""
    run = run or Run()
    pairs = issubclass(kind, PairedOptimizer)
    window = 1 if pairs else accumulate  # Untuned accumulates as Accelerate does
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if half and not scale else "no",
        gradient_accumulation_steps=window,
    )  # fmt: skip
    if scale:  # Accelerate has fp16 for other devices only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    run.scaler = accelerator.scaler
    net = run.net = network(dtype, dropout)
    setup(net)
    run.opt = make(kind, net.parameters(), lr)
    rows = ROWS * accumulate // window
    loader = DataLoader(TensorDataset(*data(batches, dtype)), batch_size=rows)
    scheduler = run.scheduler = LambdaLR(run.opt, schedule or (lambda step: 1.0))
    objects = net, run.opt, loader, scheduler
    if tool:
        model, opt, loader, scheduler = prepare(
            accelerator, *objects, recalibrate_batches=recalibrate_batches
        )
    else:
        model, opt, loader, scheduler = accelerator.prepare(*objects)
    run.model = model
    if resume:
        accelerator.load_state(folder / str(BATCHES))
    for epoch in range(int(resume), epochs):
        model.train()
        for i, (x, y) in enumerate(loader):
            if i % window == 0:
                torch.manual_seed(epoch * batches + i * accumulate // window)
            if pairs:
                closure = closure_for(accelerator, model, opt, x, y, half if scale else None)
                opt.step(closure, **({"max_grad_norm": clip} if tool else {}))
                scheduler.step()
            else:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, x, y))
                    opt.step()
                    opt.zero_grad()
            if accelerator.sync_gradients:
                run.states.append(snapshot(net))
                after(net)
        done = (epoch + 1) * BATCHES // accumulate
        if watch:
            model.eval()
            with torch.no_grad():
                model(data(1, dtype)[0])
            run.validated[done] = snapshot(net)
            model.train()
            accelerator.save_state(folder / str(done))
            run.saved[done] = load_file(folder / str(done) / "model.safetensors")
    return run
