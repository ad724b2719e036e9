import sys

import pytest

from stormplus.torch.kernels import triton


@pytest.fixture(scope="module")
def interpreter():
    """Import Triton anew with TRITON_INTERPRET, which it reads when it is imported."""

    def modules():
        # Not the extension modules, which cannot be imported twice.
        return [
            name
            for name in sys.modules
            if (name.split(".")[0] == "triton" and not name.startswith("triton._C"))
            or name == "stormplus.torch.kernels.triton_kernels"
        ]

    def forget():
        triton._uploaded_once.cache_clear()
        return {name: sys.modules.pop(name) for name in modules()}

    before = forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(triton, "_CHUNK", 2048)  # the interpreter is slow
        yield
    forget()
    sys.modules.update(before)
