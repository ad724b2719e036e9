"""Accelerate: `prepare` in place of `accelerator.prepare`, and `step` is exact or refuses.

    model, opt, loader = prepare(accelerator, model, opt, loader)

Accelerate hands the closure on, but drops it whenever gradients are not synchronised, and
in fp16 gives it to `scaler.step`, which does not know what to do with it. `Untuned` steps as any
optimizer does; what `prepare` adds is its average, wherever the model is evaluated or saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from stormplus.install import how_to
from stormplus.integrations.untuned import Average
from stormplus.torch import PairedOptimizer, Untuned, same_sample, scaled_step

try:
    from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped, unused-ignore]
    from accelerate.utils import DistributedType  # type: ignore[import-untyped, unused-ignore]
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"this integration needs accelerate: {how_to('accelerate')}"
    ) from error

VERIFIED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)

ACCUMULATE = (
    "let the closure cover all micro-batches, the last one outside accelerator.no_sync(model), "
    "and leave gradient_accumulation_steps at 1: see examples/accelerate_loop.py"
)


class AcceleratedStorm(AcceleratedOptimizer):  # type: ignore[misc, unused-ignore]
    """What `prepare` makes of Accelerate's wrapper."""

    model: nn.Module | None

    def step(
        self, closure: Callable[[], Any] | None = None, *, max_grad_norm: float | None = None
    ) -> Any:
        """Take one sample.

        Args:
            closure: Zeroes the gradients, computes the loss of ONE sample, calls
                `accelerator.backward(loss)` and returns the loss.
            max_grad_norm: Clips each of the two gradients, after unscaling in fp16.

        Returns:
            The loss of the first evaluation.
        """
        opt: PairedOptimizer = self.optimizer
        if closure is None:
            return opt.step()  # which says what to write
        if not self.gradient_state.sync_gradients:
            raise RuntimeError(
                "gradients are not synchronised here, so Accelerate would drop this closure and "
                f"its micro-batch without a word: {ACCUMULATE}"
            )
        before = opt.grad_evaluations
        clip = self._clip(max_grad_norm)
        if self.scaler is not None:
            loss = scaled_step(opt, self.scaler, closure, self.model, process=clip)
        else:

            def evaluate() -> Any:
                loss = closure()
                clip()
                return loss

            loss = opt.step(same_sample(opt, self.model)(evaluate))
        self._is_overflow = before == opt.grad_evaluations  # a scheduler asks for it
        return loss

    def _clip(self, max_norm: float | None) -> Callable[[], Any]:
        if max_norm is None:
            return lambda: None
        if not vars(self).get("_told"):
            self._told = True
            warnings.warn(
                f"max_grad_norm={max_norm:g} clips the two gradients of a sample separately, so "
                "that their difference is no longer the change of one gradient. "
                "StormPlus(..., max_move=0.1) bounds the move instead",
                stacklevel=3,
            )
        return lambda: nn.utils.clip_grad_norm_(self.optimizer.parameters(), max_norm)


def prepare(accelerator: Accelerator, *objects: Any, recalibrate_batches: int = 0) -> Any:
    """`accelerator.prepare`, with a `step` that never drops a closure.

    An optimizer that takes one gradient a step is left to Accelerate, and accumulates as there.
    If it is `Untuned`, its model holds the iterate when it is called in train mode, and the
    average when it is called in eval mode or when its state is taken: `model.train()` and
    `model.eval()`, which a loop has anyway, are enough, and `save_state` saves the average.

    Args:
        accelerator: With `gradient_accumulation_steps=1` for optimizers that take two gradients;
            accumulate inside the closure.
        objects: The model, the optimizers, loaders and schedulers, in any order. The running
            statistics of the models, of this call and of earlier ones, then move once a sample.
        recalibrate_batches: With `Untuned`, take BatchNorm's running statistics anew over this
            many of the last training batches when the average comes in; they are kept for it.

    Returns:
        The prepared objects, in the same order.
    """
    pairs = any(isinstance(_inner(thing), PairedOptimizer) for thing in objects)
    if pairs and accelerator.gradient_accumulation_steps != 1:
        steps = accelerator.gradient_accumulation_steps
        raise ValueError(f"gradient_accumulation_steps={steps} drops closures: {ACCUMULATE}")
    if accelerator.distributed_type not in VERIFIED:
        raise ValueError(
            f"{accelerator.distributed_type.value} has not been verified: use one device or DDP, "
            "or FSDP2 in a loop of your own (docs/many-machines.md)"
        )
    _check_models(accelerator, objects)
    prepared = accelerator.prepare(*objects)
    several = prepared if isinstance(prepared, tuple) else (prepared,)
    models = nn.ModuleList(accelerator._models)  # of earlier calls too
    for thing in several:
        if isinstance(thing, AcceleratedOptimizer) and isinstance(thing.optimizer, PairedOptimizer):
            # In place, for the accelerator keeps the wrapper that it has made.
            thing.__class__ = AcceleratedStorm
            thing.model = models
        elif isinstance(thing, AcceleratedOptimizer) and isinstance(thing.optimizer, Untuned):
            for model in map(accelerator.unwrap_model, accelerator._models):
                if _share(model, thing.optimizer):
                    Average([thing.optimizer], model, recalibrate_batches).follow(model)
    return prepared


def _inner(thing: Any) -> Any:
    return thing.optimizer if isinstance(thing, AcceleratedOptimizer) else thing


def _share(model: nn.Module, opt: PairedOptimizer | Untuned) -> bool:
    return not {id(p) for p in model.parameters()}.isdisjoint(map(id, opt.parameters()))


def _check_models(accelerator: Accelerator, objects: tuple[Any, ...]) -> None:
    """What an optimizer needs of its model can be done to one that is known only."""
    modules = [thing for thing in objects if isinstance(thing, nn.Module)]
    for opt in map(_inner, objects):
        if not isinstance(opt, (PairedOptimizer, Untuned)):
            continue
        if not any(_share(module, opt) for module in (*modules, *accelerator._models)):
            what = (
                "its average would be neither evaluated nor saved"
                if isinstance(opt, Untuned)
                else "its running statistics would move twice a sample"
            )
            raise ValueError(
                f"no prepared model has a parameter of this {type(opt).__name__}, so {what}: "
                "prepare(accelerator, model, opt, ...), or prepare the model before the optimizer"
            )
