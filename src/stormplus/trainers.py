"""Warns when a trainer drives an optimizer of this package without the callback that it needs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any
from weakref import WeakSet

managed: WeakSet[Any] = WeakSet()  # optimizers that an integration takes care of

_CALLBACK = "pass {}(), from stormplus.integrations.{}, to {}"
_TRAINER = "Trainer(callbacks=[...])"
_LIGHTNING = _CALLBACK.format("UntunedCallback", "lightning", _TRAINER)
_ADVICE = {  # by the module that drives the training loop
    "lightning.pytorch.": _LIGHTNING,
    "pytorch_lightning.": f"import Trainer from lightning.pytorch, and {_LIGHTNING}",
    "transformers.trainer": _CALLBACK.format("UntunedCallback", "huggingface", _TRAINER),
    "fastai.learner": _CALLBACK.format("UntunedCallback", "fastai", "Learner(cbs=[...])"),
    "deepspeed.": "DeepSpeed was not verified, and its wrapper does not pass optimizer.eval() on",
}
_FINDERS = ("lightning.pytorch.tuner.", "pytorch_lightning.tuner.", "fastai.callback.schedule")


def stack_frames() -> Iterator[FrameType]:
    """Yield the frame of the function that iterates, and those of its callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def check_trainer(opt: Any) -> None:
    """Warn or raise if the caller of this step would use the optimizer wrongly.

    Call it at the first step. A wrong gradient raises, a missing callback warns.
    """
    if hasattr(opt, "at_average"):
        _check_untuned(opt)
    else:
        _check_paired(opt)


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _check_untuned(opt: Any) -> None:
    modules = []
    for frame in stack_frames():
        modules.append(_module(frame))
        if frame.f_code.co_name.endswith("lr_find") and modules[-1].startswith(_FINDERS):
            raise RuntimeError(
                "Untuned has no learning rate to find: train without the learning-rate finder"
            )
    if opt in managed:
        return
    for prefix, advice in _ADVICE.items():
        if any(module.startswith(prefix) for module in modules):
            warnings.warn(
                "without the callback this trainer may validate or save the iterate of Untuned "
                f"instead of the average, which is the better model: {advice}",
                stacklevel=3,
            )
            return
    if any(module.startswith("accelerate.") for module in modules):
        _check_first_save(opt)  # until then the loop may call eval()


def _check_paired(opt: Any) -> None:
    # Read `f_locals` in known functions only: in the user's it would keep variables alive.
    for frame in stack_frames():
        module = _module(frame)
        if module.endswith(".lookahead"):  # of timm or pytorch_optimizer
            raise RuntimeError(
                "Lookahead moves the parameters every few steps, and the estimator then belongs "
                "to another point: create the optimizer without it"
            )
        if opt in managed:
            continue
        scaled = module.endswith("amp.grad_scaler") and frame.f_code.co_name == "step"
        if scaled and frame.f_locals["self"].is_enabled():
            raise RuntimeError(
                "GradScaler.step does not unscale the gradients of a closure: call "
                "stormplus.scaled_step(opt, scaler, closure, model) instead"
            )
        if module == "skorch.net":
            warnings.warn(
                "without the mixin the second evaluation moves running statistics, as BatchNorm's, "
                "again: put StormPlusNetMixin, from stormplus.integrations.skorch, before the net",
                stacklevel=3,
            )
            return
        if module.startswith(("lightning.pytorch.", "pytorch_lightning.")):
            accumulated = getattr(frame.f_locals.get("trainer"), "accumulate_grad_batches", 1)
            if accumulated > 1:
                warnings.warn(
                    f"with accumulate_grad_batches={accumulated} the second gradient covers the "
                    "last micro-batch only, and is wrong: "
                    + _CALLBACK.format("StormPlusCallback", "lightning", _TRAINER),
                    stacklevel=3,
                )
                return


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
