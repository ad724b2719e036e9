"""What is imported when, and what is said when something is missing."""

import subprocess
import sys

import pytest


def python(code, *flags):
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False
    )


def test_importing_the_package_imports_no_framework():
    code = "import sys, stormplus; print({'jax', 'optax', 'torch'} & set(sys.modules))"
    done = python(code)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_reference_imports_no_framework():
    code = (
        "import sys, stormplus; stormplus.minimize(lambda x, xi: x, [1.0], None, 2);"
        "print({'jax', 'optax', 'torch'} & set(sys.modules))"
    )
    done = python(code)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_jax_backend_imports_neither_torch_nor_the_reference():
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    unwanted = "{'torch', 'scipy.optimize', 'stormplus.reference', 'stormplus.torch'}"
    done = python(f"import sys, stormplus.jax; print({unwanted} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_a_missing_extra_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None\nimport stormplus.jax"
    done = python(code)
    assert done.returncode == 1
    assert "pip install 'stormplus[jax]'" in done.stderr
