"""`python -m stormplus.doctor`: print what is installed; with `--device cuda`, check a device."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from stormplus.install import BENCH, how_to

_EXTRAS = {
    "numpy": "pip install numpy",
    "scipy": "pip install scipy",
    "torch": how_to("torch"),
    "triton": "comes with torch for CUDA, ROCm and XPU",
    "jax": how_to("jax"),
    "optax": how_to("jax"),
    "stormplus-bench": BENCH,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 1 if a check fails, 2 without the device."""
    parser = argparse.ArgumentParser(
        prog="python -m stormplus.doctor",
        description="Print what is installed and what is missing, or check a device.",
    )
    parser.add_argument(
        "--device",
        help="check the optimizers on this device of torch (cuda, xpu, mps, cpu): parity with the "
        "CPU, launches, syncs, and time next to Adam",
    )
    device = parser.parse_args(arguments).device
    if device is None:
        print("\n".join(installed()))
        return 0
    try:
        from stormplus.device_check import NoDeviceError, check_device
    except ModuleNotFoundError as error:  # it says how to install torch
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return 0 if check_device(device) else 1
    except NoDeviceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def installed() -> list[str]:
    """Return a line per package: its version, or how to install it."""
    lines = {"stormplus": _version("stormplus", ""), "python": platform.python_version()}
    lines |= {name: _version(name, install) for name, install in _EXTRAS.items()}
    lines["native passes"] = _native()
    return [f"{name:16s} {text}" for name, text in lines.items()]


def _version(name: str, install: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed: {install}"


def _native() -> str:
    try:
        from stormplus.torch.kernels import native
    except ModuleNotFoundError:
        return "need torch"
    if native.LIBRARY is not None:
        return "found: optimizers on CPUs use them by default"
    return (
        "not built, so steps on CPUs are slower: with a C compiler (cc, gcc or clang), "
        "pip install --force-reinstall --no-deps . in a clone"
    )


if __name__ == "__main__":
    sys.exit(main())
