"""A training process killed with SIGKILL, again and again, ends where it would have."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from optimizers import assert_same

SCRIPT = Path(__file__).parents[2] / "examples" / "checkpoint.py"


def start(folder, samples):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--out", str(folder), "--samples", str(samples)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def final_state(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def killed_and_resumed(folder, samples, kills, rng):
    """Kill the run `kills` times while it trains; return how often a pair was pending."""
    pending = done = 0
    while done < kills:
        process = start(folder, samples)
        assert "starting from" in process.stdout.readline()  # it trains now
        time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        out = process.communicate()[0]
        if process.returncode == -signal.SIGKILL:
            done += 1
        else:  # it had finished: the kill came too late
            assert "training loss" in out
            break
        if (folder / "checkpoint.pt").exists():
            saved = final_state(folder)
            assert saved["taken"] < samples
            pending += any(
                s.get("scalars", {}).get("phase") == 2 for s in saved["opt"]["state"].values()
            )
    process = start(folder, samples)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert "training loss" in out
    return done, pending


@pytest.mark.long
def test_killed_runs_end_bit_identical(tmp_path):
    kills, samples = 20, 1000
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = start(whole, samples)
    process.communicate()
    assert process.returncode == 0
    done, pending = killed_and_resumed(broken, samples, kills, random.Random(0))
    assert done == kills, "the run must be long enough to be killed that often"
    assert_same(final_state(whole), final_state(broken))
    assert pending > 0  # some of them fell between the two evaluations
