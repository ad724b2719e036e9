"""Noticing that somebody else has written to the parameters."""

from __future__ import annotations

from typing import Any

from stormplus.torch.optimizer import StormOptimizer


class Point:
    """Where a step has left the parameters, by the version counters that torch keeps.

    A trainer that loads weights without the optimizer's state (the best of a run, say)
    leaves an estimator that belongs to another point. A write through `p.data` is not seen:
    torch does not count it.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._versions: list[int] = []
        self._restarted = False

    def note(self, opt: StormOptimizer) -> None:
        """Remember the present point; call it when a step is complete."""
        self._state = _identity(opt)
        self._versions = [p._version for p in opt._params()]

    def forget(self) -> None:
        """The present state belongs to whatever point this is."""
        self._state = None

    def has_moved(self, opt: StormOptimizer) -> bool:
        """Whether the parameters have been written to since `note`.

        Not if the optimizer's state has been loaded or made anew in the meantime: that one
        belongs to whatever point this is.
        """
        versions = [p._version for p in opt._params()]
        return self._state is _identity(opt) and self._versions != versions

    def settle(self, opt: StormOptimizer) -> None:
        """Restart the estimator if the parameters have moved; call it before a batch.

        Raises:
            RuntimeError: If the batch before had to restart too. A batch that restarts takes
                one gradient and moves nothing, so such a run would stand still.
        """
        moved = opt.started and not opt.pending and self.has_moved(opt)
        again, self._restarted = moved and self._restarted, moved
        if moved:
            opt.restart()
        if again:
            raise RuntimeError(
                "something writes to the parameters at every batch (weight clipping, a "
                "projection, an average that is swapped in): the estimator would restart each "
                "time and the optimizer never move. Remove what writes, bound the weights "
                "inside the model's forward, or let it write once an epoch or less"
            )

    def __reduce__(self) -> tuple[type[Point], tuple[()]]:
        return Point, ()  # copies of the parameters have counters of their own


def _identity(opt: StormOptimizer) -> Any:
    """An object that lasts as long as the state that the optimizer has now."""
    return opt.state[next(opt._params())]
