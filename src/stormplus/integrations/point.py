"""Noticing that somebody else has written to the parameters."""

from __future__ import annotations

from stormplus.torch.optimizer import StormOptimizer


class Point:
    """Where a step has left the parameters, by the version counters that torch keeps.

    A trainer that loads weights without the optimizer's state (the best of a run, say)
    leaves an estimator that belongs to another point.
    """

    def __init__(self) -> None:
        self._versions: list[int] | None = None

    def note(self, opt: StormOptimizer) -> None:
        """Remember the present point."""
        self._versions = [p._version for p in opt._params()]

    def forget(self) -> None:
        """The optimizer's state has been loaded: it belongs to whatever point this is."""
        self._versions = None

    def has_moved(self, opt: StormOptimizer) -> bool:
        return self._versions not in (None, [p._version for p in opt._params()])
