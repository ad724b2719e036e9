"""What `StormPlusCallback` refuses, and why."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn


def storm_optimizers(trainer: Trainer) -> list[StormOptimizer]:
    found: list[Any] = [opt for opt in trainer.optimizers if takes_pairs(opt)]
    if not found:
        names = ", ".join(type(opt).__name__ for opt in trainer.optimizers) or "nothing"
        raise TypeError(
            f"StormPlusCallback is for StormPlus, SimplifiedStormPlus and Storm, got {names}: "
            "return one of them from configure_optimizers, or leave the callback out, which one "
            "gradient a step does not need"
        )
    return found


def refuse_the_other_package(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        kind = type(trainer)
        raise TypeError(
            f"the trainer is a {kind.__module__.split('.')[0]}.{kind.__qualname__}, and "
            "StormPlusCallback works with that of the package lightning: import Trainer, "
            "LightningModule and callbacks from lightning.pytorch, not from pytorch_lightning"
        )


def check(trainer: Any, pl_module: LightningModule) -> None:
    plugin, strategy = trainer.precision_plugin, trainer.strategy
    passes_closure = (Precision.optimizer_step, MixedPrecision.optimizer_step)
    if type(plugin).optimizer_step not in passes_closure:
        raise TypeError(
            f"the precision plugin {type(plugin).__name__} steps in its own way, without our "
            'closure: use precision="32-true", "64-true", "bf16-mixed" or "16-mixed"'
        )
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise TypeError(
            f"the strategy {type(strategy).__name__} has not been verified: use one device or "
            'strategy="ddp", or FSDP2 in a loop of your own (docs/many-machines.md)'
        )
    if getattr(strategy, "_model_averager", None) is not None:
        raise ValueError("model averaging moves the parameters behind the optimizer's back")
    if any(isinstance(other, StochasticWeightAveraging) for other in trainer.callbacks):
        raise ValueError(
            "StochasticWeightAveraging ends with an epoch of steps without gradients: average "
            "with EMAWeightAveraging, or with stormplus.UniformIterate"
        )
    if pl_module.automatic_optimization and is_param_in_hook_signature(
        pl_module.training_step, "dataloader_iter", explicit=True
    ):
        raise TypeError(
            "training_step(self, dataloader_iter) draws another batch each time it is called, so "
            "that the two gradients of a sample would be of two samples: take (self, batch, "
            "batch_idx), or use manual optimization with one draw before the closure"
        )
    if getattr(plugin, "scaler", None) is not None and not pl_module.automatic_optimization:
        raise ValueError(
            "with manual optimization and 16-mixed Lightning steps without the closure: use "
            "bf16-mixed, or automatic optimization"
        )
    if trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", pl_module):
        rank_zero_warn(
            "gradient clipping shortens the two gradients of a sample separately, so that their "
            "difference is no longer the change of one gradient. To bound the move instead: "
            "StormPlus(..., max_move=0.1)"
        )


def refuse_missing_closure(opt: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Lightning puts an empty closure where there is none, inside a partial of its own.
    if getattr(kwargs.get("closure"), "args", [None])[-1] is do_nothing_closure:
        raise TypeError(
            "opt.step() was called without a closure, which Lightning replaces by an empty one: "
            "opt.step(same_sample(opt.optimizer, self)(closure)), where the closure calls "
            "opt.zero_grad(), computes the loss, calls self.manual_backward(loss), returns it"
        )
