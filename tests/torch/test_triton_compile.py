"""The Triton kernels compile for GPUs on a machine without one. Nothing is run.

tools/triton_versions.py does this with other versions of Triton.
"""

import importlib.util
import json
import os
import re
import sys

import pytest
import torch

from stormplus.torch.kernels import triton
from stormplus.torch.kernels.plain import UntunedCoefficients
from tests.support.kernel_cases import BF16, F16, F32, Kind, group_of
from tests.support.pages import ROOT, run_python

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
}
DTYPES = [(F32, F32, F32), (F32, BF16, F32), (BF16, BF16, BF16), (F16, F16, F32)]  # x, g, state


def run_all_passes(dtypes):
    one, flag = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.bool)
    rows = UntunedCoefficients(*torch.ones(7, 1, dtype=torch.float64))
    x, g, state = dtypes
    kind = Kind(x, state_dtype=state, grad_dtype=g, shapes=((8,),))
    lists = kind.pair() | kind.untuned()
    group, l2 = group_of(triton, lists), group_of(triton, lists, l2=0.1)
    triton.any_nonfinite(group)
    triton.move(group, one)
    triton.move(l2, one, skip=flag)
    triton.estimate(group, one, finite_only=True, skip=flag)
    triton.estimate(l2, one, finite_only=False)
    triton.untuned_step(group, rows)
    triton.untuned_step(group, rows, skip=flag)
    triton.untuned_step(group, rows, skip=torch.zeros(1))  # as GradScaler has it


class Driver:
    """Stands in for that of a device."""

    def __init__(self, target):
        self._target = target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self._target


class CompileOnly:
    """A kernel that is compiled instead of launched."""

    def __init__(self, kernel):
        self.arg_names, self._kernel = kernel.arg_names, kernel

    def __getitem__(self, grid):
        def launch(**arguments):
            assembly = self._kernel.warmup(grid=grid, **arguments).asm
            text = assembly.get("ptx") or assembly["amdgcn"]
            wide = re.search(r"ld\.global[.\w:]*\.v4|global_load_dwordx4", text) is not None
            print(json.dumps([self._kernel.__name__, wide]))

        return launch


def main(name):
    """Print which kernels were compiled, and whether they have loads of 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from stormplus.torch.kernels import triton_kernels

    driver.set_active(Driver(GPUTarget(*TARGETS[name])))
    for function, kernel in vars(triton_kernels).items():
        if function.endswith("_kernel"):
            setattr(triton_kernels, function, CompileOnly(kernel))
    for dtypes in DTYPES:
        run_all_passes(dtypes)


@pytest.mark.parametrize("name", TARGETS)
def test_kernels_compile(name, tmp_path):
    linker = tmp_path / "ld.lld"  # copies: Triton 3.0 has none for AMD
    linker.write_text('#!/bin/sh\n[ "$1" = --version ] || cp "$4" "$6"\n')
    linker.chmod(0o755)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment["TRITON_HIP_LLD_PATH"] = str(linker)
    environment.pop("TRITON_INTERPRET", None)
    run = run_python("-m", __spec__.name, name, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr
    seen = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(seen) == 11 * len(DTYPES)
    in_float32 = seen[:11]
    assert {kernel for kernel, wide in in_float32 if not wide} == {"measure_kernel"}


if __name__ == "__main__":
    main(*sys.argv[1:])
