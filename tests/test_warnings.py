"""Whose warnings are errors: everybody's on the pinned versions, elsewhere our own."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

TESTS = """
import warnings
import stormplus_says

def test_theirs():
    warnings.warn("old", DeprecationWarning)
    warnings.warn("old", FutureWarning)
    warnings.warn("this is deprecated", UserWarning)

def test_ours():
    stormplus_says.old()

def test_more_than_a_deprecation():
    warnings.warn("wrong", UserWarning)
"""


@pytest.mark.long
@pytest.mark.parametrize("pinned", [True, False])
def test_deprecations_of_others_fail_on_the_pinned_versions_alone(pinned, tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (tests / "test_it.py").write_text(TESTS)
    (tests / "stormplus_says.py").write_text(
        "import warnings\ndef old():\n    warnings.warn('old', DeprecationWarning)\n"
    )
    (tmp_path / "constraints.txt").write_text(
        f"pytest=={pytest.__version__ if pinned else '1.0'}\n"
    )
    (tmp_path / "Makefile").write_text(f"TORCH ?= {version('torch').split('+')[0]}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    failed = set(re.findall(r"^FAILED \S+::test_(\w+)", done.stdout, re.MULTILINE))
    assert failed == {"ours", "more_than_a_deprecation"} | ({"theirs"} if pinned else set())
