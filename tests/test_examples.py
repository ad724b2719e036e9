"""Each example does what it promises, and the notebooks run."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.pages import ROOT
from tests.support.pages import run_example as run
from tests.torch.optimizers import assert_same

pytestmark = pytest.mark.long


def number(pattern, out):
    return float(re.search(pattern, out)[1])


@pytest.mark.parametrize(
    ("name", "options", "data", "spent", "bounds"),
    [
        # Lower bounds on accuracies (a guess has 0.1), upper ones on losses of letters: a guess has
        # 3.7 for 39 letters and 4.17 for 65.
        ("image_classifier.py", (), None, 300, {"STORM+": 0.85, "Adam": 0.9}),
        ("image_classifier.py", ("--data", "mnist"), "mnist", 40, {"STORM+": 0.3}),
        ("char_gpt.py", ("--letters", 40), None, 120, {"STORM+": -3.2, "AdamW": -3.0}),
        ("char_gpt.py", ("--letters", 20), "tinyshakespeare", 60, {"STORM+": -3.9}),
    ],
    ids=["digits", "mnist", "built-in text", "shakespeare"],
)
def test_methods_are_compared_at_equal_evaluations(name, options, data, spent, bounds):
    folder = os.environ.get("STORMPLUS_DATA", "")
    if data is not None and not (folder and (Path(folder) / data).exists()):
        pytest.skip(f"set STORMPLUS_DATA to a folder with {data}")
    out = run(name, "--evaluations", spent, *options, data=data and folder)
    tables = out.split("\nevaluations")[1:]
    last = [int(re.findall(r"^ +(\d+)  +[\d.]+", table, re.MULTILINE)[-1]) for table in tables]
    assert last == [spent + 1, spent]  # pairs: an odd number
    line = out.rstrip().splitlines()[-1]
    assert line.startswith("at equal gradient evaluations:")
    reached = {method: float(value) for method, value in re.findall(r"(\S+) ([\d.]+)(?= |$)", line)}
    for method, bound in bounds.items():
        assert reached[method] > bound if bound > 0 else reached[method] < -bound


def test_image_classifier_says_where_mnist_should_be(tmp_path):
    with pytest.raises(AssertionError, match=r"no MNIST in .*: set STORMPLUS_DATA"):
        run("image_classifier.py", "--data", "mnist", data=tmp_path)


@pytest.mark.parametrize(
    ("options", "error"),
    [(("--image", "digit", "--samples", 1200), 1e-5), (("--samples", 12_000), 0.01)],
    ids=["digit", "photograph"],
)
def test_phase_retrieval_recovers_the_image_and_draws_it(options, error, tmp_path):
    out = run("phase_retrieval.py", *options, "--out", tmp_path)
    assert number(r"final error (\S+)", out) < error
    assert (tmp_path / "phase_retrieval.png").read_bytes().startswith(b"\x89PNG")


def test_matrix_completion_is_ordered_as_it_must_be():
    out = run("matrix_completion.py", "--ranks", 2, "--samples", 4000)
    cells = re.findall(r"│ ([^│]+?) +│ +([\d.]+) │", out)
    rmse = {name.strip(): float(value) for name, value in cells}
    best, als = rmse["best, nothing hidden"], rmse["alternating least squares"]
    storm, means = rmse["STORM+, 4000 samples"], rmse["row and column means"]
    assert best < als < means < rmse["mean of the seen pixels"]
    assert best < storm < min(means, 1.1 * als)


def test_your_model_side_by_side(tmp_path):
    pytest.importorskip("schedulefree")
    out = run("your_model.py", "--evaluations", 60, "--seeds", 1, "--out", tmp_path)
    losses = dict(re.findall(r"^(\S+) +([\d.]+) ", out, re.MULTILINE))
    assert set(losses) == {"Adam", "Schedule-Free", "Untuned", "STORM+"}
    assert max(map(float, losses.values())) < 2.3  # a guess
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


NEEDS = {
    "jax_scan_dropout.py": ["optax"],
    "jax_flax_nnx.py": ["optax", "flax"],
    "jax_equinox.py": ["optax", "equinox"],
    "untuned_jax_nnx.py": ["optax", "flax", "orbax.checkpoint"],
    "untuned_jax_equinox.py": ["optax", "equinox", "orbax.checkpoint"],
}


@pytest.mark.parametrize(
    ("name", "options", "said", "accuracy"),
    [
        ("batchnorm.py", ("--samples", 40), "40 samples, running statistics moved 40 times", None),
        ("mixed_precision.py", ("--samples", 60), r"\b([1-9]|1[0-4]) dropped", 0.8),
        ("accumulation.py", ("--samples", 30), "236 backward passes", 0.7),  # 4 (2 * 30 - 1)
        ("compiled.py", ("--samples", 40), "40 samples, 79 evaluations", 0.7),
        ("compiled.py", ("--samples", 40, "--untuned"), "40 samples, 40 evaluations", 0.7),
        ("untuned_plain.py", ("--epochs", 3), "132 steps, 132 gradients", 0.85),
        (
            "jax_scan_dropout.py",
            (),
            r"moves 599, skipped 0\n.*\ntrain accuracy (0\.9[789]|1).*\nuniform iterate of 600",
            0.75,
        ),
        ("jax_flax_nnx.py", (), "steps 300", 0.95),
        ("jax_equinox.py", (), "steps 300", 0.95),
        ("untuned_jax_nnx.py", (), "steps 300", 0.97),  # also resumes
        ("untuned_jax_equinox.py", (), "steps 300", 0.97),
    ],
)
def test_training_loop(name, options, said, accuracy, monkeypatch):
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    if name in NEEDS:
        monkeypatch.setenv("PYTHONWARNINGS", "error")
    out = run(name, *options)
    assert re.search(said, out)
    if accuracy is not None:
        last = out.rstrip().splitlines()[-1]
        assert float(re.findall(r"\d\.\d+", last)[-1]) > accuracy


def test_a_run_that_is_killed_again_and_again_ends_bit_identical(tmp_path):
    rng, options = random.Random(0), ("--samples", "1000", "--out")
    command = [sys.executable, str(ROOT / "examples" / "checkpoint.py"), *options]
    for _ in range(10):
        process = subprocess.Popen(
            [*command, str(tmp_path / "killed")], stdout=subprocess.PIPE, text=True
        )
        assert "starting from" in process.stdout.readline()  # it trains now
        time.sleep(rng.uniform(0.0, 0.15))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run must be long enough to be killed"
    ends = []
    for name in ("killed", "whole"):
        assert "training loss" in run("checkpoint.py", *options, tmp_path / name)
        ends.append(torch.load(tmp_path / name / "checkpoint.pt", weights_only=True))
    assert_same(*ends)


@pytest.mark.parametrize("name", ["story.ipynb", "untuned.ipynb"])
def test_notebook_prints_what_is_stored_in_it(name):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    stored = printed(notebook)
    nbclient.NotebookClient(notebook, timeout=600).execute()
    now = printed(notebook)
    assert re.sub(r"[\d.e+-]+", "#", stored) == re.sub(r"[\d.e+-]+", "#", now)
    if name == "story.ipynb":
        assert "9999 evaluations" in now  # 5,000 samples, two gradients each but the first
        assert number(r"from stormplus.minimize: (\S+)", now) < 1e-12
        assert number(r"from the reference: (\S+)", now) < 1e-12
        outside, inside = (float(v) for v in re.findall(r"error of the estimator (\S+)", now))
        assert inside > 10 * outside
    else:
        assert number(r"validation accuracy ([\d.]+)", now) > 0.95
        assert max(map(float, re.findall(r"relative difference (\S+)", now))) < 1e-9
        assert "restores the iterate exactly: True" in now


def printed(notebook):
    return "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
