"""Hugging Face Trainer: a callback for `Untuned`, and a subclass for paired optimizers.

    trainer = Trainer(model, args, optimizers=(Untuned(model.parameters()), None),
                      callbacks=[UntunedCallback()], ...)
    trainer = StormPlusTrainer(model, args, optimizers=(StormPlus(model.parameters()), None), ...)

`transformers.Trainer` calls `optimizer.step()` without a closure. The subclass records the
micro-batches of a step and evaluates them again, in order and with the same random numbers, when
the optimizer needs the second gradient.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from stormplus.install import how_to
from stormplus.integrations._write_detector import WriteDetector
from stormplus.integrations.replay import CLIPPING, Replay
from stormplus.integrations.untuned import Average
from stormplus.torch import PairedOptimizer, Untuned
from stormplus.versions import clip_gradients

try:
    from transformers import Trainer, TrainerCallback

    from stormplus.integrations.accelerate import VERIFIED, unwrapped
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"this integration needs transformers and accelerate: {how_to('huggingface')}"
    ) from error

_Base = Trainer if TYPE_CHECKING else object


class UntunedCallback(TrainerCallback):
    """Evaluates, saves and returns the average of `Untuned`, whatever the strategies are.

    A run that is resumed from a checkpoint continues from the iterate, exactly.

    Args:
        recalibrate_batches: Recompute BatchNorm's running statistics over this many of the last
            training batches whenever the average is swapped in; 0 leaves them as they are.
    """

    def __init__(self, *, recalibrate_batches: int = 0) -> None:
        self._batches = recalibrate_batches
        self._average = Average(recalibrate_batches=recalibrate_batches)
        self._following = ExitStack()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any
    ) -> None:
        opt = unwrapped(optimizer)
        if not isinstance(opt, Untuned):
            raise TypeError(
                f"UntunedCallback is for Untuned, got {type(opt).__name__}: pass "
                "optimizers=(Untuned(model.parameters()), None), or leave the callback out"
            )
        self._following.close()  # left by a run that failed
        if self._average.optimizers != [opt]:
            self._average = Average([opt], model, self._batches)
            _warn_of_decay(kwargs.get("lr_scheduler"), state.max_steps)
        self._average.swap_out()
        self._following = self._average.follow(model)

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._average.swap_in()  # before the best model is loaded, if this was the last epoch

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._average.swap_in()
        self._following.close()


def _warn_of_decay(scheduler: Any, steps: int) -> None:
    """Warn if a schedule of transformers, a LambdaLR, ends near zero."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # inside Accelerate's wrapper
    factors = [f(steps) for f in getattr(scheduler, "lr_lambdas", ()) if f is not None]
    if factors and max(factors) < 0.05:
        warnings.warn(
            "the learning-rate schedule decays to zero (transformers' default is linear) and "
            "multiplies the steps of Untuned, which needs no schedule: "
            'TrainingArguments(lr_scheduler_type="constant")',
            stacklevel=2,
        )


class StormPlusTrainerMixin(_Base):  # type: ignore[misc, valid-type, unused-ignore]
    """Makes a subclass of `transformers.Trainer` take two gradients; put it before the other base.

    Gradient accumulation, bf16, fp16, DDP, clipping, schedulers, checkpoints and resuming work
    as with other optimizers. `opt.diagnostics()` is logged with the loss, which is that of the
    first evaluation. If weights are replaced without the optimizer's state, as
    `load_best_model_at_end` does, the estimator restarts.
    """

    _replay: Replay | None = None
    _detector: WriteDetector | None = None

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
        if self._detector is None:
            self._detector = WriteDetector()
        if not self._replay.recording:
            self._detector.restart_if_written(self._replay.opt)
        last = self.accelerator.sync_gradients
        self._replay.record(partial(self._again, model, inputs, num_items_in_batch, last))
        return super().training_step(model, inputs, num_items_in_batch)

    def _again(self, model: Any, inputs: Any, num_items_in_batch: Any, last: bool) -> None:
        with nullcontext() if last else self.accelerator.no_sync(model):
            super().training_step(model, inputs, num_items_in_batch)

    def _process(self, model: Any) -> None:
        """Unscale and clip, as the trainer's loop does to the first gradient."""
        if self.args.max_grad_norm > 0:
            clip_gradients(self, model)
        else:
            self.accelerator.unscale_gradients()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        opt = unwrapped(self.optimizer)
        if "loss" in logs and isinstance(opt, PairedOptimizer):
            logs |= {f"stormplus/{name}": value for name, value in opt.diagnostics().items()}
        super().log(logs, *args, **kwargs)


class StormPlusTrainer(StormPlusTrainerMixin, Trainer):
    """`transformers.Trainer` for `StormPlus`, `SimplifiedStormPlus` and `Storm`.

    Pass the optimizer as `optimizers=(opt, None)` or as
    `optimizer_cls_and_kwargs=(StormPlus, {"lr": 1.0})`; `TrainingArguments.learning_rate` is
    not used.
    """


class _EndOfStep(TrainerCallback):
    """Ends the recorded sample when the trainer has stepped or has skipped an overflow."""

    def __init__(self, trainer: StormPlusTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer._replay is not None:  # auto_find_batch_size begins again after an error
            self._trainer._replay.finish()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        replay, detector = self._trainer._replay, self._trainer._detector
        if replay is not None and detector is not None:
            replay.finish()
            detector.record(replay.opt)


def _check(trainer: Any, opt: Any) -> None:
    if not isinstance(opt, PairedOptimizer):
        raise TypeError(
            f"StormPlusTrainer is for StormPlus, SimplifiedStormPlus and Storm, got "
            f"{type(opt).__name__}: pass optimizers=(StormPlus(model.parameters()), None). "
            "Untuned needs transformers.Trainer with callbacks=[UntunedCallback()]"
        )
    kind = trainer.accelerator.distributed_type
    if kind not in VERIFIED or trainer.args.n_gpu > 1:
        name = "DataParallel" if kind in VERIFIED else kind.value
        raise ValueError(
            f"{name} has not been verified with two evaluations per step: use one device or DDP "
            "(torchrun)"
        )
    if trainer.args.max_grad_norm > 0 and trainer.is_world_process_zero():
        warnings.warn(
            f"max_grad_norm={trainer.args.max_grad_norm:g} (the default is 1.0) {CLIPPING}: "
            "TrainingArguments(max_grad_norm=0)",
            stacklevel=2,
        )
