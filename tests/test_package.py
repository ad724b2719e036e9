"""What importing costs, and what a missing extra says."""

import subprocess
import sys

import pytest

import stormplus


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_stormplus_imports_no_framework():
    out = run(
        "import stormplus, sys; stormplus.minimize; "
        "print([m for m in ('torch', 'jax', 'sklearn', 'matplotlib', 'benchopt', 'rich', 'click') "
        "if m in sys.modules])"
    )
    assert out.stdout.strip() == "[]", out.stderr


def test_missing_torch_says_what_to_install():
    out = run("import sys; sys.modules['torch'] = None\nimport stormplus\nstormplus.StormPlus")
    assert "stormplus[torch]" in out.stderr


def test_public_names():
    assert {"StormPlus", "SimplifiedStormPlus", "Storm", "minimize"} <= set(dir(stormplus))
    for name in stormplus.__all__:
        assert getattr(stormplus, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Adam'"):
        _ = stormplus.Adam
