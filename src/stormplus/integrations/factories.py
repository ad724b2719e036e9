"""The optimizers by name, in the factories of timm and of pytorch_optimizer.

    register_timm()
    opt = timm.optim.create_optimizer_v2(model, "stormplus", lr=1.0)

    register_pytorch_optimizer()
    opt = pytorch_optimizer.create_optimizer(model, "stormplus", lr=1.0)

Both factories can wrap an optimizer in Lookahead, which moves the parameters behind its back
every few steps; those registered here that take two gradients a step refuse to step inside one.
"""

from __future__ import annotations

from typing import Any

from stormplus.torch import SimplifiedStormPlus, Storm, StormPlus, Untuned

_LOOKAHEAD = {"lookahead_alpha", "counter"}  # what timm's and pytorch_optimizer's put in a group


def _refuse_lookahead(opt: Any, args: Any, kwargs: Any) -> None:
    """A step pre-hook."""
    if takes_pairs(opt) and any(_LOOKAHEAD & group.keys() for group in opt.param_groups):
        raise RuntimeError(
            "Lookahead pulls the parameters back every few steps, and the estimator then belongs "
            "to a point that was left: create the optimizer without it"
        )


class _Alone:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self, StormOptimizer)
        self.register_step_pre_hook(_refuse_lookahead)


class FactoryStormPlus(_Alone, StormPlus):
    """`StormPlus`, registered as "stormplus"."""


class FactorySimplifiedStormPlus(_Alone, SimplifiedStormPlus):
    """`SimplifiedStormPlus`, registered as "simplifiedstormplus"."""


class FactoryStorm(_Alone, Storm):
    """`Storm`, registered as "storm"."""


class FactoryUntuned(_Alone, Untuned):
    """`Untuned`, registered as "untuned"; `step()` needs no closure."""


# Without underscores, which timm takes for the sign of a wrapper.
OPTIMIZERS: dict[str, tuple[type[StormOptimizer], str]] = {
    "stormplus": (FactoryStormPlus, "STORM+: corrected momentum, no constants to set"),
    "simplifiedstormplus": (
        FactorySimplifiedStormPlus,
        "Simplified STORM+: STORM+ with the gain t^(-2/3)",
    ),
    "storm": (FactoryStorm, "STORM: corrected momentum, needs the smoothness"),
    "untuned": (
        FactoryUntuned,
        "STORM+ in measured units: one gradient a step, no learning rate to find",
    ),
}


def register_timm() -> None:
    """Let `timm.optim.create_optimizer_v2` and `list_optimizers` know the optimizers."""
    try:
        from timm.optim._optim_factory import OptimInfo, default_registry
    except ModuleNotFoundError as error:  # of timm, or of torchvision, which its models import
        raise ModuleNotFoundError(
            f"timm cannot be imported ({error}): pip install 'stormplus[timm]'"
        ) from error

    known = default_registry.list_optimizers()
    for name, (kind, description) in OPTIMIZERS.items():
        if name not in known:  # timm would warn
            default_registry.register(
                OptimInfo(name=name, opt_class=kind, description=description, has_eps=False)
            )


def register_pytorch_optimizer() -> None:
    """Let `pytorch_optimizer.create_optimizer` and `load_optimizer` know the optimizers."""
    try:
        from pytorch_optimizer.optimizer import OPTIMIZERS as registry
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this function needs pytorch_optimizer: pip install 'stormplus[pytorch-optimizer]'"
        ) from error

    for name, (kind, _) in OPTIMIZERS.items():
        registry.setdefault(name, kind)
