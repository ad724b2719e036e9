from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

INSTALLED = bool(find_spec("jax") and find_spec("optax"))
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
# Tests of how the transformations live inside what optax 0.2.4 lacks: `partition`,
# `selective_transform`, functions as arguments through `MultiSteps`.
OPTAX_0_2_5 = ("test_partition_", "partition]", "selective_transform]", "test_multi_steps_")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Two of the three rules of one template wait for the long suite: each case compiles."""
    old = INSTALLED and version("optax") == "0.2.4"
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        case = getattr(item, "callspec", None)
        if case and case.params.get("name") in ("simplified_storm_plus", "storm"):
            item.add_marker(pytest.mark.long)
        if old and any(part in item.name for part in OPTAX_0_2_5):
            item.add_marker(pytest.mark.skip("optax 0.2.4 lacks what this is about"))


@pytest.fixture(autouse=True, scope="session")
def quick_compiler():
    """Each case compiles once and runs for some steps: the compiler's care is wasted on it."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """Float64 for one test; the others run with jax's default of float32."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
