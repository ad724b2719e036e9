"""Hugging Face Trainer: a subclass that takes both gradients on the same inputs.

    trainer = StormPlusTrainer(model, args, optimizers=(StormPlus(model.parameters()), None), ...)

and for `Untuned`, which needs one gradient, a callback that saves the average:

    trainer = Trainer(model, args, optimizers=(Untuned(model.parameters()), None),
                      callbacks=[UntunedCallback()], ...)

`transformers.Trainer` calls `optimizer.step()` without a closure. The subclass remembers the
micro-batches of a step and evaluates them again, in the same order, with the same random
numbers, when the optimizer asks for the second gradient.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from stormplus.install import how_to
from stormplus.integrations.point import Point
from stormplus.integrations.replay import Replay
from stormplus.integrations.untuned import Average
from stormplus.torch import PairedOptimizer, Untuned
from stormplus.versions import clip_gradients

try:
    from accelerate.utils import DistributedType  # type: ignore[import-untyped, unused-ignore]
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"this integration needs transformers and accelerate: {how_to('huggingface')}"
    ) from error

VERIFIED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)

_Base = Trainer if TYPE_CHECKING else object


class StormPlusMixin(_Base):  # type: ignore[misc, valid-type, unused-ignore]
    """What a subclass of `transformers.Trainer` needs; put it before the other base.

    Gradient accumulation, bf16, fp16, DDP, clipping, schedulers, checkpoints and resuming work
    as they do with other optimizers. `opt.diagnostics()` is logged beside the loss, which is
    that of the first evaluation. If weights are replaced without the optimizer's state, as
    `load_best_model_at_end` does, the estimator starts anew; a callback that writes to them
    at every step is refused.
    """

    _replay: Replay | None = None
    _point: Point | None = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        _check(self, unwrapped(optimizer))
        return optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        end_of_step = _EndOfStep(self)
        self.add_callback(end_of_step)
        try:
            return super().train(*args, **kwargs)
        finally:
            self.remove_callback(end_of_step)
            if self._replay is not None:
                self._replay.remove()
                self._replay = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self._replay is None:
            process = partial(self._process, model)
            opt = unwrapped(self.optimizer)
            self._replay = Replay(opt, model, process, self.accelerator.scaler)
        if self._point is None:
            self._point = Point()
        if not self._replay.recording:
            self._point.restart_if_moved(self._replay.opt)
        last = self.accelerator.sync_gradients
        self._replay.record(partial(self._again, model, inputs, num_items_in_batch, last))
        return super().training_step(model, inputs, num_items_in_batch)

    def _again(self, model: Any, inputs: Any, num_items_in_batch: Any, last: bool) -> None:
        with nullcontext() if last else self.accelerator.no_sync(model):
            super().training_step(model, inputs, num_items_in_batch)

    def _process(self, model: Any) -> None:
        """What the trainer's loop does to the first gradient."""
        if self.args.max_grad_norm > 0:
            clip_gradients(self, model)
        else:
            self.accelerator.unscale_gradients()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        opt = unwrapped(self.optimizer)
        if "loss" in logs and isinstance(opt, PairedOptimizer):
            logs |= {f"stormplus/{name}": value for name, value in opt.diagnostics().items()}
        super().log(logs, *args, **kwargs)


class StormPlusTrainer(StormPlusMixin, Trainer):
    """`transformers.Trainer` for `StormPlus`, `SimplifiedStormPlus` and `Storm`.

    Pass the optimizer as `optimizers=(opt, None)` or as
    `optimizer_cls_and_kwargs=(StormPlus, {"lr": 1.0})`; `TrainingArguments.learning_rate` is
    not used by it.
    """


class UntunedCallback(TrainerCallback):
    """Evaluates, saves and returns the average of `Untuned`, whatever the strategies are.

    `transformers.Trainer` evaluates such an optimizer at its average, but saves whatever is in
    the model: the average only if it has just evaluated. With the callback a checkpoint, the best
    model and the model after `train()` are averages. A run that is resumed from a checkpoint
    goes on from the iterate, bit by bit.

    Args:
        recalibrate_batches: Take BatchNorm's running statistics anew over this many of the last
            training batches when the average comes in; they are kept for it. 0 leaves the
            statistics as they are.
    """

    def __init__(self, *, recalibrate_batches: int = 0) -> None:
        self._batches = recalibrate_batches
        self._average = Average(recalibrate_batches=recalibrate_batches)
        self._followed = ExitStack()

    def on_train_begin(self, *args: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        opt = unwrapped(optimizer)
        if not isinstance(opt, Untuned):
            raise TypeError(
                f"UntunedCallback is for Untuned, got {type(opt).__name__}: pass "
                "optimizers=(Untuned(model.parameters()), None), or leave the callback out"
            )
        self._followed.close()  # of a run that has failed
        if self._average.optimizers != [opt]:
            self._average = Average([opt], model, self._batches)
        self._average.take_out()
        self._followed = self._average.follow(model)

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._average.put_in()  # before the best model is loaded, if this was the last epoch

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._average.put_in()
        self._followed.close()


class _EndOfStep(TrainerCallback):
    """Tells when the trainer has stepped, or has dropped an overflowing sample."""

    def __init__(self, trainer: StormPlusMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer._replay is not None:  # what a run that ran out of memory has left
            self._trainer._replay.finish()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        if trainer._replay is not None:
            trainer._replay.finish()
            if trainer._point is not None:
                trainer._point.note(trainer._replay.opt)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _check(trainer: Any, opt: Any) -> None:
    if not isinstance(opt, PairedOptimizer):
        raise TypeError(
            f"StormPlusTrainer is for StormPlus, SimplifiedStormPlus and Storm, got "
            f"{type(opt).__name__}: pass optimizers=(StormPlus(model.parameters()), None), or "
            "use transformers.Trainer, which is all that one gradient a step needs, for Untuned "
            "with callbacks=[UntunedCallback()]"
        )
    kind = trainer.accelerator.distributed_type
    if kind not in VERIFIED or trainer.args.n_gpu > 1:
        name = "DataParallel" if kind in VERIFIED else kind.value
        raise ValueError(
            f"{name} has not been verified with the two evaluations of a step: use one device, or "
            "DDP (torchrun)"
        )
    if trainer.args.max_grad_norm > 0 and trainer.is_world_process_zero():
        warnings.warn(
            f"max_grad_norm={trainer.args.max_grad_norm:g} clips the two gradients of a sample "
            "separately, so that their difference is no longer the change of one gradient. "
            "TrainingArguments(max_grad_norm=0) turns it off (the default is 1.0); "
            "StormPlus(..., max_move=0.1) bounds the move instead",
            stacklevel=2,
        )
