"""`stormplus doctor` says what is there, and how to get what is not."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from click.testing import CliRunner

from stormplus import cli, doctor
from stormplus.torch.core import kernels


def said():
    done = CliRunner().invoke(cli.main, ["doctor"])
    assert done.exit_code == 0, done.output
    return dict(line.split(maxsplit=1) for line in done.output.splitlines())


def test_what_is_installed_has_its_version():
    import numpy
    import torch

    assert said()["numpy"] == numpy.__version__
    assert said()["torch"] == torch.__version__


def test_what_is_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(doctor._EXTRAS, "no-such-package", "pip install it")
    monkeypatch.setattr(kernels, "NATIVE", None)
    assert said()["no-such-package"] == "not installed: pip install it"
    assert "missing" in said()["native"]
    assert "C compiler" in said()["native"]


def test_it_runs_with_nothing_but_what_the_package_always_brings():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    brought = {re.split(r"[<>=~!]", line)[0] for line in project["dependencies"]}
    optional = {"click", "torch", "jax", "optax", "matplotlib", "rich", "sklearn"} - brought
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({sorted(optional)}))\n"
        "from stormplus.cli import main\nmain(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search("native passes +need torch", done.stdout)
