"""Keras 3 on the torch backend: an optimizer for `compile` and a mixin for the model.

Keras keeps running statistics and the seeds of random layers as variables, not as buffers of a
torch module. The mixin's training step restores those too, so that both evaluations of a batch
draw the same masks and statistics move once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import nn

from stormplus import torch as optimizers
from stormplus.install import required
from stormplus.integrations._write_detector import record_versions, restart_if_written
from stormplus.integrations.untuned import Average, ignore_lr
from stormplus.torch import BaseOptimizer, PairedOptimizer, Untuned, same_sample

with required("keras"):  # its import also fails without its backend
    import keras
    from keras.src.random.seed_generator import global_seed_generator

if keras.backend.backend() != "torch":
    raise RuntimeError(
        f"Keras runs on the backend {keras.backend.backend()!r}: set the environment variable "
        "KERAS_BACKEND=torch before keras is imported"
    )

_STATE = "stormplus"
_METHODS = ("StormPlus", "SimplifiedStormPlus", "Storm", "Untuned")


@keras.saving.register_keras_serializable("stormplus")
class StormPlusOptimizer(keras.optimizers.Optimizer):
    """An optimizer of this package, for `model.compile(optimizer=...)`.

    The model's class must have `StormPlusModelMixin` among its bases. Saving the model saves the
    state, and a loaded model continues exactly.

    Args:
        method: "StormPlus", "SimplifiedStormPlus", "Storm" or "Untuned".
        learning_rate: The optimizer's `lr`: a float, or a schedule of Keras. `Untuned` ignores a
            float, and a schedule multiplies its steps.
        name: For Keras.
        **options: Every other argument of the optimizer; `state_dtype` may be a name, "bfloat16".
    """

    def __init__(
        self,
        method: str = "StormPlus",
        learning_rate: Any = 1.0,
        name: str = "stormplus",
        **options: Any,
    ) -> None:
        if method not in _METHODS:
            raise ValueError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
        if method == "Untuned" and isinstance(learning_rate, (int, float)):
            ignore_lr(learning_rate)
            learning_rate = 1.0
        super().__init__(learning_rate=learning_rate, name=name)
        if isinstance(options.get("state_dtype"), str):  # as in a saved configuration
            options["state_dtype"] = getattr(torch, options["state_dtype"])
        self.method, self._options = method, options
        self.average = Average()
        self._torch_optimizer: BaseOptimizer | None = None
        self._make([nn.Parameter(torch.ones(1))])  # raises now if it does not know an option

    def _make(self, params: Any) -> BaseOptimizer:
        make: Any = getattr(optimizers, self.method)
        rate = {} if make is Untuned else {"lr": float(self.learning_rate)}
        opt: BaseOptimizer = make(params, **rate, **self._options)
        return opt

    @property
    def torch_optimizer(self) -> BaseOptimizer:
        """The optimizer itself, for `diagnostics()` or `restart()`."""
        if self._torch_optimizer is None:
            raise RuntimeError("the optimizer is not built yet: fit the model, or build(variables)")
        return self._torch_optimizer

    def build(self, variables: list[Any]) -> None:
        for variable in variables:
            if variable.constraint is not None:  # Keras would apply it after each step
                raise ValueError(
                    f"{variable.path} has the constraint {type(variable.constraint).__name__}: use "
                    "a regularizer, or constrain the weights inside the layer's call"
                )
        super().build(variables)
        params = {id(v.value): v.value for v in variables}  # a layer may be there twice
        opt = self._torch_optimizer = self._make(params.values())
        if isinstance(opt, Untuned):
            self.average = Average([opt])

    def step(self, closure: Callable[[], Any], variables: list[Any]) -> None:
        """Take a step of the torch optimizer, at Keras's learning rate."""
        self._check_variables_are_known(variables)
        opt = self.torch_optimizer
        for group in opt.param_groups:
            group["lr"] = float(self.learning_rate)
        if isinstance(opt, PairedOptimizer):
            restart_if_written(opt)
            opt.step(closure)
            record_versions(opt)
        else:
            self.average.swap_out()
            opt.step(closure)
        self._iterations.assign_add(1)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Raise: Keras's own training step calls this, which the mixin replaces."""
        raise RuntimeError(
            f"{self.method} needs the training step of StormPlusModelMixin: "
            "`class Model(StormPlusModelMixin, keras.Model)`"
        )

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Raise: one weight decay holds for all variables."""
        raise RuntimeError("weight_decay is for all variables here: use kernel_regularizer")

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        own = {"method": self.method, **self._options}
        if isinstance(own.get("state_dtype"), torch.dtype):  # which Keras cannot serialize
            own["state_dtype"] = str(own["state_dtype"]).removeprefix("torch.")
        return {key: config[key] for key in ("name", "learning_rate")} | own

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        if self._torch_optimizer is not None:
            file = BytesIO()
            torch.save(self._torch_optimizer.state_dict(), file)
            store[_STATE] = np.frombuffer(file.getvalue(), dtype=np.uint8)

    def load_own_variables(self, store: Any) -> None:
        keys = list(store.keys())  # Keras's stores are not quite dictionaries
        variables = {key: store[key] for key in keys}
        state = variables.pop(_STATE, None)
        super().load_own_variables(variables)
        if state is not None:
            file = BytesIO(np.asarray(state).tobytes())
            self.torch_optimizer.load_state_dict(torch.load(file, weights_only=True))


class StormPlusModelMixin:
    """Put it before a Keras model: `class Model(StormPlusModelMixin, keras.Model): ...`.

    The loss and the predictions that metrics see are those of the first evaluation. With `Untuned`
    the methods that evaluate, predict, save or return the weights swap its average in, and `fit`
    leaves it there.
    """

    def swap_in_average(self: Any) -> None:
        """Put the average of `Untuned` into the model; do nothing for other optimizers."""
        optimizer = getattr(self, "optimizer", None)  # there is none before compile
        if isinstance(optimizer, StormPlusOptimizer):
            optimizer.average.swap_in()

    def _at_average(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of Keras with the average swapped in."""
        self.swap_in_average()
        return getattr(super(), name)(*args, **kwargs)

    evaluate = partialmethod(_at_average, "evaluate")
    predict = partialmethod(_at_average, "predict")
    test_on_batch = partialmethod(_at_average, "test_on_batch")
    predict_on_batch = partialmethod(_at_average, "predict_on_batch")
    get_weights = partialmethod(_at_average, "get_weights")  # called by EarlyStopping
    set_weights = partialmethod(_at_average, "set_weights")
    save = partialmethod(_at_average, "save")
    save_weights = partialmethod(_at_average, "save_weights")

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Call Keras's `fit`, and leave the average in the model."""
        try:
            return super().fit(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.swap_in_average()

    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.jit_compile:
            raise ValueError("jit_compile=True cannot compile two evaluations: leave it out")
        return super().make_train_function(force)  # type: ignore[misc]

    def train_step(self: Any, data: Any) -> Any:
        """Take one batch: one gradient for `Untuned` and on the first batch, else two."""
        if not isinstance(self.optimizer, StormPlusOptimizer):
            raise TypeError(
                "StormPlusModelMixin needs compile(optimizer=StormPlusOptimizer(...)), got "
                f"{type(self.optimizer).__name__}. For a LossScaleOptimizer, replace the dtype "
                "policy mixed_float16 by mixed_bfloat16"
            )
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        first: list[Any] = []

        def closure() -> Any:
            self.zero_grad()
            y_pred = self(x, training=True) if self._call_has_training_arg else self(x)
            loss = self.compute_loss(x, y, y_pred, sample_weight, training=True)
            loss.backward()
            if not first:
                first.extend((y_pred, loss.detach()))
            return loss

        if not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        opt, evaluate = self.optimizer.torch_optimizer, closure
        if isinstance(opt, PairedOptimizer):
            evaluate = same_sample(opt, _statistics(self))(closure)
        self.optimizer.step(evaluate, self.trainable_variables)
        y_pred, loss = first
        size = next(part.shape[0] for part in keras.tree.flatten(x) if part is not None)
        self._loss_tracker.update_state(loss, sample_weight=size)
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _statistics(model: Any) -> nn.Module:
    """Return a module whose buffers are all the variables that an evaluation changes."""
    variables = nn.Module()
    seed = global_seed_generator().state  # for random numbers drawn without a SeedGenerator
    for i, variable in enumerate((*model.non_trainable_variables, seed)):
        variables.register_buffer(f"variable_{i}", variable.value)
    return nn.ModuleList([model, variables])
