"""STORM+: SGD with corrected momentum that sets its own step size and momentum.

The names below load on first use, so `import stormplus` imports no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stormplus.reference import minimize as minimize
    from stormplus.torch import SimplifiedStormPlus as SimplifiedStormPlus
    from stormplus.torch import Storm as Storm
    from stormplus.torch import StormPlus as StormPlus
    from stormplus.torch import UniformIterate as UniformIterate
    from stormplus.torch import Untuned as Untuned
    from stormplus.torch import pair_lock as pair_lock
    from stormplus.torch import recalibrate as recalibrate
    from stormplus.torch import same_sample as same_sample
    from stormplus.torch import scaled_step as scaled_step
    from stormplus.torch import verify_closure as verify_closure

__version__ = "0.1.0"

_HOME = {
    "minimize": "stormplus.reference",
    "StormPlus": "stormplus.torch",
    "Untuned": "stormplus.torch",
    "SimplifiedStormPlus": "stormplus.torch",
    "Storm": "stormplus.torch",
    "UniformIterate": "stormplus.torch",
    "pair_lock": "stormplus.torch",
    "recalibrate": "stormplus.torch",
    "same_sample": "stormplus.torch",
    "scaled_step": "stormplus.torch",
    "verify_closure": "stormplus.torch",
}

__all__ = [
    "SimplifiedStormPlus",
    "Storm",
    "StormPlus",
    "UniformIterate",
    "Untuned",
    "minimize",
    "pair_lock",
    "recalibrate",
    "same_sample",
    "scaled_step",
    "verify_closure",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stormplus' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
