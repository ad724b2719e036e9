"""The three optimizers: one template, three rules."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stormplus.rules import SimplifiedStormPlusRule, StormPlusRule, StormRule
from stormplus.torch.optimizer import StormOptimizer


class StormPlus(StormOptimizer):
    """STORM+, Algorithm 1 of Levy, Kavis and Cevher (NeurIPS 2021).

    The arguments are those of `StormOptimizer`.
    """

    rule = StormPlusRule()


class SimplifiedStormPlus(StormOptimizer):
    """Simplified STORM+, Sec. 4.2 of the paper: the gain is t^(-2/3), whatever is measured.

    The arguments are those of `StormOptimizer`.
    """

    rule = SimplifiedStormPlusRule()


class Storm(StormOptimizer):
    """STORM (Cutkosky and Orabona, NeurIPS 2019), which must know the smoothness.

    Args:
        params: As for `StormOptimizer`.
        lr: As for `StormOptimizer`.
        theta: Numerator of the step size.
        w: Offset under its cube root.
        c: Factor of the gain.
        smoothness: L, the smoothness of the objective.
        **options: Every other argument of `StormOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        theta: float = 0.1,
        w: float = 0.1,
        c: float = 100.0,
        smoothness: float = 1.0,
        **options: Any,
    ) -> None:
        self.rule = StormRule(theta, w, c, smoothness)
        super().__init__(params, lr, **options)
