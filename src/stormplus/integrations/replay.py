"""The second evaluation of a sample, for trainers that run the backward passes themselves.

Such a trainer evaluates its micro-batches once, clips, and calls `step()` without a closure.
`Replay` remembers what it evaluated and hands `step` a closure: the first gradient is the one
that is there, the second comes from evaluating the same micro-batches again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stormplus.torch import PairedOptimizer, same_sample

RETRIES = 20  # how often the second evaluation may overflow in fp16, as in `scaled_step`


class Replay:
    """The micro-batches of one sample, so that they can be evaluated again.

    Args:
        opt: Its `step()` then works without a closure.
        model: The module with the running statistics.
        process: Called after a sample has been evaluated again: unscales and clips, whatever
            the trainer did to the first gradient.
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
        self._parts: list[Callable[[], Any]] = []  # of the sample; each evaluates one again
        self._sample: same_sample | None = None
        self._stepped = False
        self.running = False  # whether the sample is being evaluated again
        self._hook = opt.register_step_pre_hook(self._give_closure)

    @property
    def recording(self) -> bool:
        """Whether the sample has begun."""
        return self._sample is not None

    def record(self, evaluate: Callable[[], Any]) -> None:
        """Call it before the first evaluation of a micro-batch, of which `evaluate` is another."""
        if self._sample is None:
            self._sample = same_sample(self.opt, self._model).__enter__()
        streams = self.opt.random_streams()

        def again() -> None:
            if self.opt.replays_rng:
                streams.rewind()
            evaluate()

        self._parts.append(again)

    def finish(self) -> None:
        """Call it after the trainer has stepped, or has not, because the gradient overflowed."""
        if self._sample is not None and not self._stepped:
            self._sample.put_back()  # running statistics have not seen the sample either
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """The sample is done with, whatever became of it."""
        sample, self._sample, self._parts, self._stepped = self._sample, None, [], False
        if sample is not None:
            sample.__exit__(None if error is None else type(error), error, None)

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
        if self._sample is None:
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
            for again in self._parts:
                again()
            self._process()
        finally:
            self.running = False

    def _run_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """As `scaled_step`: an overflow here lowers the scale and evaluates again."""
        assert self._sample is not None  # `_first` has looked
        for _ in range(RETRIES):
            scaler.update()  # of the evaluation before; the trainer makes the last update
            self._run()
            grads = [p.grad for p in self.opt.parameters() if p.grad is not None]
            if all(bool(torch.isfinite(grad).all()) for grad in grads):
                return
            self._sample.put_back()
        raise FloatingPointError(
            f"the second evaluation overflowed {RETRIES} times, down to a scale of "
            f"{scaler.get_scale():g}: the loss itself is not finite at the new point"
        )
