"""A training process killed with SIGKILL, again and again, ends where it would have."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.torch.optimizers import assert_same

SCRIPT = Path(__file__).parents[2] / "examples" / "checkpoint.py"


def start(folder, samples):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--out", str(folder), "--samples", str(samples)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(folder, samples):
    """Train to the end, from where the run stands; return the state there."""
    process = start(folder, samples)
    assert "training loss" in process.communicate()[0]
    assert process.returncode == 0
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.mark.long
def test_killed_runs_end_bit_identical(tmp_path):
    rng = random.Random(0)
    for _ in range(10):
        process = start(tmp_path / "killed", 1000)
        assert "starting from" in process.stdout.readline()  # it trains now
        time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run must be long enough to be killed"
    assert_same(finished(tmp_path / "killed", 1000), finished(tmp_path / "whole", 1000))
