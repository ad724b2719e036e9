"""The commands that install optional packages, for error messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def how_to(extra: str) -> str:
    """Return the command that installs an extra: in a clone, or from the package index."""
    return f"pip install '.[{extra}]' in a clone, or pip install 'stormplus[{extra}]'"


@contextmanager
def required(extra: str) -> Iterator[None]:
    """Name the extra to install if an import inside the context fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: {how_to(extra)}") from error


BENCH = "pip install ./benchmark in a clone, or pip install stormplus-bench"
