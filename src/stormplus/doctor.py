"""`stormplus doctor`: what is installed, what is missing, and how to get it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

from stormplus.install import BENCH, how_to

_EXTRAS = {
    "numpy": "pip install numpy",
    "scipy": "pip install scipy",
    "torch": how_to("torch"),
    "jax": how_to("jax"),
    "optax": how_to("jax"),
    "stormplus-bench": BENCH,
}


def _version(name: str, install: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed: {install}"


def _native() -> str:
    try:
        from stormplus.torch.core import kernels
    except ModuleNotFoundError:
        return "need torch"
    if kernels.NATIVE is not None:
        return "there: optimizers on the CPU use them by default"
    return (
        "missing, everything works without them, slower: with a C compiler (cc, gcc or clang), "
        "pip install --force-reinstall --no-deps stormplus (from a clone: pip install -e .)"
    )


@click.command()
def doctor() -> None:
    """What is installed, what is missing, and how to get it."""
    lines = {"stormplus": _version("stormplus", ""), "python": platform.python_version()}
    lines |= {name: _version(name, install) for name, install in _EXTRAS.items()}
    lines["native passes"] = _native()
    for name, text in lines.items():
        click.echo(f"{name:16s} {text}")
