"""The tests of the native backend, under the sanitizers of addresses and undefined behavior."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stormplus.torch.kernels import native
from tests.support.pages import ROOT, run_python

pytestmark = pytest.mark.long

SOURCE = Path(native.__file__).with_name("native.c")
TESTS = [ROOT / "tests/torch" / name for name in ("test_native.py", "test_kernels.py")]
FLAGS = ["-g", "-O1", "-std=c11", "-shared", "-fPIC", "-ffp-contract=off", "-fopenmp"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

# The tests take the library that they are given.
CODE = """
import ctypes, sys
import pytest
from stormplus.torch.kernels import native

native.LIBRARY = ctypes.CDLL(sys.argv[1])
# Without capture, or what a sanitizer says before it ends the process would be lost.
sys.exit(pytest.main(["-s", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[2:]]))
"""


def test_the_sanitizers_find_nothing(tmp_path):
    compiler = shutil.which("gcc") or pytest.skip("gcc's sanitizers are used")
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(map(os.path.isabs, found)):
        pytest.skip("gcc has no sanitizers here")
    library = tmp_path / "sanitized.so"
    subprocess.run([compiler, *FLAGS, *SANITIZERS, "-o", library, SOURCE], check=True)
    # Python's own memory at exit is none of ours.
    environment = os.environ | {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"}
    done = run_python("-c", CODE, library, *TESTS, "-k", "native", cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
