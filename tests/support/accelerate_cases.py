"""A loop under Accelerate that knows `model.train()` and `model.eval()`, but not `opt.eval()`."""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from stormplus.integrations.accelerate import prepare
from tests.support.trainer_cases import BATCHES, ROWS, data, loss_of, snapshot


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


def train(s):
    run, net = s.run, s.network()
    opt = s.optimizer(net.parameters())
    window = 1 if s.pairs else s.accumulate  # Untuned accumulates as Accelerate does
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if s.half and not s.scale else "no",
        gradient_accumulation_steps=window,
    )  # fmt: skip
    if s.scale:  # Accelerate has fp16 for other devices only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=s.scale)
    run.scaler = accelerator.scaler
    loader = DataLoader(TensorDataset(*s.data()), batch_size=ROWS * s.accumulate // window)
    run.scheduler = LambdaLR(opt, s.schedule or (lambda step: 1.0))
    extra = {}
    if s.tool:
        options = {"recalibrate_batches": s.recalibrate_batches}
        model, loader = prepare(accelerator, net, loader)
        opt, scheduler = prepare(accelerator, opt, run.scheduler, **options)
        extra = {"max_grad_norm": s.clip}
    else:
        model, opt, loader, scheduler = accelerator.prepare(net, opt, loader, run.scheduler)
    run.model = model
    if s.resume:
        accelerator.load_state(s.folder / str(BATCHES))
    for epoch in range(int(s.resume), s.epochs):
        model.train()
        for i, (x, y) in enumerate(loader):
            if i % window == 0:
                torch.manual_seed(epoch * s.batches + i * s.accumulate // window)
            if s.pairs:
                half = s.half if s.scale else None
                opt.step(closure_for(accelerator, model, opt, x, y, half), **extra)
                scheduler.step()
            else:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, x, y))
                    opt.step()
                    scheduler.step()
                    opt.zero_grad()
            if accelerator.sync_gradients:
                s.record()
        done = (epoch + 1) * BATCHES // s.accumulate
        if s.watch:
            model.eval()
            with torch.no_grad():
                model(data(1, s.dtype)[0])
            run.validated[done] = snapshot(net)
            model.train()
            accelerator.save_state(s.folder / str(done))
            run.saved[done] = load_file(s.folder / str(done) / "model.safetensors")
