"""Which command installs a missing part."""

from __future__ import annotations


def how_to(extra: str) -> str:
    """Return the command that installs an extra: in a clone, or from the package index."""
    return f"pip install '.[{extra}]' in a clone, or pip install 'stormplus[{extra}]'"


BENCH = "pip install ./benchmark in a clone, or pip install stormplus-bench"
