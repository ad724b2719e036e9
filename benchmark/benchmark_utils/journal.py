"""A run as one line of the journal (`stormplus.bench.rows`)."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "stormplus",
    "torch",
    "numpy",
    "benchopt",
    "schedulefree",
    "prodigyopt",
    "dog-optimizer",
    "dadaptation",
    "mechanic-pytorch",
)


def run_line(workload: Any, training: Any, run: dict[str, Any], seed: int) -> dict[str, Any]:
    return {
        "workload": workload.name,
        **run,
        "seed": seed,
        "status": training.status,
        "budget": workload.budget,
        "batch_size": workload.batch_size,
        "measured": workload.measured,
        "peak_memory_mb": round(training.peak_memory_mb, 1),
        "state_mb": round(training.stepper.state_mb, 4),
        "curve": {
            name: [_short(value) for value in values] for name, values in training.curve.items()
        },
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "machine": machine(workload.device),
    }


def _short(value: float) -> float | int | None:
    if not isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine(device: str = "cpu") -> str:
    """Processor, accelerator if it is used, and operating system; no name of the host."""
    info = Path("/proc/cpuinfo")
    processor = platform.processor() or platform.machine()
    if info.exists():
        models = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        processor = models[0].split(":", 1)[1].strip() if models else processor
    if device == "cuda":
        processor += f", {torch.cuda.get_device_name()}"
    return f"{processor}, {platform.system()}, Python {platform.python_version()}"
