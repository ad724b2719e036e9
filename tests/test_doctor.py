"""`python -m stormplus.doctor`: what is installed, and the check of a device."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stormplus import Untuned, device_check, doctor
from stormplus.device_check import Counts, Parity, check_device
from stormplus.torch.kernels import native
from stormplus_bench.simulated_device import SimulatedDevice
from tests.support.pages import run_python

SMALL = [(16, 8), (16,), (4, 16), (4,)]


def test_what_is_installed_and_how_to_install_the_rest(monkeypatch, capsys):
    monkeypatch.setitem(doctor._EXTRAS, "no-such-package", "pip install it")
    monkeypatch.setattr(native, "LIBRARY", None)
    assert doctor.main([]) == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (found["numpy"], found["torch"]) == (np.__version__, torch.__version__)
    assert found["no-such-package"] == "not installed: pip install it"
    assert "C compiler" in found["native"]


def test_the_module_needs_numpy_alone():
    hidden = dict.fromkeys(["click", "torch", "jax", "optax", "scipy", "matplotlib", "rich"])
    code = f"import sys\nsys.modules.update({hidden})\nfrom stormplus.doctor import main\nmain([])"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert re.search("native passes +need torch", done.stdout)


@pytest.fixture
def checked(monkeypatch, capsys):
    """Return a function that checks a simulated device, where times mean nothing."""

    def check(device="cuda", parities=(), waits=0, **options):
        with SimulatedDevice(device, **options) as simulated:

            def count(_, step):
                simulated.reset()
                step()
                counts = Counts(*simulated.counts)
                return counts._replace(syncs=counts.syncs + waits)

            for name, value in {
                "PARITIES": parities,
                "describe": str,
                "synchronize": lambda _: None,
                "count": count,
                "seconds": lambda _, step: (0.001, 0.002),
            }.items():
                monkeypatch.setattr(device_check, name, value)
            passed = check_device(device, SMALL)
        return passed, capsys.readouterr().out

    return check


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cuda"},
        pytest.param({"device": "mps", "float64": False}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_optimizers_pass_on_a_simulated_device(checked, options):
    parities = device_check.PARITIES
    passed, out = checked(parities=parities, **options)
    assert passed, out
    assert out.count("  PASS  multi_tensor") == len(parities)
    assert re.search(r"^Untuned +\d+ +0 +\d+ +\d+ +1\.00 +2\.00$", out, re.MULTILINE)
    assert re.search(r"^StormPlus, a pair +\d+ +0 ", out, re.MULTILINE)
    assert "Adam(fused=True)" in out


def test_another_trajectory_or_a_wait_on_the_device_fails(checked):
    def other(params):
        params = list(params)
        return Untuned(params, maximize=params[0].device.type != "cpu")

    passed, out = checked(parities=[Parity("another", other)])
    assert not passed
    assert re.search(r"^another .*  FAIL  ", out, re.MULTILINE)
    passed, out = checked(waits=1)
    assert not passed
    assert "waits for the device" in out


@pytest.mark.parametrize("tensor", [0, 1])
def test_a_parameter_that_becomes_nan_on_the_device_fails(checked, tensor):
    def broken(params):
        params = list(params)
        if params[0].device.type != "cpu":
            params[tensor].data.mul_(float("nan"))
        return Untuned(params, check_finite=False)

    assert not checked(parities=[Parity("broken", broken)])[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device here")
@pytest.mark.parametrize("device", ["cuda", "meta", "no-such-device"])
def test_without_the_device_there_is_one_line_and_exit_code_2(device, capsys):
    assert doctor.main(["--device", device]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"error: torch .* cannot use the device '{device}' here: .*\n", error)


def test_the_cpu_is_a_device_too(capsys, monkeypatch):
    monkeypatch.setattr(device_check, "resnet34_shapes", lambda: SMALL)
    assert doctor.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^Untuned +- +- +- +- +[\d.]+ +[\d.]+$", out, re.MULTILINE)
    assert out.endswith("\nPASS\n")


def test_a_profile_counts_kernels_and_copies_but_no_annotations():
    def event(name, device="CUDA", annotation=False):
        kind = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=kind, is_user_annotation=annotation)

    launches = ["multi_tensor_apply_kernel<>", "Memset (Device)", "Memcpy DtoD (Device -> Device)"]
    copies = ["Memcpy HtoD (Pinned -> Device)", "CopyDeviceToHost"]  # the second is ROCm's
    # torch 2.4 does not mark the annotation of an optimizer
    others = [event("Optimizer.step#Untuned.step"), event("my range", annotation=True)]
    others.append(event("cudaLaunchKernel", "CPU"))
    found = device_check.count_events([*map(event, launches + copies), *others])
    assert found == {"launches": 3, "to_device": 1, "to_host": 1}
