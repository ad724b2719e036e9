"""The benchmark of stormplus: what runs, stores, scores, draws and reports it.

`benchmark_stormplus/` is the folder that benchopt runs. It imports this package; this package
only names its path. `compare` sets optimizers of one's own side by side, on a model of one's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stormplus_bench.own import Comparison as Comparison
    from stormplus_bench.own import compare as compare

__version__ = "0.1.0"
__all__ = ["Comparison", "compare"]


def __getattr__(name: str) -> Any:
    """Loaded when they are asked for: the rest of this package needs no torch."""
    if name in __all__:
        from stormplus_bench import own

        return getattr(own, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
