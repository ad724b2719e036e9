"""Restarts an estimator when something other than the optimizer has written to the parameters.

After a trainer loads weights without the optimizer's state, the estimator belongs to another point.
Writes through `p.data` are not detected: torch does not count them.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from stormplus.torch import PairedOptimizer

# The generation of the state and the parameters' version counters after the last step.
_recorded: WeakKeyDictionary[PairedOptimizer, tuple[int, list[tuple[Tensor, int]]]]
_recorded = WeakKeyDictionary()
_restarted: WeakSet[PairedOptimizer] = WeakSet()  # optimizers that restarted at their last sample


def record_versions(opt: PairedOptimizer) -> None:
    """Record the version counters; call it when a step is complete."""
    versions = [(p, p._version) for p in opt.parameters() if p.requires_grad]
    _recorded[opt] = opt.generation, versions


def restart_if_written(opt: PairedOptimizer) -> None:
    """Restart the estimator if the parameters were written to; call it before a sample.

    Raise if it restarted at the previous sample too: a sample that restarts does not move.
    """
    generation, versions = _recorded.get(opt, (-1, []))
    written = any(p._version != version for p, version in versions)
    if not written or generation != opt.generation or not opt.started or opt.pending:
        _restarted.discard(opt)
        return
    opt.restart()
    if opt in _restarted:
        raise RuntimeError(
            "something writes to the parameters at every batch (weight clipping, an average that "
            "is swapped in), so the estimator restarts every time and nothing moves: constrain the "
            "weights inside the model's forward, or write once per epoch"
        )
    _restarted.add(opt)
