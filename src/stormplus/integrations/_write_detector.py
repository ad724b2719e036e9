"""Detects that something other than the optimizer has written to the parameters."""

from __future__ import annotations

from torch import Tensor

from stormplus.torch import PairedOptimizer


class WriteDetector:
    """Compares the parameters' version counters with those after the last step.

    A trainer that loads weights without the optimizer's state leaves an estimator that belongs to
    another point. A write through `p.data` is not detected: torch does not count it.
    """

    def __init__(self) -> None:
        self._opt: PairedOptimizer | None = None
        self._generation = 0
        self._versions: list[tuple[Tensor, int]] = []
        self._restarted = False

    def record(self, opt: PairedOptimizer) -> None:
        """Record the counters; call it when a step is complete."""
        self._opt, self._generation = opt, opt.generation
        self._versions = [(p, p._version) for p in opt.parameters() if p.requires_grad]

    def written(self, opt: PairedOptimizer) -> bool:
        """Return whether a parameter has been written to since `record`.

        False if the optimizer or its state has been replaced in the meantime: the new state
        belongs to the present point. Parameters that were added or removed do not count.
        """
        if self._opt is not opt or self._generation != opt.generation:
            return False
        present = {id(p) for p in opt.parameters()}
        return any(p._version != version for p, version in self._versions if id(p) in present)

    def restart_if_written(self, opt: PairedOptimizer) -> None:
        """Restart the estimator if the parameters were written to; call it before a sample.

        Raises:
            RuntimeError: If the previous sample restarted too. A restarted sample moves nothing,
                so the run would stand still.
        """
        written = opt.started and not opt.pending and self.written(opt)
        repeated, self._restarted = written and self._restarted, written
        if written:
            opt.restart()
        if repeated:
            raise RuntimeError(
                "something writes to the parameters at every batch (weight clipping, a projection, "
                "an average that is swapped in), so that the estimator restarts every time and the "
                "optimizer never moves. Remove it, constrain the weights inside the model's "
                "forward, or write once per epoch or less"
            )

    def __reduce__(self) -> tuple[type[WriteDetector], tuple[()]]:
        return WriteDetector, ()  # copied parameters have their own counters
