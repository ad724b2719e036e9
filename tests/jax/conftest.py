import sys
from pathlib import Path

import pytest

# `jax_problems`, which these tests share.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def x64():
    """Float64 for one test; the others run with jax's default of float32."""
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        yield
