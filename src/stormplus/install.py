"""What to type for a part that is missing."""

from __future__ import annotations


def how_to(extra: str) -> str:
    """Both ways: from the package index, and from a clone until the name is there."""
    return f"pip install 'stormplus[{extra}]' (from a clone: pip install '.[{extra}]')"


BENCH = "pip install stormplus-bench (from a clone: pip install ./benchmark)"
