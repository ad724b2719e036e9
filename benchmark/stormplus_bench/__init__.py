"""The benchmark of stormplus: run, store, score and report.

benchopt runs the folder `benchmark_stormplus/`, which imports this package. `compare` compares
optimizers from Python.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stormplus_bench.comparison import Comparison as Comparison
    from stormplus_bench.comparison import compare as compare

__version__ = "0.1.0"
__all__ = ["Comparison", "compare"]


def __getattr__(name: str) -> Any:
    """Load on first use: the rest of this package needs no torch."""
    if name in __all__:
        from stormplus_bench import comparison

        return getattr(comparison, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
