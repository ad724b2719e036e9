"""One small module for each trainer; none of them is imported by the core."""

from __future__ import annotations

import sys
from typing import Any


def lightning_callbacks() -> list[Any]:
    """What Lightning adds to every trainer, by an entry point; nothing if it can be of no use."""
    if "stormplus.torch" not in sys.modules:  # nobody has imported one
        return []
    from stormplus.integrations.lightning import UntunedWatch

    return [UntunedWatch()]
