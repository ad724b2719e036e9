"""What every trainer needs with `Untuned`: its average in the model, and no learning rate.

`Untuned` trains at one point and is good at another, the average of its run. A trainer must have
the average in the parameters whenever it validates or saves, and take it out before it goes on.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]

from stormplus.torch import Untuned, recalibrate

FORGOTTEN = (
    "the model holds the iterate of Untuned, not the average of the run, which is what you want "
    "to validate and save: "
)


class Average:
    """The average of some optimizers, in the parameters or not.

    A copy of it, which a copy of a followed model has, does nothing.

    Args:
        optimizers: Those whose parameters are the model's.
        model: The module with running statistics.
        recalibrate_batches: Take the running statistics anew over this many of the last batches
            when the average has come in; 0 leaves them as they are.
    """

    def __init__(
        self,
        optimizers: Iterable[Untuned] = (),
        model: nn.Module | None = None,
        recalibrate_batches: int = 0,
    ) -> None:
        if not (isinstance(recalibrate_batches, int) and recalibrate_batches >= 0):
            raise ValueError(
                "recalibrate_batches must be a whole number, at least 0, got "
                f"{recalibrate_batches!r}: 20 is a good one"
            )
        self.optimizers = list(optimizers)
        self._model = model
        self._seen: deque[Callable[[], Any]] = deque(maxlen=recalibrate_batches)
        self._calibrated: list[int] = []

    @property
    def is_in(self) -> bool:
        """Whether the parameters hold the average."""
        return all(opt.at_average for opt in self.optimizers)

    def put_in(self, *, recalibrated: bool = True) -> None:
        """Before validating or saving; twice is once."""
        for opt in self.optimizers:
            opt.eval()
        if recalibrated:
            self._recalibrate()

    def take_out(self) -> None:
        """Before training goes on; twice is once.

        If the parameters have been written to meanwhile and the optimizer's state has not (the
        best weights of a run were loaded, say), the last iterate would be put over them. Such
        a run begins anew from where it is.
        """
        for opt in self.optimizers:
            if opt.overwritten:
                warnings.warn(
                    "weights were loaded without the state of Untuned: it begins anew from them. "
                    "To go on with the run, load the optimizer's state too",
                    stacklevel=2,
                )
                opt.reset()
            opt.train()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The average inside, and whatever was there before outside."""
        before = self.is_in
        self.put_in()
        try:
            yield
        finally:
            if not before:
                self.take_out()

    def saw(self, evaluate: Callable[[], Any]) -> None:
        """Remember how a batch of the training is evaluated, for the running statistics."""
        self._seen.append(evaluate)

    def _recalibrate(self) -> None:
        steps = [opt.grad_evaluations for opt in self.optimizers]
        if self._model is None or not self._seen or steps == self._calibrated:
            return
        self._calibrated = steps
        devices = {p.device for opt in self.optimizers for p in opt.parameters()}
        with torch.random.fork_rng([d for d in devices if d.type == "cuda"]):
            recalibrate(self._model, self._seen, evaluate=lambda again: again())

    def follow(self, module: nn.Module) -> ExitStack:
        """Let a module say what is wanted: a call in train mode the iterate, else the average.

        Taking its state, or that of the optimizer, puts the average in, too; a step with a closure
        takes it out.

        Returns:
            Closing it ends this.
        """
        if self._seen.maxlen and _several_processes() and _joins_processes(module):
            raise ValueError(
                "recalibrate_batches with SyncBatchNorm: a save on one process would wait for the "
                "others. Leave recalibrate_batches at 0, and before the last save call opt.eval() "
                "and stormplus.recalibrate(model, batches) on every process"
            )
        inner = getattr(module, "_orig_mod", module)  # of a compiled one: some save that
        hooks = (
            module.register_forward_pre_hook(self._before_call, prepend=True, with_kwargs=True),
            inner.register_state_dict_pre_hook(self._before_save),
            *(opt.register_state_dict_pre_hook(self._before_save) for opt in self.optimizers),
            *(opt.register_step_pre_hook(self._before_step) for opt in self.optimizers),
        )
        stack = ExitStack()
        for hook in hooks:
            stack.callback(hook.remove)
        return stack

    @_disable_dynamo  # the module may be compiled
    def _before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.optimizers:
            return
        if module.training:
            self.take_out()
            if self._seen.maxlen:
                self.saw(partial(module, *args, **kwargs))
        else:
            self.put_in()

    def _before_save(self, *_: Any) -> None:
        self.put_in()

    def _before_step(self, opt: Any, args: Any, kwargs: Any) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        if closure is not None:  # it will call the model
            self.take_out()

    def __reduce__(self) -> tuple[type[Average], tuple[()]]:
        return Average, ()


def _several_processes() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _joins_processes(module: nn.Module) -> bool:
    return any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())


def ignore_lr(lr: Any, stacklevel: int = 3) -> None:
    """Say that a learning rate has no effect, unless it is the one that `Untuned` has."""
    if lr is None or float(lr) == 1.0:
        return
    warnings.warn(
        f"lr={float(lr):g} is ignored: Untuned measures its own step sizes, and lr is no rate "
        "there but a factor on all of them, 1.0. Leave it out, or pass 1.0. A scheduler may still "
        "multiply it, and a parameter group may have a factor of its own",
        stacklevel=stacklevel,
    )
