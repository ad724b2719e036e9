"""Each example does what it promises."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *args):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, args)],
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip


def test_batchnorm_counts_each_sample_once():
    out = run("batchnorm.py", "--samples", 40)
    assert "40 samples, running statistics moved 40 times" in out


def test_mixed_precision_survives_overflow():
    out = run("mixed_precision.py", "--samples", 60)
    dropped = int(re.search(r"(\d+) dropped", out)[1])
    assert 1 <= dropped < 15
    assert float(re.search(r"accuracy ([\d.]+)", out)[1]) > 0.8


def test_accumulation_covers_all_micro_batches_twice():
    out = run("accumulation.py", "--samples", 30)
    assert f"{4 * (2 * 30 - 1)} backward passes" in out
    assert float(re.search(r"accuracy ([\d.]+)", out)[1]) > 0.7


def test_compiled_model_and_kernels():
    out = run("compiled.py", "--samples", 40)
    assert "40 samples, 79 evaluations" in out
    assert float(re.search(r"accuracy ([\d.]+)", out)[1]) > 0.7


def test_checkpoint_resumes(tmp_path):
    whole = run("checkpoint.py", "--samples", 12, "--out", tmp_path / "a")
    run("checkpoint.py", "--samples", 12, "--out", tmp_path / "b")
    again = run("checkpoint.py", "--samples", 12, "--out", tmp_path / "b")
    assert "starting from sample 12" in again
    assert whole.splitlines()[-1] == again.splitlines()[-1]
