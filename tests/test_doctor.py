"""`stormplus doctor` says what is there, and how to get what is not."""

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
