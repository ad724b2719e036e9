"""skorch: a mixin for its nets, which give every optimizer a closure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

from torch import nn

from stormplus.integrations._write_detector import record_versions, restart_if_written
from stormplus.integrations.untuned import Average, ignore_lr
from stormplus.torch import BaseOptimizer, PairedOptimizer, StormPlus, Untuned, same_sample
from stormplus.trainers import managed


class StormPlusNetMixin:
    """Put it before a skorch net: `class Net(StormPlusNetMixin, NeuralNetClassifier): ...`.

    With `Untuned` the net validates, predicts, scores and saves with the average, and trains its
    iterate.

    Args:
        *args: The module, as for the net.
        optimizer: Any optimizer of this package; `optimizer__...` passes options to it.
        lr: Multiplies the step size; 1.0 is the paper's. Ignored by `Untuned`.
        **kwargs: Every other argument of the net.
    """

    # skorch's lists of attribute names
    _modules: list[str]
    _criteria: list[str]
    _optimizers: list[str]

    def __init__(
        self, *args: Any, optimizer: type[BaseOptimizer] = StormPlus, lr: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, optimizer=optimizer, lr=lr, **kwargs)  # type: ignore[call-arg]

    def get_params_for_optimizer(self, prefix: str, named_parameters: Any) -> Any:
        """Return the optimizer's arguments, without a learning rate for `Untuned`."""
        args, kwargs = super().get_params_for_optimizer(prefix, named_parameters)  # type: ignore[misc]
        if getattr(self, prefix) is Untuned:
            ignore_lr(kwargs.pop("lr", None))
        return args, kwargs

    def set_params(self, **kwargs: Any) -> Any:
        """Change arguments of the net, but no learning rate of an `Untuned` that trains."""
        if isinstance(getattr(self, "optimizer_", None), Untuned) and "optimizer" not in kwargs:
            for name in ("lr", "optimizer__lr"):
                ignore_lr(kwargs.pop(name, None))
        return super().set_params(**kwargs)  # type: ignore[misc]

    def _average(self) -> Average:
        optimizers = [getattr(self, name + "_", None) for name in self._optimizers]
        return Average(opt for opt in optimizers if isinstance(opt, Untuned))

    def _at_average(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the net with the average swapped in."""
        self._average().swap_in()
        return getattr(super(), name)(*args, **kwargs)

    validation_step = partialmethod(_at_average, "validation_step")
    evaluation_step = partialmethod(_at_average, "evaluation_step")
    save_params = partialmethod(_at_average, "save_params")
    on_epoch_end = partialmethod(_at_average, "on_epoch_end")
    on_train_end = partialmethod(_at_average, "on_train_end")

    def train_step_single(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a training batch at the iterate."""
        self._average().swap_out()
        return super().train_step_single(*args, **kwargs)  # type: ignore[misc]

    def _step_optimizer(self, step_fn: Callable[[], Any]) -> None:
        """Pass skorch's closure on, with replayed random numbers and running statistics."""
        optimizers = [getattr(self, name + "_") for name in self._optimizers]
        if all(isinstance(opt, Untuned) for opt in optimizers):
            self._average().swap_out()
            super()._step_optimizer(step_fn)  # type: ignore[misc]
            return
        if len(optimizers) != 1:
            raise ValueError(
                f"the net has the optimizers {self._optimizers}: give all parameters to one, in "
                "groups (optimizer__param_groups)"
            )
        opt = optimizers[0]
        if not isinstance(opt, PairedOptimizer):
            raise TypeError(
                f"StormPlusNetMixin is for the optimizers of stormplus, got {type(opt).__name__}. "
                "For an AcceleratedOptimizer, leave skorch's AccelerateMixin out"
            )
        parts = [getattr(self, name + "_") for name in (*self._modules, *self._criteria)]
        model = nn.ModuleList([part for part in parts if isinstance(part, nn.Module)])
        managed.add(opt)
        restart_if_written(opt)
        opt.step(same_sample(opt, model)(step_fn))
        record_versions(opt)
