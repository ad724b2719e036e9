"""fastai: an `opt_func` and callbacks for `Learner`.

fastai calls `opt.step()` without a closure. `StormPlusCallback` replaces that call: it moves the
parameters, lets the learner evaluate the same batch again, and completes the step.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import partial
from typing import Any

from stormplus.install import required
from stormplus.integrations._write_detector import record_versions, restart_if_written
from stormplus.integrations.untuned import AverageCallback
from stormplus.torch import BaseOptimizer, PairedOptimizer, StormPlus, Untuned, same_sample

with required("fastai"):
    from fastai.callback.core import Callback, CancelStepException
    from fastai.callback.fp16 import AMPMode, MixedPrecision
    from fastai.optimizer import OptimWrapper

# fastai's callbacks by name: `fastai.distributed` cannot be imported without accelerate.
_OWN_LOOP = "train in your own loop with DistributedDataParallel, as in examples/ddp.py"
_REFUSED = {
    "GradientAccumulation": "use larger batches, or split them in the model's forward",
    "NonNativeMixedPrecision": "use learn.to_bf16()",
    "DistributedTrainer": _OWN_LOOP,
    "ParallelTrainer": _OWN_LOOP,
}


def opt_func(optimizer: type[BaseOptimizer] = StormPlus, *, lr: float = 1.0, **options: Any) -> Any:
    """Return an `opt_func` for `Learner`.

    Args:
        optimizer: The class of the optimizer.
        lr: Becomes `learn.lr`; 1.0 is the paper's. Ignored by `Untuned`.
        **options: Every other argument of the optimizer.
    """
    return partial(OptimizerWrapper, opt=optimizer, lr=lr, **options)


class OptimizerWrapper(OptimWrapper):
    """The type of `learn.opt`; the optimizer itself is `learn.opt.opt`."""

    opt: BaseOptimizer

    def __init__(self, *args: Any, opt: Any, lr: float, **kwargs: Any) -> None:
        self._warned: set[str] = set()
        rate = {} if opt is Untuned else {"lr": lr}
        super().__init__(*args, opt=opt, **rate, **kwargs)

    def clear_state(self) -> None:
        """Start over; fastai calls this when layers are frozen or unfrozen."""
        self.opt.reset()

    @property
    def hypers(self) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each group, and a momentum for schedules to read."""
        return [{"mom": 0.0, **group} for group in super().hypers]

    def _set_hyper(self, k: str, v: Any) -> None:
        """Set a hyper-parameter; ignore the momentum, and the rate of `Untuned`, with a warning."""
        if k == "mom":
            self._warn_once("schedules of a momentum are ignored: the optimizer sets its own")
        elif k != "lr" or not isinstance(self.opt, Untuned):
            super()._set_hyper(k, v)
        elif any(value != 1.0 for value in v):
            self._warn_once("learning rates and their schedules are ignored by Untuned")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)


class StormPlusCallback(Callback):
    """Takes two gradients per batch; `Learner(..., opt_func=opt_func(), cbs=StormPlusCallback())`.

    The loss and the predictions that metrics see are those of the first evaluation.
    """

    order = 1000  # last: batch transforms are done, gradients clipped
    run_valid = False

    def __init__(self) -> None:
        super().__init__()
        self._sample = ExitStack()  # a `same_sample` while a batch is evaluated

    def before_train(self) -> None:
        """Raise if a callback or the optimizer would silently make the gradients wrong."""
        opt = self.learn.opt
        if not isinstance(opt, OptimizerWrapper) or not isinstance(opt.opt, PairedOptimizer):
            raise TypeError(
                f"StormPlusCallback got {type(getattr(opt, 'opt', opt)).__name__}: pass Learner "
                "opt_func=opt_func(StormPlus). Untuned needs UntunedCallback"
            )
        for callback in self.learn.cbs:
            names = {kind.__name__ for kind in type(callback).__mro__}
            for name in names & _REFUSED.keys():
                raise RuntimeError(f"{name} cannot take two gradients: {_REFUSED[name]}")
            if isinstance(callback, MixedPrecision) and callback.amp_mode is AMPMode.FP16:
                raise RuntimeError("to_fp16() cannot take two gradients: use learn.to_bf16()")

    def before_batch(self) -> None:
        opt = self.learn.opt.opt
        self._sample.close()  # an exception may have ended the last batch halfway
        if opt.pending:
            opt.restart()
        restart_if_written(opt)
        if any(p.grad is not None and bool(p.grad.any()) for p in opt.parameters()):
            raise RuntimeError(
                "the parameters have gradients from an earlier batch, which the second "
                "evaluation would not see: gradients cannot be accumulated over batches"
            )
        self._sample.enter_context(same_sample(opt, self.learn.model))

    def before_step(self) -> None:
        opt = self.learn.opt.opt
        if opt.started and not opt.pending:
            opt.move()
            self._evaluate_again()
        else:
            opt.estimate()
            record_versions(opt)  # now: callbacks that come later may write
        raise CancelStepException

    def after_batch(self) -> None:
        self._sample.close()

    def _evaluate_again(self) -> None:
        learn = self.learn
        first = learn.pred, learn.loss, learn.loss_grad
        learn.opt.zero_grad()
        for callback in learn.cbs:
            if isinstance(callback, MixedPrecision):  # it enters autocast in before_batch only
                callback.autocast.__enter__()
        learn._do_one_batch()  # calls `before_step` again, which completes the step
        learn.pred, learn.loss, learn.loss_grad = first


class UntunedCallback(AverageCallback, Callback):
    """Validates, saves and leaves the average of `Untuned`, and trains its iterate.

    `learn.save` and `learn.load` continue from the iterate, exactly. For `recalibrate_batches` see
    `Average`.
    """

    def before_fit(self) -> None:
        if self.learn.opt is None:  # a learner that only evaluates: exported, or not trained yet
            return
        opt = getattr(self.learn.opt, "opt", None)
        advice = "pass Learner opt_func=opt_func(Untuned) from stormplus.integrations.fastai"
        self._begin([opt or self.learn.opt], self.learn.model, advice)
        self._hooks = self._average.follow(self.learn.model)

    def after_train(self) -> None:
        self._average.swap_in()

    def after_fit(self) -> None:
        self._end()
