"""What every trainer needs for `Untuned`: the average is swapped in and out, rates are checked."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]
from torch.optim.lr_scheduler import LambdaLR

from stormplus.torch import Untuned, recalibrate
from stormplus.trainers import managed

DECAYED_LR = 0.05
# Whether to warn if the lr of an optimizer becomes small: not in a warm-up, and only once.
_warns_of_decay: WeakKeyDictionary[Untuned, bool] = WeakKeyDictionary()


class Average:
    """Swaps the average of some `Untuned` optimizers into and out of their parameters.

    A copy, as a copied model has it, has no optimizers and does nothing.

    Args:
        optimizers: The optimizers of the model's parameters.
        model: The module with running statistics.
        recalibrate_batches: Recompute the running statistics over this many of the last training
            batches whenever the average is swapped in; 0 leaves them as they are.
    """

    def __init__(
        self,
        optimizers: Iterable[Untuned] = (),
        model: nn.Module | None = None,
        recalibrate_batches: int = 0,
    ) -> None:
        if not (isinstance(recalibrate_batches, int) and recalibrate_batches >= 0):
            raise ValueError(
                "recalibrate_batches must be an integer, at least 0, got "
                f"{recalibrate_batches!r}: 20 is a good value"
            )
        self.optimizers = list(optimizers)
        managed.update(self.optimizers)
        self._model = model
        self._batches: deque[Callable[[], Any]] = deque(maxlen=recalibrate_batches)
        self._recalibrated_at: list[int] = []

    def swap_in(self, *, recalibrated: bool = True) -> None:
        """Put the average in, before validating or saving. Calling it again changes nothing."""
        for opt in self.optimizers:
            opt.eval()
            if _warns_of_decay.get(opt):
                warn_of_decay(opt, _lrs(opt))
        if recalibrated:
            self._recalibrate()

    def swap_out(self) -> None:
        """Put the iterate back, before training. Calling it again changes nothing.

        If weights were loaded without the optimizer's state, the optimizer starts over from them.
        """
        for opt in self.optimizers:
            if opt.overwritten:
                warnings.warn(
                    "weights were loaded without the state of Untuned, which starts over from "
                    "them: to resume the run, load the optimizer's state too",
                    stacklevel=2,
                )
                opt.reset()
            opt.train()
            if max(_lrs(opt)) >= DECAYED_LR:
                _warns_of_decay.setdefault(opt, True)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Hold the average inside the context, and what was there before outside."""
        before = all(opt.at_average for opt in self.optimizers)
        self.swap_in()
        try:
            yield
        finally:
            if not before:
                self.swap_out()

    def remember(self, evaluate: Callable[[], Any]) -> None:
        """Keep a training batch, as a function that evaluates it, to recompute statistics."""
        self._batches.append(evaluate)

    def _recalibrate(self) -> None:
        steps = [opt.grad_evaluations for opt in self.optimizers]
        if self._model is None or not self._batches or steps == self._recalibrated_at:
            return
        self._recalibrated_at = steps
        devices = {p.device for opt in self.optimizers for p in opt.parameters()}
        with torch.random.fork_rng([d for d in devices if d.type == "cuda"]):
            recalibrate(self._model, self._batches, evaluate=lambda batch: batch())

    def follow(self, module: nn.Module) -> ExitStack:
        """Swap by what happens to the module, until the returned stack is closed.

        A call in train mode and a step with a closure swap the average out. A call in eval mode
        and taking the state of the module or of the optimizer swap it in.
        """
        if self._batches.maxlen and _synchronizes_statistics(module):
            raise ValueError(
                "recalibrate_batches with SyncBatchNorm: a save on one process would wait for the "
                "others. Leave it at 0, and before the last save call opt.eval() and "
                "stormplus.recalibrate(model, batches) on every process"
            )
        saved = getattr(module, "_orig_mod", module)  # some trainers save the uncompiled module
        hooks = [
            module.register_forward_pre_hook(self._before_call, prepend=True, with_kwargs=True),
            saved.register_state_dict_pre_hook(self._before_save),
        ]
        for opt in self.optimizers:
            hooks.append(opt.register_state_dict_pre_hook(self._before_save))
            hooks.append(opt.register_step_pre_hook(self._before_step))
        stack = ExitStack()
        for hook in hooks:
            stack.callback(hook.remove)
        return stack

    @_disable_dynamo  # the module may be compiled
    def _before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.optimizers:
            return
        if module.training:
            self.swap_out()
            self.remember(partial(module, *args, **kwargs))
        else:
            self.swap_in()

    def _before_save(self, *_: Any) -> None:
        self.swap_in()

    def _before_step(self, opt: Any, args: Any, kwargs: Any) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is not None:  # it will call the model
            self.swap_out()

    def __reduce__(self) -> tuple[type[Average], tuple[()]]:
        return Average, ()


class AverageCallback:
    """What the callbacks of all trainers for `Untuned` share."""

    def __init__(self, *, recalibrate_batches: int = 0) -> None:
        super().__init__()
        self._recalibrate_batches = recalibrate_batches
        self._average = Average(recalibrate_batches=recalibrate_batches)
        self._hooks = ExitStack()

    def _begin(self, optimizers: list[Any], model: Any, advice: str) -> None:
        """Take the average of the trainer's optimizers; raise if there is no `Untuned`."""
        untuned = [opt for opt in optimizers if isinstance(opt, Untuned)]
        if not untuned:
            names = ", ".join(type(opt).__name__ for opt in optimizers) or "nothing"
            raise TypeError(
                f"UntunedCallback is for Untuned, got {names}: {advice}, or leave the callback out"
            )
        self._hooks.close()  # left by a run that failed
        self._average = Average(untuned, model, self._recalibrate_batches)

    def _end(self) -> None:
        self._average.swap_in()
        self._hooks.close()


def _synchronizes_statistics(module: nn.Module) -> bool:
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())


def ignore_lr(lr: Any) -> None:
    """Warn that a learning rate is ignored, unless it is 1.0 or None."""
    if lr is not None and float(lr) != 1.0:
        warnings.warn(
            f"lr={float(lr):g} is ignored: Untuned finds its own step sizes. Leave it out, or "
            "pass 1.0",
            stacklevel=3,
        )


def warn_of_decay(opt: Untuned, lrs: list[float]) -> None:
    """Warn, once per optimizer, if its schedule has arrived or will end at these rates."""
    if lrs and max(lrs) < DECAYED_LR and _warns_of_decay.get(opt, True):
        _warns_of_decay[opt] = False
        warnings.warn(
            f"the learning-rate schedule decays to zero ({max(lrs):g}) and multiplies the steps of "
            "Untuned, which needs no schedule: leave the scheduler out. In transformers, where the "
            'default is linear: TrainingArguments(lr_scheduler_type="constant")',
            stacklevel=3,
        )


def _lrs(opt: Untuned) -> list[float]:
    """Return the rates of all groups; reading those on a device would wait for it."""
    rates = [group["lr"] for group in opt.param_groups]
    return [1.0 if isinstance(lr, torch.Tensor) else float(lr) for lr in rates]


def final_lrs(scheduler: Any, steps: int) -> list[float]:
    """Return the rates of a torch scheduler after so many steps; none if they are not known."""
    ahead = copy(scheduler)
    if isinstance(ahead, LambdaLR):
        return [float(lr) * f(steps) for lr, f in zip(ahead.base_lrs, ahead.lr_lambdas)]
    if not hasattr(ahead, "_get_closed_form_lr"):
        return []
    ahead.last_epoch = steps
    return list(ahead._get_closed_form_lr())
