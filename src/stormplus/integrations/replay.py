"""The second evaluation of a sample, for trainers that run the backward passes themselves.

Such a trainer evaluates its micro-batches once, clips, and calls `step()` without a closure.
`Replay` remembers what it evaluated and hands `step` a closure: the first gradient is the one
that is there, the second comes from evaluating the same micro-batches again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from stormplus.torch.optimizer import StormOptimizer
from stormplus.torch.same_sample import RandomStreams, same_sample

RETRIES = 20  # how often the second evaluation may overflow in fp16, as in `scaled_step`


class Replay:
    """The micro-batches of one sample, so that they can be evaluated again.

    Args:
        opt: One of the optimizers. Its `step()` then works without a closure.
        model: The module with the running statistics.
        process: Called after a sample has been evaluated again: unscales and clips, whatever
            the trainer did to the first gradient.
        scaler: The trainer's `GradScaler`, if there is one.
    """

    def __init__(
        self,
        opt: StormOptimizer,
        model: nn.Module,
        process: Callable[[], Any],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.opt, self._model, self._process, self._scaler = opt, model, process, scaler
        self._parts: list[tuple[Callable[[], Any], RandomStreams]] = []
        self._context = ExitStack()
        self._stepped = False
        self.running = False  # whether the sample is being evaluated again
        self._hook = opt.register_step_pre_hook(self._give_closure)

    @property
    def recording(self) -> bool:
        """Whether the sample has begun."""
        return bool(self._parts)

    def record(self, evaluate: Callable[[], Any]) -> None:
        """Call it before the first evaluation of a micro-batch, of which `evaluate` is another."""
        if not self._parts:
            self._context.enter_context(same_sample(self.opt, self._model))
        self._parts.append((evaluate, self.opt._random_streams()))

    def finish(self) -> None:
        """Call it after the trainer has stepped, or has not, for the gradient overflowed."""
        if not self._stepped:  # then running statistics have not seen the sample either
            for sample in self.opt._samples:
                sample.put_back()
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """The sample is done with, whatever became of it."""
        self._parts, self._stepped = [], False
        if error is not None:
            self._context.__exit__(type(error), error, error.__traceback__)
        self._context.close()

    def remove(self) -> None:
        """Let `step()` ask for a closure again."""
        self.finish()
        self._hook.remove()

    def _give_closure(
        self, opt: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A step pre-hook of torch, which may replace the arguments of `step`."""
        if not args:  # move() and estimate() run the hooks too
            return None
        given = kwargs.get("closure") or next(iter(args[1:]), None)
        calls = 0

        def closure() -> Any:
            nonlocal calls
            calls += 1
            return self._first(given) if calls == 1 else self._second()

        return (opt,), {"closure": closure}

    def _first(self, given: Callable[[], Any] | None) -> Any:
        loss = None if given is None else given()
        if not self._parts:
            raise RuntimeError(
                "step() was called, but no training step has been evaluated since the last one: "
                "let the trainer run the training step before it steps"
            )
        self._stepped = True
        return loss

    def _second(self) -> None:
        """Evaluate the sample again, at the point where the optimizer has moved to."""
        if self._scaler is None:
            self._run()
        else:
            self._run_scaled(self._scaler)

    def _run(self) -> None:
        self.running = True
        try:
            self.opt.zero_grad()
            for evaluate, streams in self._parts:
                if self.opt._options.replay:
                    streams.rewind()
                evaluate()
            self._process()
        finally:
            self.running = False

    def _run_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """As `scaled_step`: an overflow here lowers the scale and evaluates again."""
        for _ in range(RETRIES):
            scaler.update()  # of the evaluation before; the trainer makes the last update
            self._run()
            if _finite(self.opt):
                return
            for sample in self.opt._samples:
                sample.put_back()
        raise FloatingPointError(
            f"the second evaluation overflowed {RETRIES} times, down to a scale of "
            f"{scaler.get_scale():g}: the loss itself is not finite at the new point"
        )


def _finite(opt: StormOptimizer) -> bool:
    grads = [p.grad for p in opt._params() if p.grad is not None]
    return all(bool(torch.isfinite(grad).all()) for grad in grads)
