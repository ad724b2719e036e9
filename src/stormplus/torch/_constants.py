"""What is constant about the tensors of `Untuned`: sizes and scales."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stormplus import untuned_rule as rule
from stormplus.torch._sharding import Sample
from stormplus.torch._tensors import ParamInfo, ScalarTable


class TensorConstants:
    """Arrays with one entry per tensor, where the table's rows are.

    Attributes:
        size: The number of elements.
        sample_count: How many of them are sampled.
        natural_scale: See `untuned_rule.natural_scale`.
        eligible: See `untuned_rule.eligible_tensors`; frozen tensors are not.
    """

    def __init__(self, infos: Sequence[ParamInfo], table: ScalarTable) -> None:
        samples = [info.sample or Sample(info.p) for info in infos]
        shapes = [(*info.p.shape, 2) if info.p.is_complex() else info.p.shape for info in infos]
        inputs = [
            sample.size // max(shape[0], 1) if len(shape) > 1 else sample.size
            for shape, sample in zip(shapes, samples)
        ]
        trainable = [info.p.requires_grad for info in infos]
        axes = [
            len(shape) if trains and info.p.numel() else 0
            for info, shape, trains in zip(infos, shapes, trainable)
        ]
        self.size = table.array(np.array([max(sample.size, 1.0) for sample in samples]))
        self.sample_count = table.array(np.array([max(sample.count, 1.0) for sample in samples]))
        self.natural_scale = table.array(np.array([rule.natural_scale(n) for n in inputs]))
        self.eligible = table.array(np.array(rule.eligible_tensors(axes)) & np.array(trainable))
