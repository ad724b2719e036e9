"""Closures of paired optimizers: one sample for both gradients, loss scaling, and a check."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stormplus.torch._checks import parameter_name
from stormplus.torch._rng import RandomStreams, pair_lock
from stormplus.torch._sharding import local
from stormplus.torch._tensors import accumulator_dtype
from stormplus.torch.batchnorm import BufferSnapshot
from stormplus.torch.storm import PairedOptimizer


class same_sample:
    """One sample, two evaluations: random numbers replayed, running statistics moved once.

    Around a closure:

        opt.step(same_sample(opt, model)(closure))

    or around one step, for loops that own their backward passes (enter it after the sample has been
    drawn):

        with same_sample(opt, model):
            if opt.started and not opt.pending:
                backward()
                opt.move()
            backward()
            opt.estimate()

    The second evaluation, at the new point, counts for the buffers of the model; a sample that is
    not completed leaves them as they were. The context holds `stormplus.pair_lock`. If a pair is
    pending when it is entered, it replays the random numbers of that pair.
    """

    def __init__(self, opt: PairedOptimizer, model: nn.Module | None = None) -> None:
        _require_pairs(opt, "same_sample")
        self._opt, self._model = opt, model
        self._held = ExitStack()  # the hook, and inside the context the lock
        self._statistics = BufferSnapshot(None)
        self._streams: RandomStreams | None = None  # inside the context; `step` has its own

    def __call__(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            is_last = not self._opt.started or self._opt.pending
            self._held.close()  # left by an evaluation without a step
            self._watch(self._held)
            with ExitStack() as undo:
                undo.callback(self._held.close)
                undo.callback(self.restore)
                loss = closure()
                if is_last:  # then the pass that follows decides whether it counts
                    undo.pop_all()
            return loss

        return evaluate

    def __enter__(self) -> same_sample:
        opt = self._opt
        if self._streams is not None:
            raise RuntimeError("this same_sample is in use: make one for each sample")
        with ExitStack() as held:
            held.enter_context(opt.lock())
            self._watch(held)
            self._entry = self._streams = opt.random_streams()
            if opt.pending and opt.pending_streams is not None:
                self._streams = opt.pending_streams
                self.rewind()
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self._streams = None
        self._held.close()

    def _watch(self, held: ExitStack) -> None:
        """Save the running statistics, and restore them around the passes of the optimizer."""
        self._statistics = BufferSnapshot(self._model)
        held.callback(self._opt.register_pass_hook(self._around).remove)

    def _around(self, opt: PairedOptimizer, event: str) -> None:
        if event == "after_estimate":
            self._statistics = BufferSnapshot(None)  # the sample counts
        elif event == "after_move":
            self.rewind()
            opt.pending_streams = self._streams
        elif event == "failed" and opt.pending:
            self.rewind()  # for another try
        elif event == "failed":
            self.restore()
        elif event == "restarted" and self._streams is not None:
            self._entry.rewind()  # a pending sample is dropped
        if event in ("failed", "after_estimate") and self._streams is None:
            self._held.close()

    def rewind(self) -> None:
        """Set random streams and running statistics back to where the sample began."""
        if self._streams is not None:
            self._streams.rewind()
        self.restore()

    def restore(self) -> None:
        """Undo what an evaluation did to running statistics."""
        self._statistics.restore()


def scaled_step(
    opt: PairedOptimizer,
    scaler: torch.amp.GradScaler,
    closure: Callable[[], Any],
    model: nn.Module | None = None,
    *,
    process: Callable[[], Any] | None = None,
    retries: int = 20,
) -> Any:
    """Take one sample with a `GradScaler`; in place of `scaler.step(opt); scaler.update()`.

    Each evaluation is unscaled and updates the scale, and the host waits for the device once. If
    the first overflows, the sample is dropped before anything has moved. If the second does, the
    move stands, and the evaluation is repeated at the lower scale.

    Args:
        opt: The optimizer.
        scaler: A `torch.amp.GradScaler`, of any device.
        closure: Zeroes the gradients, computes the loss, calls `scaler.scale(loss).backward()`,
            returns the loss.
        model: The module with running statistics, as for `same_sample`.
        process: Called when the gradients are unscaled and finite, for example to clip them.
        retries: How often the second evaluation may overflow; then it raises
            `FloatingPointError`, and the step is pending.

    Returns:
        The loss of the first evaluation.
    """
    _require_pairs(opt, "scaled_step", "scaler.step(opt)")
    if opt.pending:  # an earlier call was interrupted, and its sample is gone
        opt.restart()
    # Stands in for an optimizer: `scaler.step` calls its step() unless the gradients overflowed.
    gradients: Any = SimpleNamespace(param_groups=opt.param_groups, step=lambda: True)

    def evaluate() -> tuple[Any, bool]:
        loss = torch.enable_grad()(closure)()
        scaler.unscale_(gradients)
        finite = bool(scaler.step(gradients))  # the only wait for the device
        scaler.update()
        if finite and process is not None:
            process()
        return loss, finite

    with same_sample(opt, model) as sample:
        loss, finite = evaluate()
        if not finite:
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


def verify_closure(
    opt: PairedOptimizer,
    closure: Callable[[], Any],
    model: nn.Module | None = None,
    *,
    rtol: float = 1e-4,
) -> None:
    """Evaluate the closure twice at the current point; raise if the gradients differ.

    Parameters, gradients, random streams and the buffers of `model` are left as they were.

    Args:
        opt: The optimizer that will call the closure; its `replay_rng` is honoured.
        closure: As for `opt.step`.
        model: The model, if it has running statistics, as BatchNorm has.
        rtol: How much a gradient may differ, relative to its norm.
    """
    _require_pairs(opt, "verify_closure")
    params = [p for p in opt.parameters() if p.requires_grad]
    before = [p.grad for p in params]
    evaluate = torch.enable_grad()(closure)
    with pair_lock():
        streams, statistics = opt.random_streams(), BufferSnapshot(model)
        try:
            for p in params:
                p.grad = None
            evaluate()
            first = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
            if all(p.grad is None for p in params):
                raise RuntimeError("the closure left no gradient: it must call loss.backward()")
            streams.rewind()
            evaluate()
            for p, g in zip(params, first):
                second = torch.zeros_like(p) if p.grad is None else p.grad
                _compare(parameter_name(opt.param_groups, p), g, second, rtol)
        finally:
            streams.restore()
            statistics.restore()
            for p, grad in zip(params, before):
                p.grad = grad


def _compare(name: str, first: Tensor, second: Tensor, rtol: float) -> None:
    dtype, norm = accumulator_dtype(first.device), torch.linalg.vector_norm
    first, second = local(first).to(dtype), local(second).to(dtype)
    size, off = float(norm(first)), float(norm(second - first))
    if off <= rtol * size:
        return
    if not math.isfinite(off):
        raise RuntimeError(f"the gradient of {name} is not finite at the present point")
    raise RuntimeError(
        f"two evaluations at the same point give {name} gradients that differ by "
        f"{off:.3g} (norm {size:.3g}): the closure must zero the gradients and evaluate ONE sample "
        "each time. Draw the batch outside it, name any generator of your own in "
        "replay_rng=[...], and keep no state in the loss"
    )


def _require_pairs(opt: object, what: str, instead: str = "opt.step()") -> None:
    """Raise if an optimizer takes one gradient per step."""
    if not isinstance(opt, PairedOptimizer):
        raise ValueError(
            f"{type(opt).__name__} takes one gradient per step: {what} is not needed, call "
            f"{instead} as usual"
        )
