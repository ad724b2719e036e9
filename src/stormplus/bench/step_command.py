"""`stormplus bench-step`: what the optimizer itself costs."""

from __future__ import annotations

import subprocess
import sys

import click

from stormplus.bench.plan import benchmark_folder


@click.command(name="bench-step")
@click.option("--quick", is_flag=True, help="Fewer rounds.")
@click.option("--profile", is_flag=True, help="Where the time of a step goes, by operation.")
def bench_step(quick: bool, profile: bool) -> None:
    """Time a step of STORM+ against Adam and SGD, gradients excluded; print ratios."""
    flags = [name for name, given in (("--quick", quick), ("--profile", profile)) if given]
    script = benchmark_folder() / "bench_step.py"
    raise SystemExit(subprocess.run([sys.executable, str(script), *flags], check=False).returncode)
