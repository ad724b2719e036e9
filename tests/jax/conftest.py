import sys
from pathlib import Path

import pytest

# `jax_problems`, which these tests share.
sys.path.append(str(Path(__file__).parent))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Two of the three rules of one template wait for the long suite: each case compiles."""
    for item in items:
        case = getattr(item, "callspec", None)
        here = item.path.parent == Path(__file__).parent
        if here and case and case.params.get("name") in ("simplified_storm_plus", "storm"):
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True, scope="session")
def quick_compiler():
    """Each case compiles once and runs for some steps: the compiler's care is wasted on it."""
    pytest.importorskip("jax").config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """Float64 for one test; the others run with jax's default of float32."""
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        yield
