"""Noticing that somebody else has written to the parameters."""

from __future__ import annotations

from torch import Tensor

from stormplus.torch import PairedOptimizer


class Point:
    """Where a step has left the parameters, by the version counters that torch keeps.

    A trainer that loads weights without the optimizer's state (the best of a run, say)
    leaves an estimator that belongs to another point. A write through `p.data` is not seen:
    torch does not count it.
    """

    def __init__(self) -> None:
        self._opt: PairedOptimizer | None = None
        self._generation = 0
        self._versions: list[tuple[Tensor, int]] = []
        self._restarted = False

    def note(self, opt: PairedOptimizer) -> None:
        """Remember the present point; call it when a step is complete."""
        self._opt, self._generation = opt, opt.generation
        self._versions = [(p, p._version) for p in opt.parameters() if p.requires_grad]

    def has_moved(self, opt: PairedOptimizer) -> bool:
        """Whether the parameters have been written to since `note`.

        Not if the optimizer is another one, or its state has been loaded or made anew in the
        meantime: that state belongs to whatever point this is. Nor if parameters have come or gone.
        """
        if self._opt is not opt or self._generation != opt.generation:
            return False
        present = set(map(id, opt.parameters()))
        return any(p._version != version for p, version in self._versions if id(p) in present)

    def restart_if_moved(self, opt: PairedOptimizer) -> None:
        """Restart the estimator if the parameters have moved; call it before a sample.

        Raises:
            RuntimeError: If the sample before had to restart too. A sample that restarts takes
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
