"""`Untuned` in any trainer: swaps its average in and out, and warns of learning rates."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]

from stormplus.torch import Untuned, recalibrate
from stormplus.trainers import managed

# The highest learning rate so far; infinite after the warning.
_highest_lr: WeakKeyDictionary[Untuned, float] = WeakKeyDictionary()


class Average:
    """Swaps the average of some `Untuned` optimizers into and out of their parameters.

    A copy, such as the one in a copied model, has no optimizers and does nothing.

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
        if recalibrate_batches < 0:
            raise ValueError(f"recalibrate_batches must be at least 0, got {recalibrate_batches}")
        self.optimizers = list(optimizers)
        managed.update(self.optimizers)
        self._model = model
        self.recalibrate_batches = recalibrate_batches
        self._batches: deque[Callable[[], Any]] = deque(maxlen=recalibrate_batches)
        self._recalibrated_at: list[int] = []

    def swap_in(self) -> None:
        """Put the average in, before validating or saving. Calling it again changes nothing."""
        for opt in self.optimizers:
            opt.eval()
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
            _warn_if_lr_falls(opt)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the average in for the context, unless it is in already."""
        before = all(opt.at_average for opt in self.optimizers)
        self.swap_in()
        try:
            yield
        finally:
            if not before:
                self.swap_out()

    def remember(self, evaluate: Callable[[], Any]) -> None:
        """Store a function that evaluates a training batch, to recompute statistics with it."""
        self._batches.append(evaluate)

    def _recalibrate(self) -> None:
        if self._model is None or not self._batches:
            return
        steps = [opt.grad_evaluations for opt in self.optimizers]  # waits for the device
        if steps == self._recalibrated_at:
            return
        self._recalibrated_at = steps
        devices = {p.device for opt in self.optimizers for p in opt.parameters()}
        with torch.random.fork_rng([d for d in devices if d.type == "cuda"]):
            recalibrate(self._model, self._batches, evaluate=lambda batch: batch())

    def follow(self, module: nn.Module) -> ExitStack:
        """Swap by hooks, until the returned stack is closed.

        The average is swapped out before the module is called in train mode and before a step with
        a closure. It is swapped in before a call in eval mode and before the `state_dict` of the
        module or of an optimizer is taken.
        """
        if self.recalibrate_batches and _synchronizes_statistics(module):
            raise ValueError(
                "recalibrate_batches with SyncBatchNorm: a save on one process would wait for the "
                "others. Call opt.eval() and stormplus.recalibrate on every process instead"
            )
        saved = getattr(module, "_orig_mod", module)  # some trainers save the uncompiled module
        hooks = ExitStack()
        for owner in (saved, *self.optimizers):
            hooks.callback(owner.register_state_dict_pre_hook(self._before_saving).remove)
        before_call = partial(module.register_forward_pre_hook, prepend=True, with_kwargs=True)
        hooks.callback(before_call(self._before_call).remove)
        for opt in self.optimizers:
            hooks.callback(opt.register_step_pre_hook(self._before_step).remove)
        return hooks

    @_disable_dynamo  # the module may be compiled
    def _before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.optimizers:
            return
        if module.training:
            self.swap_out()
            self.remember(partial(module, *args, **kwargs))
        else:
            self.swap_in()

    def _before_saving(self, *_: Any) -> None:
        self.swap_in()

    def _before_step(self, opt: Any, args: Any, kwargs: Any) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is not None:  # it will call the model
            self.swap_out()

    def __reduce__(self) -> tuple[type[Average], tuple[()]]:
        return Average, ()


class AverageCallback:
    """Base class of the trainers' callbacks for `Untuned`."""

    def __init__(self, *, recalibrate_batches: int = 0) -> None:
        super().__init__()
        self._average = Average(recalibrate_batches=recalibrate_batches)
        self._hooks = ExitStack()

    def _begin(self, optimizers: list[Any], model: Any, advice: str) -> None:
        """Average the `Untuned` among the trainer's optimizers; raise if there is none."""
        untuned = [opt for opt in optimizers if isinstance(opt, Untuned)]
        if not untuned:
            names = ", ".join(type(opt).__name__ for opt in optimizers) or "nothing"
            raise TypeError(
                f"UntunedCallback is for Untuned, got {names}: {advice}, or leave the callback out"
            )
        self._hooks.close()  # left by a run that failed
        self._average = Average(untuned, model, self._average.recalibrate_batches)

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


def _warn_if_lr_falls(opt: Untuned) -> None:
    """Warn, once per optimizer, if its learning rate falls; a warm-up only rises."""
    # Reading a rate on a device would wait for it.
    rates = [group["lr"] for group in opt.param_groups]
    lr = max(1.0 if isinstance(rate, torch.Tensor) else float(rate) for rate in rates)
    highest = max(lr, _highest_lr.get(opt, lr))
    if lr < 0.99 * highest < math.inf:
        warnings.warn(
            f"the learning rate of Untuned falls, from {highest:g} to {lr:g}, and multiplies its "
            "steps. It needs no schedule: leave the scheduler out. In transformers, where the "
            'default decays to zero: TrainingArguments(lr_scheduler_type="constant")',
            stacklevel=3,
        )
        highest = math.inf
    _highest_lr[opt] = highest
