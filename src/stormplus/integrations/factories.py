"""The optimizers by name, for timm, pytorch_optimizer and scripts that import a class by name."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim import Optimizer

from stormplus.install import required
from stormplus.integrations.untuned import ignore_lr
from stormplus.torch import SimplifiedStormPlus, Storm, StormPlus, Untuned

_IGNORED = {"betas", "eps", "foreach", "fused", "warmup_steps", "r", "weight_lr_power"}


class UntunedScheduleFree(Optimizer):
    """Makes an `Untuned` from what tools pass to every optimizer.

    Learning rates, of groups too, and options of Adam and Schedule-Free are ignored with a warning;
    strings are converted. Only for names that end in "ScheduleFree" do kohya's scripts call
    `optimizer.eval()` and leave the scheduler out. It is a class because the factories require one.
    """

    def __new__(cls, params: Any, lr: Any = None, **options: Any) -> Untuned:  # type: ignore[misc]
        """Return an `Untuned`."""
        params, rates = list(params), [lr]
        for i, group in enumerate(params):
            if isinstance(group, dict) and "lr" in group:
                params[i] = {key: value for key, value in group.items() if key != "lr"}
                rates.append(group["lr"])
        ignore_lr(next((rate for rate in rates if rate is not None and float(rate) != 1), None))
        ignored = sorted(_IGNORED & options.keys())
        if ignored:
            warnings.warn(f"Untuned has no {', '.join(ignored)}: leave them out", stacklevel=2)
        options = {key: value for key, value in options.items() if key not in _IGNORED}
        return Untuned(params, **{key: _parse(value) for key, value in options.items()})


def _parse(value: Any) -> Any:
    """Convert "0.01", "True" and "bfloat16"; return anything that is not a string unchanged."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[value.lower()]
    dtype = getattr(torch, value.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else float(value)


# Without underscores, which timm takes for the sign of a wrapper.
OPTIMIZERS: dict[str, tuple[type[Optimizer], str]] = {
    "stormplus": (StormPlus, "STORM+: corrected momentum, no constants to set"),
    "simplifiedstormplus": (SimplifiedStormPlus, "STORM+ with the gain t^(-2/3)"),
    "storm": (Storm, "STORM: corrected momentum, needs the smoothness"),
    "untuned": (UntunedScheduleFree, "one gradient per step, an average, no learning rate"),
}


def register_timm() -> None:
    """Add the optimizers to the registry of `timm.optim.create_optimizer_v2`."""
    with required("timm"):  # and torchvision, which its models import
        from timm.optim._optim_factory import OptimInfo, default_registry

    known = default_registry.list_optimizers()
    for name, (kind, description) in OPTIMIZERS.items():
        if name not in known:  # timm would warn
            info = OptimInfo(name=name, opt_class=kind, description=description, has_eps=False)
            default_registry.register(info)


def register_pytorch_optimizer() -> None:
    """Add the optimizers to the registry of `pytorch_optimizer.create_optimizer`."""
    with required("pytorch-optimizer"):
        from pytorch_optimizer.optimizer import OPTIMIZERS as registry

    for name, (kind, _) in OPTIMIZERS.items():
        registry.setdefault(name, kind)
