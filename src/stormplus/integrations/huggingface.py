"""Hugging Face Trainer: a callback for `Untuned`, and a subclass for paired optimizers.

`transformers.Trainer` calls `optimizer.step()` without a closure. The subclass records the
micro-batches of a step and evaluates them again when the optimizer needs the second gradient.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from stormplus.install import required
from stormplus.integrations._write_detector import record_versions, restart_if_written
from stormplus.integrations.replay import CLIPPING, Replay
from stormplus.integrations.untuned import AverageCallback
from stormplus.torch import PairedOptimizer
from stormplus.versions import clip_gradients

with required("huggingface"):
    from transformers import Trainer, TrainerCallback

    from stormplus.integrations.accelerate import VERIFIED, unwrapped

_Base = Trainer if TYPE_CHECKING else object


class UntunedCallback(AverageCallback, TrainerCallback):
    """Evaluates, saves and returns the average of `Untuned`, whatever the strategies are.

    A run that is resumed from a checkpoint continues from the iterate, exactly. For
    `recalibrate_batches` see `Average`.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any
    ) -> None:
        advice = "pass optimizers=(Untuned(model.parameters()), None)"
        self._begin([unwrapped(optimizer)], model, advice)
        self._average.swap_out()
        self._hooks = self._average.follow(model)

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._average.swap_in()  # before the best model is loaded, if this was the last epoch

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._end()


class StormPlusTrainerMixin(_Base):  # type: ignore[misc, valid-type, unused-ignore]
    """Makes a subclass of `transformers.Trainer` take two gradients; put it before the other base.

    Gradient accumulation, bf16, fp16, DDP, clipping, schedulers, checkpoints and resuming work
    as with other optimizers. `opt.diagnostics()` is logged with the loss, which is that of the
    first evaluation. If weights are replaced without the optimizer's state, as
    `load_best_model_at_end` does, the estimator restarts.
    """

    _replay: Replay | None = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        _check(self, unwrapped(optimizer))
        return optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        around_step = _AroundStep(self)
        self.add_callback(around_step)
        try:
            return super().train(*args, **kwargs)
        finally:
            self.remove_callback(around_step)
            if self._replay is not None:
                self._replay.remove()
                self._replay = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self._replay is None:
            opt, process = unwrapped(self.optimizer), partial(self._process, model)
            self._replay = Replay(opt, model, process, self.accelerator.scaler)
        evaluate = partial(super().training_step, model, inputs, num_items_in_batch)

        def evaluate_again(last: bool) -> None:
            with nullcontext() if last else self.accelerator.no_sync(model):
                evaluate()

        self._replay.record(evaluate_again)
        return evaluate()

    def _process(self, model: Any) -> None:
        """Unscale and clip, as the trainer's loop does to the first gradient."""
        if self.args.max_grad_norm > 0:
            clip_gradients(self, model)
        else:
            self.accelerator.unscale_gradients()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            numbers = unwrapped(self.optimizer).diagnostics()
            logs |= {f"stormplus/{name}": value for name, value in numbers.items()}
        super().log(logs, *args, **kwargs)


class StormPlusTrainer(StormPlusTrainerMixin, Trainer):
    """`transformers.Trainer` for `StormPlus`, `SimplifiedStormPlus` and `Storm`.

    Pass the optimizer as `optimizers=(opt, None)` or as
    `optimizer_cls_and_kwargs=(StormPlus, {"lr": 1.0})`; `TrainingArguments.learning_rate` is
    not used.
    """


class _AroundStep(TrainerCallback):
    """Restarts after replaced weights, and ends the sample, even if an overflow was skipped."""

    def __init__(self, trainer: StormPlusTrainerMixin) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        restart_if_written(unwrapped(self._trainer.optimizer))

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer._replay is not None:
            self._trainer._replay.finish()
            record_versions(self._trainer._replay.opt)

    on_train_begin = on_optimizer_step  # auto_find_batch_size begins again after an error


def _check(trainer: Any, opt: Any) -> None:
    if not isinstance(opt, PairedOptimizer):
        raise TypeError(
            f"StormPlusTrainer got {type(opt).__name__}: pass optimizers=(StormPlus(...), None). "
            "Untuned needs transformers.Trainer with callbacks=[UntunedCallback()]"
        )
    kind = trainer.accelerator.distributed_type
    if kind not in VERIFIED or trainer.args.n_gpu > 1:
        name = "DataParallel" if kind in VERIFIED else kind.value
        raise ValueError(f"{name} has not been verified: use one device or DDP (torchrun)")
    if trainer.args.max_grad_norm > 0 and trainer.is_world_process_zero():
        warnings.warn(
            f"max_grad_norm={trainer.args.max_grad_norm:g} (the default is 1.0) {CLIPPING}: "
            "TrainingArguments(max_grad_norm=0)",
            stacklevel=2,
        )
