"""skorch: a mixin for its nets.

skorch gives every optimizer a closure, so that a net trains with STORM+ as it is. Three things
need the mixin: running statistics would count each sample twice, skorch's `lr` is 0.01 unless
one says otherwise, and weights that are loaded alone leave an estimator of another point. With
`Untuned` the mixin leaves the `lr` out and sees to the average.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from stormplus.integrations.point import Point
from stormplus.integrations.untuned import Average, ignore_lr
from stormplus.torch import BaseOptimizer, PairedOptimizer, StormPlus, Untuned, same_sample


class StormMixin:
    """Put it before a skorch net: `class Net(StormMixin, NeuralNetClassifier): ...`.

    The arguments are those of the net. `optimizer` is `StormPlus` by default and may be any
    optimizer of this package; `optimizer__...` passes options to it. With `Untuned` the net
    validates, predicts, scores and saves with the average, and trains its iterate.

    Args:
        *args: The module, as for the net.
        optimizer: The class of the optimizer.
        lr: Multiplies the step size; 1.0 is the paper's, where skorch's own default is 0.01.
            `Untuned` has none.
        **kwargs: Every other argument of the net.
    """

    # skorch's lists of attribute names; an optimizer of the user's own may be among them.
    _modules: list[str]
    _criteria: list[str]
    _optimizers: list[str]

    def __init__(
        self,
        *args: Any,
        optimizer: type[BaseOptimizer] = StormPlus,
        lr: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, optimizer=optimizer, lr=lr, **kwargs)  # type: ignore[call-arg]
        # Without the underscores skorch would take them for arguments.
        self.storm_point_, self.storm_average_ = Point(), Average()

    def get_params_for_optimizer(self, prefix: str, named_parameters: Any) -> Any:
        """What the optimizer is made with; no learning rate for `Untuned`."""
        args, kwargs = super().get_params_for_optimizer(prefix, named_parameters)  # type: ignore[misc]
        if getattr(self, prefix) is Untuned:
            ignore_lr(kwargs.pop("lr", None))
        return args, kwargs

    def set_params(self, **kwargs: Any) -> Any:
        """Change arguments of the net, also while it trains; no learning rate for `Untuned`."""
        if isinstance(getattr(self, "optimizer_", None), Untuned) and "optimizer" not in kwargs:
            for name in ("lr", "optimizer__lr"):
                ignore_lr(kwargs.pop(name, None))
        return super().set_params(**kwargs)  # type: ignore[misc]

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """What callbacks keep of an epoch is the average."""
        self._average().put_in()
        super().on_epoch_end(*args, **kwargs)  # type: ignore[misc]

    def _average(self) -> Average:
        """That of the optimizers that the net has now."""
        every = [getattr(self, name + "_", None) for name in self._optimizers]
        found = [opt for opt in every if isinstance(opt, Untuned)]
        if self.storm_average_.optimizers != found:
            self.storm_average_ = Average(found)
        return self.storm_average_

    def train_step_single(self, *args: Any, **kwargs: Any) -> Any:
        """A batch of the training."""
        self._average().take_out()
        return super().train_step_single(*args, **kwargs)  # type: ignore[misc]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A batch of the validation."""
        self._average().put_in()
        return super().validation_step(*args, **kwargs)  # type: ignore[misc]

    def evaluation_step(self, batch: Any, training: bool = False) -> Any:
        """A batch of a prediction."""
        if not training:
            self._average().put_in()
        return super().evaluation_step(batch, training)  # type: ignore[misc]

    def save_params(self, *args: Any, **kwargs: Any) -> None:
        """Save weights and states."""
        self._average().put_in()
        super().save_params(*args, **kwargs)  # type: ignore[misc]

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """The module is left with the average in it."""
        self._average().put_in()
        super().on_train_end(*args, **kwargs)  # type: ignore[misc]

    def _step_optimizer(self, step_fn: Callable[[], Any] | None) -> None:
        """Hand skorch's closure over, with random numbers and running statistics in order."""
        optimizers = [getattr(self, name + "_") for name in self._optimizers]
        if all(isinstance(opt, Untuned) for opt in optimizers):  # one gradient, as skorch has it
            self._average().take_out()
            super()._step_optimizer(step_fn)  # type: ignore[misc]
            return
        if len(optimizers) != 1:
            raise ValueError(
                f"the net has the optimizers {self._optimizers}: each would take two gradients "
                "of its own and move while the others look on. Give all parameters to one, in "
                "groups (optimizer__param_groups)"
            )
        opt = optimizers[0]
        if not isinstance(opt, PairedOptimizer):
            raise TypeError(
                f"StormMixin is for the optimizers of stormplus, got {type(opt).__name__}. An "
                "AcceleratedOptimizer comes from skorch's AccelerateMixin, whose step has no "
                "closure: leave that mixin out"
            )
        if step_fn is None:
            raise TypeError("_step_optimizer got no closure: pass it the net's step_fn")
        parts = [getattr(self, name + "_") for name in (*self._modules, *self._criteria)]
        model = nn.ModuleList([part for part in parts if isinstance(part, nn.Module)])
        self.storm_point_.restart_if_moved(opt)
        opt.step(same_sample(opt, model)(step_fn))
        self.storm_point_.note(opt)
