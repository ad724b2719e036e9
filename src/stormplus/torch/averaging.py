"""Beyond the paper: the mean of the iterates over about the last tenth of a run."""

from __future__ import annotations

import torch
from torch import Tensor

from stormplus.rules import average_weight
from stormplus.torch.kernels import BLOCK
from stormplus.torch.norms import blocks
from stormplus.torch.optimizer import StormOptimizer
from stormplus.torch.sharding import local
from stormplus.torch.work import JOINED, Work


class AveragingOptimizer(StormOptimizer):
    """Keeps an average beside the parameters, if `buffers` has one, and lends it to them."""

    @property
    def at_average(self) -> bool:
        """Whether the parameters hold the average: `eval()` was called, and not `train()`."""
        return bool(self._home["averaged"])

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the parameters: call it before you validate or save a model.

        BatchNorm's running statistics are those of the iterates; near the end of a run that
        makes little difference. Without a step so far, or with `average=False`, the
        parameters stay as they are. Calling it twice is calling it once.
        """
        if self.at_average:
            return
        for p in self._params():
            state = self.state[p]
            if "average" in state:
                state["point"] = p.detach().clone()
                if state["joined"] == JOINED:
                    p.copy_(state["average"])
        self._home["averaged"] = 1

    @torch.no_grad()
    def train(self) -> None:
        """Put the last iterate back, exactly, and go on."""
        for p in self._params():
            point: Tensor | None = self.state[p].pop("point", None)
            if point is not None:
                p.copy_(point)
        self._home["averaged"] = 0

    def _refuse_at_average(self) -> None:
        if self.at_average:
            raise RuntimeError("the parameters hold the average: call opt.train() before step()")

    def _estimate(self) -> None:
        super()._estimate()
        self._update_average(self._gather())

    @torch.no_grad()
    def _update_average(self, work: Work) -> None:
        weight = average_weight(self._home["step"])
        for batch, _ in work.batches():
            for x, state in zip(batch.xs, batch.states):
                if "average" in state:
                    average = local(state["average"])
                    w = weight[batch.bucket].to(average.device, average.dtype)
                    for x_, average_ in blocks(BLOCK, x, average):
                        average_.lerp_(x_.to(average_.dtype), w)
