"""Warns when a trainer drives an optimizer of this package without the callback that it needs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any
from weakref import WeakSet

managed: WeakSet[Any] = WeakSet()  # optimizers that an integration takes care of

NO_FINDER = "Untuned has no learning rate to find: train without the learning-rate finder"
_CALLBACK = "pass {}(), from stormplus.integrations.{}, to {}"
_LIGHTNING = _CALLBACK.format("UntunedCallback", "lightning", "Trainer(callbacks=[...])")
_ADVICE = {  # by the module that drives the training loop
    "lightning.pytorch.": _LIGHTNING,
    "pytorch_lightning.": f"import Trainer from lightning.pytorch, and {_LIGHTNING}",
    "transformers.trainer": _CALLBACK.format(
        "UntunedCallback", "huggingface", "Trainer(callbacks=[...])"
    ),
    "fastai.learner": _CALLBACK.format("UntunedCallback", "fastai", "Learner(cbs=[...])"),
    "deepspeed.": "DeepSpeed was not verified, and its wrapper does not pass optimizer.eval() on",
}
_SCALER = "amp.grad_scaler"  # of torch, whose step(opt, closure) calls opt.step(closure)
_FINDERS = ("lightning.pytorch.tuner.", "pytorch_lightning.tuner.", "fastai.callback.schedule")


def stack_frames() -> Iterator[FrameType]:
    """Yield the frame of the function that iterates, and those of its callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def check_trainer(opt: Any) -> None:
    """Warn if the trainer that takes this step needs a callback; call it at the first step.

    `Untuned` needs one that swaps its average in. Under Accelerate, warn at the first save instead,
    since the loop may call eval() later. A paired optimizer needs one in Lightning if gradients are
    accumulated.

    Raises:
        RuntimeError: If a learning-rate finder drives an `Untuned`, or `GradScaler.step` a paired
            optimizer: it would unscale neither gradient.
    """
    averages = hasattr(opt, "at_average")
    modules, accumulated, scaled = [], 1, False
    for frame in stack_frames():
        modules.append(frame.f_globals.get("__name__") or "")
        if modules[-1].startswith(("lightning.pytorch.", "pytorch_lightning.")):
            trainer = frame.f_locals.get("trainer")
            accumulated = getattr(trainer, "accumulate_grad_batches", accumulated)
        finder = frame.f_code.co_name.endswith("lr_find") and modules[-1].startswith(_FINDERS)
        if averages and finder:
            raise RuntimeError(NO_FINDER)
        if frame.f_code.co_name == "step" and modules[-1].endswith(_SCALER):
            scaled = frame.f_locals["self"].is_enabled()
    if opt in managed:
        return
    if not averages:
        if scaled:
            raise RuntimeError(
                "GradScaler.step does not unscale the gradients of a closure: call "
                "stormplus.scaled_step(opt, scaler, closure, model) instead"
            )
        if accumulated > 1:
            advice = _CALLBACK.format("StormPlusCallback", "lightning", "Trainer(callbacks=[...])")
            warnings.warn(
                f"with accumulate_grad_batches={accumulated} the second evaluation of a sample "
                f"covers its last micro-batch only, and the gradients are wrong: {advice}",
                stacklevel=2,
            )
        return
    for prefix, advice in _ADVICE.items():
        if any(module.startswith(prefix) for module in modules):
            warnings.warn(
                "without the callback this trainer may validate or save the iterate of Untuned "
                f"instead of the average, which is the better model: {advice}",
                stacklevel=2,
            )
            return
    if any(module.startswith("accelerate.") for module in modules):
        _check_first_save(opt)


def _check_first_save(opt: Any) -> None:
    def check(opt: Any) -> None:
        handle.remove()
        if opt not in managed and not opt.at_average:
            warnings.warn(
                "the iterate of Untuned is saved here, not the average: call optimizer.eval() "
                "before you validate or save, and optimizer.train() afterwards. If you did, a "
                "wrapper did not pass the call on: use prepare from "
                "stormplus.integrations.accelerate, or call eval() on the Untuned itself",
                stacklevel=2,
            )

    handle = opt.register_state_dict_pre_hook(check)
