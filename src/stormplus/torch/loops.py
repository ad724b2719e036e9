"""Around a training loop: one sample for both gradients, fp16 loss scaling, a check of closures."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stormplus.torch.core.random import RunningStatistics, pair_lock
from stormplus.torch.core.sharding import local
from stormplus.torch.core.state import accumulator_dtype
from stormplus.torch.core.tensors import name_of
from stormplus.torch.storm import PairedOptimizer, require_pairs


class same_sample:
    """One sample, two evaluations: random numbers replayed, running statistics moved once.

    Around a closure:

        opt.step(same_sample(opt, model)(closure))

    or around one step, for loops that own their backward passes (enter it after the sample
    has been drawn):

        with same_sample(opt, model):
            if opt.started and not opt.pending:
                backward()
                opt.move()
            backward()
            opt.estimate()

    After the first evaluation all buffers of the model are put back, so that the second
    one, at the new point, is the one that counts; modules are neither frozen nor switched
    to eval. An evaluation that fails, or is not finite, leaves them as they were. If the
    optimizer was loaded from a checkpoint made between the two
    evaluations, the random streams start where that sample's did. As a context it holds
    `stormplus.pair_lock`, as `step` does: see `replay_rng` of `PairedOptimizer`.

    Args:
        opt: A `PairedOptimizer`.
        model: The module with the running statistics; None if there is none.
    """

    def __init__(self, opt: PairedOptimizer, model: nn.Module | None = None) -> None:
        require_pairs(opt, "same_sample")
        self._opt, self._model = opt, model
        self._hook: RemovableHandle | None = None

    def __call__(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        opt = self._opt
        hook: RemovableHandle | None = None

        def evaluate() -> Any:
            nonlocal hook
            if hook is not None:  # of an evaluation that nothing followed
                hook.remove()
            statistics = RunningStatistics(self._model)
            counts = not opt.started or opt.pending  # the sample's last evaluation
            try:
                loss = closure()
            except BaseException:
                statistics.put_back()
                raise
            if not counts:
                statistics.put_back()
                return loss

            def look(_: PairedOptimizer, event: str) -> None:
                # What follows the last evaluation decides whether it has been seen.
                if event == "failed":
                    statistics.put_back()
                if event in ("failed", "after_estimate"):
                    handle.remove()

            hook = handle = opt.register_pass_hook(look)
            return loss

        return evaluate

    def __enter__(self) -> same_sample:
        if self._hook is not None:
            raise RuntimeError("this same_sample is entered already: make one for each sample")
        with ExitStack() as held:
            held.enter_context(self._opt.lock())
            self._entry = self._streams = self._opt.random_streams()
            packed = self._opt.pending_streams
            if self._opt.pending and self._opt.replays_rng and packed is not None:
                self._streams = self._opt.random_streams()
                self._streams.unpack(packed)
                self._streams.rewind()
            self._statistics = RunningStatistics(self._model)
            self._hook = self._opt.register_pass_hook(self._around)
            self._held = held.pop_all()
        return self

    def _around(self, opt: PairedOptimizer, event: str) -> None:
        if event == "after_move":
            opt.pending_streams = self._streams.pack()
            self.rewind()
        elif event == "failed" and opt.pending:
            self.rewind()  # for another try
        elif event == "failed":
            self.put_back()
        elif event == "restarted" and self._streams is not self._entry:
            self._entry.rewind()  # the pending sample is given up

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._held.close()
        if kind is not None:
            self.put_back()

    def rewind(self) -> None:
        """Back to where the sample began."""
        if self._opt.replays_rng:
            self._streams.rewind()
        self.put_back()

    def put_back(self) -> None:
        """Undo what the evaluation did to running statistics."""
        self._statistics.put_back()


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

    The closure calls `scaler.scale(loss).backward()`. Each of the two evaluations is
    unscaled and updates the scale. If the first overflows, the sample is dropped before
    anything has moved. If the second does, the move stands, for it does not depend on the
    sample, and the evaluation is repeated at the lower scale. The optimizer's sums never
    see an inf.

    Args:
        opt: A `PairedOptimizer`.
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


def verify_closure(opt: PairedOptimizer, closure: Callable[[], Any], *, rtol: float = 1e-4) -> None:
    """Evaluate the closure twice at the present point and compare the gradients.

    Parameters, gradients and random streams are left as they were. Running statistics
    (BatchNorm) are not: they see the sample twice.

    Args:
        opt: The optimizer that will call the closure; its `replay_rng` is honoured.
        closure: As for `opt.step`.
        rtol: How much a gradient may differ, relative to its norm; zero on a
            deterministic device, more where kernels are not.

    Raises:
        RuntimeError: With the name of the first parameter whose gradients differ.
    """
    require_pairs(opt, "verify_closure")
    params = [p for group in opt.param_groups for p in group["params"] if p.requires_grad]
    before = [p.grad for p in params]
    with pair_lock():
        streams = opt.random_streams()
        try:
            for p in params:
                p.grad = None
            torch.enable_grad()(closure)()
            first = [None if p.grad is None else local(p.grad).clone() for p in params]
            if all(g is None for g in first):
                raise RuntimeError("the closure left no gradient: it must call loss.backward()")
            if opt.replays_rng:
                streams.rewind()
            torch.enable_grad()(closure)()
            for p, g in zip(params, first):
                _compare(name_of(opt.param_groups, p), g, p.grad, rtol)
        finally:
            streams.rewind()
            for p, grad in zip(params, before):
                p.grad = grad


def _compare(name: str, first: Tensor | None, grad: Tensor | None, rtol: float) -> None:
    if first is None and grad is None:
        return
    if first is None or grad is None:
        raise RuntimeError(f"only one of two evaluations gave {name} a gradient: {_ADVICE}")
    second = local(grad)
    first, second = (t.to(accumulator_dtype(t.device)) for t in (first, second))
    size = float(torch.linalg.vector_norm(first))
    off = float(torch.linalg.vector_norm(second - first))
    if off <= rtol * size:
        return
    if not math.isfinite(off):
        raise RuntimeError(f"the gradient of {name} is not finite at the present point")
    doubled = float(torch.linalg.vector_norm(second - 2 * first)) <= rtol * size
    raise RuntimeError(
        f"two evaluations at the same point give {name} gradients that differ by "
        f"{off:.3g} (norm {size:.3g}): "
        + (
            "the closure does not zero the gradients; call opt.zero_grad() in it"
            if doubled
            else _ADVICE
        )
    )


_ADVICE = (
    "the closure must evaluate ONE sample each time. Draw the batch outside it, name any "
    "generator of your own in replay_rng=[...], and keep no state in the loss"
)
