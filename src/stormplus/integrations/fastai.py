"""fastai: an `opt_func` and a callback for `Learner`.

fastai's loop calls `opt.step()` without a closure, which the optimizers refuse. The callback
takes over where the step would be: it moves the parameters, lets the learner evaluate the
same batch again, with every callback's events from `after_pred` to `after_step`, and
completes the step. `Untuned` takes one gradient a step, and its callback sees to the average:
`Learner(..., opt_func=opt_func(Untuned), cbs=UntunedCallback())`.
"""

from __future__ import annotations

import inspect
import warnings
from contextlib import ExitStack
from functools import partial
from typing import Any

from stormplus.install import how_to
from stormplus.integrations.point import Point
from stormplus.integrations.untuned import FORGOTTEN, Average, ignore_lr
from stormplus.torch import BaseOptimizer, PairedOptimizer, StormPlus, Untuned, same_sample

try:
    from fastai.callback.core import Callback, CancelStepException
    from fastai.callback.fp16 import AMPMode, MixedPrecision
    from fastai.learner import Learner, defaults
    from fastai.optimizer import OptimWrapper
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"this integration needs fastai: {how_to('fastai')}") from error

# fastai's callbacks by name: `fastai.distributed` cannot be imported without accelerate.
_REFUSED = {
    "GradientAccumulation": "accumulates gradients over batches that are gone when the second "
    "gradient is due: use larger batches, or split them in the model's forward",
    "NonNativeMixedPrecision": "trains a copy of the parameters: use learn.to_bf16()",
    "DistributedTrainer": "is not verified with two gradients a batch: use a loop of your own "
    "with DistributedDataParallel, as in examples/ddp.py, or stormplus.integrations.accelerate",
    "ParallelTrainer": "evaluates on devices whose random numbers are not replayed: train on "
    "one device, or in a loop of your own with DistributedDataParallel, as in examples/ddp.py",
}


def opt_func(optimizer: type[BaseOptimizer] = StormPlus, *, lr: float = 1.0, **options: Any) -> Any:
    """An `opt_func` for `Learner`.

    Args:
        optimizer: The class of the optimizer.
        lr: Becomes `learn.lr`, in place of fastai's 0.001; 1.0 is the paper's. `Untuned` has none.
        **options: Every other argument of the optimizer.
    """
    if optimizer is Untuned:
        ignore_lr(lr)
        lr = 1.0
        if UntunedWatch not in defaults.callbacks:  # what learners get from now on
            defaults.callbacks = [*defaults.callbacks, UntunedWatch]
    return partial(OptimizerWrapper, opt=optimizer, lr=lr, **options)


class OptimizerWrapper(OptimWrapper):
    """What `learn.opt` is; the optimizer itself is `learn.opt.opt`."""

    opt: BaseOptimizer

    def __init__(self, *args: Any, opt: Any, lr: float, **kwargs: Any) -> None:
        rate = {} if opt is Untuned else {"lr": lr}
        super().__init__(*args, opt=opt, **rate, **kwargs)
        self.point = Point()
        self.load_error: Exception | None = None

    def clear_state(self) -> None:
        """Begin anew; fastai does so when layers are frozen or unfrozen."""
        self.opt.reset()
        self.load_error = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, and keep the error if that fails: fastai only warns."""
        try:
            self.opt.load_state_dict(state_dict)
        except Exception as error:
            self.load_error = error
            raise
        self.load_error = None

    def _set_hyper(self, k: str, v: Any) -> None:
        if k not in self.bwd_map:
            raise ValueError(
                f"{type(self.opt).__name__} has no hyper-parameter {k!r}. It sets its momentum "
                "itself: use learn.fit or learn.fit_flat_cos, or "
                "ParamScheduler({'lr': ...}), in place of fit_one_cycle"
            )
        if k == "lr" and isinstance(self.opt, Untuned) and not _in_a_fit():
            for lr in dict.fromkeys(v):
                ignore_lr(lr, stacklevel=2)
            v = [1.0] * len(v)
        super()._set_hyper(k, v)


def _in_a_fit() -> bool:
    """Whether a schedule sets the lr, and not the user; a fit that fails leaves no other trace."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Learner._do_fit.__code__:
        frame = frame.f_back
    return frame is not None


class StormCallback(Callback):
    """Two gradients a batch; `Learner(..., opt_func=opt_func(), cbs=StormCallback())`.

    The loss and the predictions that metrics see are those of the first evaluation.
    """

    order = 1000  # last: batch transforms are done, gradients clipped
    run_valid = False
    storm_sample: same_sample | None = None

    def before_train(self) -> None:
        """Refuse what would go wrong quietly."""
        opt = self.learn.opt
        if not isinstance(opt, OptimizerWrapper):
            raise TypeError(
                f"learn.opt is {type(opt).__name__}: pass Learner opt_func=opt_func(...) from "
                "stormplus.integrations.fastai"
            )
        if not isinstance(opt.opt, PairedOptimizer):
            raise TypeError(
                f"{type(opt.opt).__name__} takes one gradient a step, as fastai gives it: leave "
                "StormCallback out. The callback of Untuned is UntunedCallback"
            )
        if opt.load_error is not None:
            raise RuntimeError(
                "learn.load has loaded the weights, but not the optimizer's state: "
                f"{opt.load_error}. Load it with with_opt=False, or begin anew with "
                "learn.opt.clear_state()"
            ) from opt.load_error
        for callback in self.learn.cbs:
            kinds = type(callback).__mro__
            names = {kind.__name__ for kind in kinds if kind.__module__.startswith("fastai.")}
            for name in names & _REFUSED.keys():
                raise RuntimeError(f"{name} {_REFUSED[name]}")
            if isinstance(callback, MixedPrecision) and callback.amp_mode is AMPMode.FP16:
                raise RuntimeError(
                    "to_fp16() scales the loss for one gradient a batch: use to_bf16(), or a "
                    "loop of your own with stormplus.scaled_step"
                )

    def before_batch(self) -> None:
        """The batch has been drawn and transformed: both evaluations begin here."""
        wrapper, opt = self.learn.opt, self.learn.opt.opt
        self._leave()  # an exception may have ended the last batch halfway
        if opt.pending:
            opt.restart()
        wrapper.point.restart_if_moved(opt)
        left = [p.grad for p in opt.parameters() if p.grad is not None]
        if any(bool(grad.any()) for grad in left):
            raise RuntimeError(
                "the parameters have gradients from an earlier batch, which the second "
                "evaluation would not see: gradients cannot be accumulated over batches"
            )
        self.storm_sample = same_sample(opt, self.learn.model).__enter__()

    def before_step(self) -> None:
        """In place of `opt.step()`."""
        opt = self.learn.opt.opt
        if opt.started and not opt.pending:
            opt.move()
            self._evaluate_again()
        else:
            opt.estimate()
            self.learn.opt.point.note(opt)  # now: callbacks that come later may write
        raise CancelStepException

    def after_batch(self) -> None:
        """Forget the batch."""
        self._leave()

    def _evaluate_again(self) -> None:
        learn = self.learn
        first = learn.pred, learn.loss, learn.loss_grad
        learn.opt.zero_grad()
        for callback in learn.cbs:
            if isinstance(callback, MixedPrecision):  # which enters it before a batch only
                callback.autocast.__enter__()
        learn._do_one_batch()  # comes by `before_step` again, which completes the step
        learn.pred, learn.loss, learn.loss_grad = first

    def _leave(self) -> None:
        if self.storm_sample is not None:
            self.storm_sample.__exit__(None, None, None)
            self.storm_sample = None


class UntunedCallback(Callback):
    """Validates and saves the average of `Untuned`, and trains its iterate.

    The average is in the model from the end of an epoch's training to the next training batch,
    when something is saved, and when `fit` has ended. `learn.save` and `learn.load` go on from
    the iterate, bit by bit.

    Args:
        recalibrate_batches: Take BatchNorm's running statistics anew over this many of the last
            training batches when the average comes in; they are kept for it. 0 leaves the
            statistics as they are.
    """

    def __init__(self, *, recalibrate_batches: int = 0) -> None:
        super().__init__()
        self.untuned_batches = recalibrate_batches
        self.untuned_average = Average(recalibrate_batches=recalibrate_batches)
        self.untuned_followed = ExitStack()

    def before_fit(self) -> None:
        """Look at the model from now on."""
        wrapper = self.learn.opt
        if wrapper is None:  # a learner that only evaluates: exported, or not trained yet
            return
        opt = getattr(wrapper, "opt", None)
        if not (isinstance(wrapper, OptimizerWrapper) and isinstance(opt, Untuned)):
            raise TypeError(
                f"UntunedCallback is for Untuned, got {type(opt or wrapper).__name__}: pass "
                "Learner opt_func=opt_func(Untuned) from stormplus.integrations.fastai, or leave "
                "the callback out"
            )
        self.untuned_followed.close()  # of a fit that has failed
        if self.untuned_average.optimizers != [opt]:
            self.untuned_average = Average([opt], self.learn.model, self.untuned_batches)
        self.untuned_followed = self.untuned_average.follow(self.learn.model)

    def after_train(self) -> None:
        """The training of an epoch is over."""
        self.untuned_average.put_in()

    def after_fit(self) -> None:
        """Leave the average."""
        self.untuned_average.put_in()
        self.untuned_followed.close()


class UntunedWatch(Callback):
    """Warns if `Untuned` is validated or left at its iterate; `opt_func` sees that it is there."""

    untuned_told = False

    def before_validate(self) -> None:
        """Look."""
        opt = getattr(self.learn.opt, "opt", None)
        forgotten = isinstance(opt, Untuned) and opt.grad_evaluations and not opt.at_average
        if forgotten and not self.untuned_told:
            self.untuned_told = True
            warnings.warn(
                FORGOTTEN + "Learner(..., cbs=UntunedCallback()), with UntunedCallback from "
                "stormplus.integrations.fastai",
                stacklevel=2,
            )

    def after_fit(self) -> None:
        """Look, in case nothing was validated."""
        self.before_validate()
