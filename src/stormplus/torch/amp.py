"""`scaled_step`: a step under fp16 loss scaling, which torch's own `scaler.step` refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stormplus.torch.optimizer import StormOptimizer
from stormplus.torch.same_sample import require_pairs, same_sample


def scaled_step(
    opt: StormOptimizer,
    scaler: torch.amp.GradScaler,
    closure: Callable[[], Any],
    model: nn.Module | None = None,
    *,
    process: Callable[[], Any] | None = None,
    retries: int = 20,
) -> Any:
    """Take one sample with a `GradScaler`; in place of `scaler.step(opt); scaler.update()`.

    The closure calls `scaler.scale(loss).backward()`. Each of the two evaluations is
    unscaled and updates the scale. If the first overflows, the sample is dropped before
    anything has moved. If the second does, the move stands, for it does not depend on the
    sample, and the evaluation is repeated at the lower scale. The optimizer's sums never
    see an inf.

    Args:
        opt: One of the optimizers.
        scaler: A `torch.amp.GradScaler`, of any device.
        closure: Zeroes the gradients, computes the loss, calls backward on the scaled
            loss, returns the loss.
        model: The module with running statistics, as for `same_sample`.
        process: Called when the gradients have been unscaled and are finite, to clip them for
            example.
        retries: How often the second evaluation may overflow.

    Returns:
        The loss of the first evaluation.

    Raises:
        FloatingPointError: The second evaluation overflowed `retries` times. The step is
            pending, as after any failure of the second evaluation.
    """
    require_pairs(opt, "scaled_step", "scaler.step(opt)")
    if opt.pending:  # an earlier call was left halfway, and its sample is gone
        opt.restart()

    def evaluate() -> tuple[Any, bool]:
        loss = torch.enable_grad()(closure)()
        before = scaler.get_scale()
        scaler.unscale_(opt)
        scaler.update()
        finite = before <= scaler.get_scale() and scaler.get_scale() > 0  # an inf lowers it
        if finite and process is not None:
            process()
        return loss, finite

    with same_sample(opt, model) as sample:
        loss, finite = evaluate()
        if not finite:
            sample.put_back()
            return loss
        if opt.started:
            opt.move()
            for _ in range(retries):
                _, finite = evaluate()
                if finite:
                    break
                sample.rewind()
            else:
                raise FloatingPointError(
                    f"the second evaluation overflowed {retries} times, down to a scale of "
                    f"{scaler.get_scale():g}: the loss itself is not finite at the new point"
                )
        opt.estimate()
    return loss
