"""The second evaluation of a sample, for trainers that run the backward passes themselves.

Such a trainer evaluates its micro-batches once, clips, and calls `step()` without a closure.
`Replay` gives `step` a closure: its first call returns the gradient that the trainer has computed,
its second one evaluates the same micro-batches again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stormplus.torch import PairedOptimizer, same_sample
from stormplus.trainers import managed

CLIPPING = (
    "clips the two gradients of a sample separately, so that their difference is no longer the "
    "change of one gradient. Turn it off; a smaller lr, or a warm-up, shortens the moves instead"
)
RETRIES = 20  # how often the second evaluation may overflow in fp16, as in `scaled_step`


class Replay:
    """Records the micro-batches of one sample and evaluates them again.

    Args:
        opt: Its `step()` works without a closure from now on.
        model: The module with the running statistics.
        process: Called after the second evaluation, to unscale and clip as the trainer did.
        scaler: The trainer's `GradScaler`, if there is one.
    """

    def __init__(
        self,
        opt: PairedOptimizer,
        model: nn.Module,
        process: Callable[[], Any],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.opt, self._model, self._process, self._scaler = opt, model, process, scaler
        self._micro_batches: list[Callable[[bool], Any]] = []
        self._sample: same_sample | None = None
        self.running = False  # whether the sample is being evaluated again
        self._hook = opt.register_step_pre_hook(self._pass_closure)
        managed.add(opt)

    def record(self, evaluate: Callable[[bool], Any]) -> None:
        """Record a micro-batch, before its first evaluation.

        Args:
            evaluate: Called as `evaluate(last)` to repeat that evaluation. Processes need to
                synchronize gradients only after the last micro-batch of the sample.
        """
        if self._sample is None:
            self._sample = same_sample(self.opt, self._model).__enter__()
        streams = self.opt.random_streams()

        def evaluate_again(last: bool) -> None:
            streams.rewind()
            evaluate(last)

        self._micro_batches.append(evaluate_again)

    def finish(self) -> None:
        """End the sample, after the trainer has stepped, has skipped an overflow or has failed."""
        sample, self._sample, self._micro_batches = self._sample, None, []
        if sample is not None:
            sample.__exit__()

    def remove(self) -> None:
        """End the sample and let `step()` require a closure again."""
        self.finish()
        self._hook.remove()

    def _pass_closure(self, opt: Any, args: Any, kwargs: Any) -> Any:
        """Replace the arguments of `step`; a step pre-hook of torch."""
        if not args:  # move() and estimate() run the hooks too
            return None
        evaluate = kwargs.get("closure") or next(iter(args[1:]), None)

        def closure() -> Any:
            return self._second() if self.opt.pending else self._first(evaluate)

        return (opt,), {"closure": closure}

    def _first(self, evaluate: Callable[[], Any] | None) -> Any:
        loss = None if evaluate is None else evaluate()
        if self._sample is None:
            raise RuntimeError(
                "step() was called, but no training step has been evaluated since the last one"
            )
        return loss

    def _second(self) -> None:
        """Evaluate the sample at the new point; in fp16 repeat it at a lower scale on overflow."""
        if self._scaler is None:
            self._evaluate()
            return
        assert self._sample is not None  # checked by `_first`
        for _ in range(RETRIES):
            self._scaler.update()  # for the evaluation before; the trainer makes the last update
            self._evaluate()
            grads = [p.grad for p in self.opt.parameters() if p.grad is not None]
            finite = [torch.isfinite(grad).all().to(grads[0].device) for grad in grads]
            if bool(torch.stack(finite).all()):
                return
            self._sample.restore()
        raise FloatingPointError(
            f"the second evaluation overflowed {RETRIES} times, down to a scale of "
            f"{self._scaler.get_scale():g}: the loss itself is not finite at the new point"
        )

    def _evaluate(self) -> None:
        self.running = True
        try:
            self.opt.zero_grad()
            *others, last = self._micro_batches
            for evaluate_again in others:
                evaluate_again(False)
            last(True)
            self._process()
        finally:
            self.running = False
