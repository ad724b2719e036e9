"""`python -m stormplus.doctor`: what is installed, and the check of a device."""

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stormplus import Untuned, device_check, doctor
from stormplus.device_check import Counts, Parity, check_device
from stormplus.torch.kernels import native
from stormplus_bench.simulated_device import SimulatedDevice

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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search("native passes +need torch", done.stdout)


class SimulatedMeter(device_check.Meter):
    """Counts on a simulated device, where times mean nothing."""

    def __init__(self, simulated):
        super().__init__(simulated.device)
        self.simulated = simulated

    def describe(self):
        return "a simulated device"

    def synchronize(self):
        pass

    def count(self, step):
        self.simulated.reset()
        step()
        return Counts(*self.simulated.counts)

    def seconds(self, step):
        return 0.001, 0.002


@pytest.fixture
def checked(monkeypatch, capsys):
    """Return a function that returns whether the checks pass on a simulated device, and prints."""

    def check(device="cuda", parities=(), meter=SimulatedMeter, **options):
        monkeypatch.setattr(device_check, "PARITIES", parities)
        with SimulatedDevice(device, **options) as simulated:
            passed = check_device(device, meter(simulated), SMALL)
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

    class Waiting(SimulatedMeter):
        def count(self, step):
            return super().count(step)._replace(syncs=1)

    passed, out = checked(parities=[Parity("another", other)])
    assert not passed
    assert re.search(r"^another .*  FAIL  ", out, re.MULTILINE)
    passed, out = checked(meter=Waiting)
    assert not passed
    assert "waits for the device" in out


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


def test_the_events_of_a_profile_are_kernels_and_copies():
    names = (
        "void multi_tensor_apply_kernel<...::{lambda()#1}>",
        "Memset (Device)",
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "CopyDeviceToHost",  # ROCm
        "Optimizer.step#Untuned.step",  # an annotation
    )
    on_device, on_host = SimpleNamespace(name="CUDA"), SimpleNamespace(name="CPU")
    events = [SimpleNamespace(name=name, device_type=on_device) for name in names]
    events.append(SimpleNamespace(name="cudaLaunchKernel", device_type=on_host))
    mine = SimpleNamespace(name="my range", device_type=on_device, is_user_annotation=True)
    found = device_check.count_events([*events, mine])
    assert found == {"launches": 3, "to_device": 1, "to_host": 1}
