"""The scalar formulas of Untuned at the edges; the tests of torch and JAX compare all numbers."""

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
    "evidence": 0.0, "effective_steps": 0.0,
}  # fmt: skip
NOWHERE = {"step_size": 0.0, "alpha": 0.0, "mean_square": 1.0, "displacement": 0.0}


class Library:
    """An array library: how to make its arrays, and how to call a function."""

    def __init__(self, name):
        self.xp = np if name == "numpy" else pytest.importorskip(name)

    def array(self, values, dtype=np.float64):
        values = np.atleast_1d(np.asarray(values, dtype))
        make = getattr(self.xp, "as_tensor", None) or self.xp.asarray
        return make(values)

    def call(self, function, *arguments, **options):
        """Return `function(*arguments, xp=...)` as NumPy arrays."""
        result = function(*arguments, xp=self.xp, **options)
        if isinstance(result, UntunedScalars):
            result = result._replace(effective_steps=result.effective_steps.total)
            return UntunedScalars(*map(np.asarray, result))
        return np.asarray(result)

    def scalars(self, dtype=np.float64, **values):
        """Return scalars; by default those before the first step, of scale 1."""
        values = START | values
        arrays = np.broadcast_arrays(*values.values())
        named = {name: self.array(value, dtype) for name, value in zip(values, arrays)}
        steps = named.pop("effective_steps")
        return UntunedScalars(**named, effective_steps=Sum(steps, 0 * steps))

    def measured(self, dtype=np.float64, **values):
        """Return the arguments of `after_step`, by default those of a step that led nowhere."""
        values = NOWHERE | values
        arrays = np.broadcast_arrays(*values.values())
        named = {name: self.array(value, dtype) for name, value in zip(values, arrays)}
        return named | {"eligible": self.array(np.ones(arrays[0].shape), bool)}

    def after(self, dtype=np.float64, before=None, **values):
        state = self.scalars(dtype, **(before or {}))
        return self.call(rule.after_step, state, **self.measured(dtype, **values))


@pytest.fixture(params=["numpy", "torch", "jax.numpy"])
def library(request):
    """JAX with float64, to compare all of them with the same tolerance."""
    found = Library(request.param)
    if "jax" not in request.param:
        yield found
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    yield found
    jax.config.update("jax_enable_x64", False)


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
def test_the_least_ratio_by_hand(library, ratio, walk, axes, least):
    walk = library.array(np.array(walk, float) + INITIAL_WALK)
    eligible = library.array(rule.eligible_tensors(axes), bool)
    found = library.call(rule.least_ratio, library.array(ratio), walk, eligible)
    assert found == pytest.approx(1 + least, abs=1e-13)


def test_noise_is_no_evidence_and_a_direction_is():
    """A walk of a thousand coordinates, with a tenth of signal in its squared steps, or none."""
    noise, eligible = np.random.default_rng(0).standard_normal((300, 1000)), np.array([True])
    for signal, low, high in ((0.0, 0.0, 0.1), (0.3, 20.0, 30.0)):
        moved = np.sqrt(np.mean(np.cumsum(noise + signal, 0) ** 2, 1, keepdims=True))
        walk = np.cumsum(np.mean((noise + signal) ** 2, 1, keepdims=True), 0)
        ratio = rule.displacement_ratio(moved, walk)
        found = [float(rule.least_ratio(*row, eligible, np)) - 1 for row in zip(ratio, walk)]
        # By hand: t^2 signal^2 + t, over t (1 + signal^2), less 1, is (t - 1) times this.
        expected = np.arange(300) * signal**2 / (1 + signal**2)
        np.testing.assert_allclose(found, expected, atol=0.15 + 0.1 * expected.max())
        assert low <= found[-1] <= high


def test_weight_decay_removes_at_most_all_of_a_tensor(library):
    rates, alpha = library.array([1e9, 1e30, 0]), library.array([0.02, 1, 0.02])
    natural, ceiling = library.array([0.5] * 3), library.array([0.5, 1e-20, 0.5])
    found = library.call(rule.decay_fraction, rates, alpha, natural, ceiling)
    assert found.tolist() == [1, 1, 0]


def test_weight_decay_alone_does_not_raise_the_distance_to_the_ceiling(library):
    """Without a gradient there is no random walk, so that the ratio is huge: four times at most."""
    found = library.after(alpha=0.005, mean_square=0.0, displacement=0.01)
    np.testing.assert_allclose(found.distance, 0.04, rtol=1e-14)


def test_float32_counts_more_steps_than_it_can_represent(library):
    # 2^24 + 1 is no float32, so that a plain sum would stay at 2^24.
    state = library.scalars(np.float32, effective_steps=2.0**24)
    for _ in range(6):
        state = rule.after_step(state, **library.measured(np.float32), xp=library.xp)
    assert float(state.effective_steps.total[0]) == 2.0**24 + 6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_the_scale_of_a_tensor_does_not_matter(library, dtype, scale):
    not_moved = library.array([INITIAL_WALK], dtype), library.array([True], bool)
    assert library.call(rule.least_ratio, library.array([1.0], dtype), *not_moved) == 1
    before = {"ceiling": scale, "distance": scale / 60}
    eta = library.call(rule.next_step_size, library.scalars(dtype, **before))
    np.testing.assert_allclose(eta, scale / 60, rtol=1e-6)
    # One step of R / 60 in every coordinate: as far as the random walk, so no agreement yet. A
    # second one in the same direction: 4 / 2 - 1.
    one = library.after(dtype, before, alpha=scale / 60, displacement=scale / 60)
    np.testing.assert_allclose(one.walk, 1 / 3600, rtol=1e-5)
    np.testing.assert_allclose(one.evidence, 0, atol=1e-9)
    before |= {"walk": 1 / 3600}
    two = library.after(dtype, before, alpha=scale / 60, displacement=scale / 30)
    np.testing.assert_allclose(two.evidence, 1, rtol=1e-4)
    np.testing.assert_allclose(two.distance, 4 * scale / 30, rtol=1e-5)  # ratio 2, squared
    assert {value.dtype for value in (eta, *one, *two)} == {np.dtype(dtype)}


def test_a_nan_is_kept(library):
    """Otherwise a step from parameters that are not finite would be taken."""
    nan, half = library.array([math.nan]), library.array([0.5])
    assert np.isnan(library.call(rule.distance_ceiling, nan, half))
    assert np.isnan(np.asarray(rule.initial_distance(nan)))
    for ceiling in (math.nan, 1.0):
        state = library.scalars(distance=math.nan, ceiling=ceiling)
        assert np.isnan(library.call(rule.next_step_size, state))
    assert np.isnan(library.call(rule.decay_fraction, library.array([0.1]), nan, half, half))
    found = library.after(displacement=[math.nan, 0.5], alpha=0.01)
    assert np.isnan(found.distance).tolist() == [True, False]
    assert np.isfinite(found.evidence).all()
