"""The examples run, and what they print is what they claim."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"


def numbers(name):
    """What the example prints, as {words: number}."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pairs = re.findall(r"([a-z][a-z ]*?):? (\d+(?:\.\d+)?)", done.stdout)
    return {words.strip(): float(number) for words, number in pairs}


def test_scan_with_dropout():
    printed = numbers("jax_scan_dropout.py")
    assert printed["steps"] == printed["uniform iterate of"] == 600
    assert printed["moves"] == 599
    assert printed["skipped"] == 0
    assert printed["train accuracy"] > 0.97
    assert printed["test"] > 0.75  # the last one printed: the uniform iterate's


def test_flax_nnx():
    pytest.importorskip("flax")
    printed = numbers("jax_flax_nnx.py")
    assert printed["steps"] == 300
    assert printed["accuracy"] > 0.95


def test_equinox():
    pytest.importorskip("equinox")
    printed = numbers("jax_equinox.py")
    assert printed["steps"] == 300
    assert printed["accuracy"] > 0.95


@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_untuned_trains_averages_and_resumes(library):
    pytest.importorskip("flax" if library == "nnx" else library)
    pytest.importorskip("orbax.checkpoint")
    printed = numbers(f"untuned_jax_{library}.py")
    assert printed["steps"] == 300
    assert printed["accuracy"] > 0.97
