"""The scalar formulas of Untuned at the edges, in NumPy; those of torch and JAX compare runs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormplus import untuned_rule as rule
from stormplus.rules import Sum
from stormplus.untuned_rule import INITIAL_WALK, UntunedScalars

START = {
    "step": 0.0, "step_size": 0.0, "distance": 1 / 200, "ceiling": 1.0, "walk": INITIAL_WALK,
    "evidence": 0.0,
}  # fmt: skip
NOWHERE = {"step_size": 0.0, "alpha": 0.0, "mean_square": 1.0, "displacement": 0.0}


def scalars(steps=0.0, dtype=np.float64, **values):
    """Return scalars of one tensor; by default those before the first step, of scale 1."""
    steps = np.array([steps], dtype)
    named = {name: np.array([value], dtype) for name, value in (START | values).items()}
    return UntunedScalars(**named, effective_steps=Sum(steps, 0 * steps))


def after(state, dtype=np.float64, **values):
    """Return the scalars after a step, by default one that led nowhere."""
    measured = {name: np.array([value], dtype) for name, value in (NOWHERE | values).items()}
    return rule.after_step(state, **measured, eligible=np.array([True]), xp=np)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**8))
def test_the_sample_stride_is_coprime_to_the_size_and_the_sample_small(size):
    stride = rule.sample_stride(size)
    assert 1 <= stride <= max(1, size // 4096)
    assert math.gcd(stride, size) == 1 or size == 0
    # The worst is 60060 = 2 * 2 * 3 * 5 * 7 * 11 * 13: no number from 14 down to 2 will do.
    assert min(size, 4096) <= -(-size // stride) <= 60060


@pytest.mark.parametrize(
    ("ratio", "walk", "axes", "least"),
    [
        ([5, 2, 3], [1, 1, 1], [2, 4, 2], 1),
        ([5, 2, 3], [1, 1, 1], [2, 1, 2], 2),  # a vector is not eligible
        ([5, 2, 3], [1, 0, 1], [2, 2, 2], 2),  # nor is what has not moved
        ([5, 2, 3], [1, 1, 1], [1, 0, 1], 1),  # unless there is no matrix
        ([5, 2, 3], [0, 1, 1], [2, 1, 1], 0),  # one that never moves is no evidence
        ([0, 0, 0], [0, 0, 0], [2, 2, 1], 0),  # before the first step
        ([5, math.inf, math.nan], [1, 1, 1], [2, 2, 2], 4),  # non-finite parameters: not here
        ([5, 1e30], [1, 1], [2, 2], 4),
        ([4], [1], [1], 3),
        ([4], [1e-10], [2], 3),
        ([4], [1e20], [2], 3),
    ],
)
def test_the_least_ratio_by_hand(ratio, walk, axes, least):
    walk, eligible = np.array(walk, float) + INITIAL_WALK, np.array(rule.eligible_tensors(axes))
    found = rule.least_ratio(np.array(ratio, float), walk, eligible, np)
    assert found == pytest.approx(1 + least, abs=1e-13)


def test_weight_decay_removes_at_most_all_of_a_tensor():
    rates, alpha, ceiling = np.array([[1e9, 1e30, 0], [0.02, 1, 0.02], [0.5, 1e-20, 0.5]])
    assert rule.decay_fraction(rates, alpha, 0.5, ceiling, np).tolist() == [1, 1, 0]


def test_weight_decay_alone_does_not_raise_the_distance_to_the_ceiling():
    """Without a gradient there is no random walk, so that the ratio is huge: four times at most."""
    found = after(scalars(), alpha=0.005, mean_square=0.0, displacement=0.01)
    np.testing.assert_allclose(found.distance, 0.04, rtol=1e-14)


def test_float32_counts_more_steps_than_it_can_represent():
    # 2^24 + 1 is no float32, so that a plain sum would stay at 2^24.
    state = scalars(2.0**24, np.float32)
    for _ in range(6):
        state = after(state, np.float32)
    assert state.effective_steps.total == 2.0**24 + 6


def test_a_nan_is_kept():
    """Otherwise a step from parameters that are not finite would be taken."""
    assert np.isnan(rule.distance_ceiling(np.nan, 0.5, np))
    for ceiling in (math.nan, 1.0):
        assert np.isnan(rule.next_step_size(scalars(distance=math.nan, ceiling=ceiling), np))
    assert np.isnan(rule.decay_fraction(0.1, math.nan, 0.5, 0.5, np))
    found = after(scalars(), displacement=math.nan, alpha=0.01)
    assert np.isnan(found.distance)
    assert np.isfinite(found.evidence)
