"""The optimizers by name, in the factories of timm and of pytorch_optimizer.

    register_timm()
    opt = timm.optim.create_optimizer_v2(model, "stormplus", lr=1.0)

    register_pytorch_optimizer()
    opt = pytorch_optimizer.create_optimizer(model, "stormplus", lr=1.0)

Both factories can wrap an optimizer in Lookahead, which moves the parameters behind its back
every few steps. Once one of the two functions has been called, an optimizer that takes two
gradients a step refuses to step inside a Lookahead. The factories' learning rate is not for
"untuned", which ignores it with a warning.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from stormplus.install import how_to
from stormplus.integrations.untuned import ignore_lr
from stormplus.torch import (
    PairedOptimizer,
    SimplifiedStormPlus,
    Storm,
    StormPlus,
    Untuned,
)


class UntunedByName(Optimizer):
    """`Untuned`, for factories that pass a learning rate to whatever they make.

    A class, for they look whether it is one; what it makes is an `Untuned`.
    """

    def __new__(cls, params: Any, lr: Any = None, **options: Any) -> Untuned:  # type: ignore[misc]
        """Make an `Untuned`, and warn if a learning rate is ignored."""
        ignore_lr(lr)
        return Untuned(params, **options)


# Without underscores, which timm takes for the sign of a wrapper.
OPTIMIZERS: dict[str, tuple[type[Optimizer], str]] = {
    "stormplus": (StormPlus, "STORM+: corrected momentum, no constants to set"),
    "simplifiedstormplus": (
        SimplifiedStormPlus,
        "Simplified STORM+: STORM+ with the gain t^(-2/3)",
    ),
    "storm": (Storm, "STORM: corrected momentum, needs the smoothness"),
    "untuned": (
        UntunedByName,
        "DoG's distance, RMSprop's unit and an average: one gradient a step, no lr to find",
    ),
}

_LOOKAHEAD = {"lookahead_alpha", "counter"}  # what timm's and pytorch_optimizer's put in a group


def register_timm() -> None:
    """Let `timm.optim.create_optimizer_v2` and `list_optimizers` know the optimizers."""
    try:
        from timm.optim._optim_factory import OptimInfo, default_registry
    except ModuleNotFoundError as error:  # of timm, or of torchvision, which its models import
        raise ModuleNotFoundError(f"timm cannot be imported ({error}): {how_to('timm')}") from error

    known = default_registry.list_optimizers()
    for name, (kind, description) in OPTIMIZERS.items():
        if name not in known:  # timm would warn
            default_registry.register(
                OptimInfo(name=name, opt_class=kind, description=description, has_eps=False)
            )
    _watch_for_lookahead()


def register_pytorch_optimizer() -> None:
    """Let `pytorch_optimizer.create_optimizer` and `load_optimizer` know the optimizers."""
    try:
        from pytorch_optimizer.optimizer import OPTIMIZERS as registry
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this function needs pytorch_optimizer: {how_to('pytorch-optimizer')}"
        ) from error

    for name, (kind, _) in OPTIMIZERS.items():
        registry.setdefault(name, kind)
    _watch_for_lookahead()


@cache  # once
def _watch_for_lookahead() -> None:
    """Look at every optimizer: the factories want classes, and have no place for a hook."""
    register_optimizer_step_pre_hook(_refuse_lookahead)


def _refuse_lookahead(opt: Any, args: Any, kwargs: Any) -> None:
    """A step pre-hook of torch."""
    if isinstance(opt, PairedOptimizer) and any(_LOOKAHEAD & g.keys() for g in opt.param_groups):
        raise RuntimeError(
            "Lookahead pulls the parameters back every few steps, and the estimator then belongs "
            "to a point that was left: create the optimizer without it"
        )
