"""STORM+: SGD with corrected momentum that sets its own step size and momentum.

The names below load on first use, so `import stormplus` imports no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stormplus.reference import minimize
    from stormplus.torch import (
        SimplifiedStormPlus,
        Storm,
        StormPlus,
        UniformIterate,
        Untuned,
        pair_lock,
        recalibrate,
        same_sample,
        scaled_step,
        verify_closure,
    )

__version__ = "0.1.0"

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

_MODULES = dict.fromkeys(__all__, "stormplus.torch") | {"minimize": "stormplus.reference"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'stormplus' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
