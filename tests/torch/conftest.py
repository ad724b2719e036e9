import sys
from pathlib import Path

import pytest

# `optimizers`, the table that these tests share.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def uncompiled(monkeypatch):
    """The fused path with its kernels as they are written: test_kernels.py compiles them."""
    from stormplus.torch.core import compiled

    monkeypatch.setattr(compiled, "_compiled", lambda kernel: kernel)
    monkeypatch.setattr(compiled, "SMALL", 16)  # so that small tensors are large, and some joined
