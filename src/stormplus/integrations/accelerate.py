"""Accelerate: `prepare` in place of `accelerator.prepare`.

Accelerate drops a closure whenever gradients are not synchronized, and in fp16 passes it to
`scaler.step`, which cannot use it. `prepare` makes `step` exact, or raise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from stormplus.install import required
from stormplus.integrations.replay import CLIPPING
from stormplus.integrations.untuned import Average
from stormplus.torch import PairedOptimizer, Untuned, same_sample, scaled_step

with required("accelerate"):
    from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped, unused-ignore]
    from accelerate.utils import DistributedType  # type: ignore[import-untyped, unused-ignore]

VERIFIED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)

ACCUMULATE = (
    "let the closure cover all micro-batches, the last one outside accelerator.no_sync(model), "
    "and leave gradient_accumulation_steps at 1: see examples/accelerate_loop.py"
)


class StormPlusAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc, unused-ignore]
    """Accelerate's wrapper around a paired optimizer, as `prepare` returns it."""

    model: nn.Module | None
    _warned = False

    def step(
        self, closure: Callable[[], Any] | None = None, *, max_grad_norm: float | None = None
    ) -> Any:
        """Take one sample and return the loss of its first evaluation.

        Args:
            closure: Zeroes the gradients, computes the loss of ONE sample, calls
                `accelerator.backward(loss)` and returns the loss.
            max_grad_norm: Clips each of the two gradients, after unscaling in fp16.
        """
        opt: PairedOptimizer = self.optimizer
        if closure is None:
            return opt.step()  # raises, and says what to write
        if not self.gradient_state.sync_gradients:
            raise RuntimeError(f"Accelerate would silently drop this closure: {ACCUMULATE}")
        if max_grad_norm is not None and not self._warned:
            self._warned = True
            warnings.warn(f"max_grad_norm={max_grad_norm:g} {CLIPPING}", stacklevel=2)

        def clip() -> None:
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(opt.parameters(), max_grad_norm)

        def evaluate() -> Any:
            loss = closure()
            clip()
            return loss

        if self.scaler is None:
            return opt.step(same_sample(opt, self.model)(evaluate))
        before = opt.grad_evaluations
        loss = scaled_step(opt, self.scaler, closure, self.model, process=clip)
        self._is_overflow = before == opt.grad_evaluations  # read by Accelerate's scheduler
        return loss


def prepare(accelerator: Accelerator, *objects: Any, recalibrate_batches: int = 0) -> Any:
    """Call `accelerator.prepare`, and make `step` of paired optimizers exact.

    The model of an `Untuned` holds the iterate when it is called in train mode, and the average
    when it is called in eval mode or saved; `model.train()` and `model.eval()` are enough.

    Args:
        accelerator: With `gradient_accumulation_steps=1` for paired optimizers; accumulate inside
            the closure.
        objects: Models, optimizers, loaders and schedulers, in any order. Models may also have
            been prepared before.
        recalibrate_batches: As for `Average`.

    Returns:
        The prepared objects, in the same order.
    """
    steps = accelerator.gradient_accumulation_steps
    if steps != 1 and any(isinstance(unwrapped(thing), PairedOptimizer) for thing in objects):
        raise ValueError(f"gradient_accumulation_steps={steps} drops closures: {ACCUMULATE}")
    if accelerator.distributed_type not in VERIFIED:
        raise ValueError(
            f"{accelerator.distributed_type.value} has not been verified: use one device or DDP, "
            "or FSDP2 in your own loop (docs/many-machines.md)"
        )
    prepared = accelerator.prepare(*objects)
    for thing in prepared if isinstance(prepared, tuple) else (prepared,):
        opt = unwrapped(thing) if isinstance(thing, AcceleratedOptimizer) else None
        if not isinstance(opt, (PairedOptimizer, Untuned)):
            continue
        params = set(map(id, opt.parameters()))
        models = [accelerator.unwrap_model(model) for model in accelerator._models]
        models = [model for model in models if params & set(map(id, model.parameters()))]
        if not models:
            raise ValueError(
                f"no prepared model has a parameter of this {type(opt).__name__}: "
                "prepare(accelerator, model, opt, ...), or prepare the model before the optimizer"
            )
        if isinstance(opt, PairedOptimizer):
            # In place: the accelerator keeps a reference to its wrapper.
            thing.__class__ = StormPlusAcceleratedOptimizer
            thing.model = nn.ModuleList(accelerator._models)
        else:
            for model in models:
                Average([opt], model, recalibrate_batches).follow(model)
    return prepared


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrappers."""
    while not isinstance(optimizer, nn.Module) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
