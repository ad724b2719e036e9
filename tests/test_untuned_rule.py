"""The scalar formulas of Untuned: by hand, at the edges, and with NumPy, torch and JAX arrays."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormplus import untuned_rule as rule
from stormplus.rules import Sum
from stormplus.untuned_rule import INITIAL_WALK, UntunedScalars


class Library:
    """An array library: how to make its arrays, and how to call a function."""

    def __init__(self, name):
        if name == "numpy":
            self.array, self.xp = np.array, np
        elif name == "torch":
            torch = pytest.importorskip("torch")
            dtypes = {np.float32: torch.float32, np.float64: torch.float64, bool: torch.bool}
            self.array = lambda values, dtype: torch.tensor(values, dtype=dtypes[dtype])
            self.xp = torch
        else:
            self.jax = pytest.importorskip("jax")
            self.array, self.xp = self.jax.numpy.array, self.jax.numpy

    def floats(self, values, dtype=np.float64):
        return self.array(np.asarray(values, dtype), dtype)

    def call(self, function, *arguments, **options):
        """`function(*arguments, xp=...)`, as NumPy."""
        result = function(*arguments, xp=self.xp, **options)
        if isinstance(result, UntunedScalars):
            return UntunedScalars(*map(np.asarray, with_total(result)))
        return np.asarray(result)


def with_total(state):
    return state._replace(effective_steps=state.effective_steps.total)


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request):
    """JAX with float64, to compare all of them with the same tolerance."""
    found = Library(request.param)
    if "jax" not in request.param:
        yield found
        return
    found.jax.config.update("jax_enable_x64", True)
    yield found
    found.jax.config.update("jax_enable_x64", False)


def scalars(library, dtype=np.float64, **values):
    """Scalars from lists of values; by default those before the first step, of scale 1."""
    start = {
        "step": 0.0, "step_size": 0.0, "distance": 1 / 60, "ceiling": 1.0, "walk": INITIAL_WALK,
        "evidence": 0.0,
    }  # fmt: skip
    steps = values.pop("effective_steps", 0.0)
    fields = np.broadcast_arrays(*(start | values).values(), steps, 0.0)
    fields = [library.floats(np.atleast_1d(field), dtype) for field in fields]
    named = dict(zip(start | values, fields))
    return UntunedScalars(**named, effective_steps=Sum(*fields[-2:]))


def measured(library, dtype=np.float64, **values):
    """The arguments of `after_step`, by default those of an ordinary step that led nowhere."""
    usual = {"step_size": 0.0, "alpha": 0.0, "mean_square": 1.0, "displacement": 0.0} | values
    eligible = usual.pop("eligible", True)
    fields = np.broadcast_arrays(*usual.values(), eligible)
    arrays = [library.floats(np.atleast_1d(field), dtype) for field in fields[:-1]]
    return dict(zip(usual, arrays)) | {"eligible": library.array(np.atleast_1d(fields[-1]), bool)}


def after(library, dtype=np.float64, before=None, **values):
    arguments = measured(library, dtype, **values)
    return library.call(rule.after_step, scalars(library, dtype, **(before or {})), **arguments)


# --- scales ----------------------------------------------------------------------------------


def test_the_natural_scale_is_one_over_the_root_of_the_inputs():
    assert [rule.natural_scale(inputs) for inputs in (0, 1, 4, 25)] == [1, 1, 1 / 2, 1 / 5]


def test_the_ceiling_is_the_larger_of_both_scales(library):
    start = library.floats([3, 0, 0.5, 1e-20, 1e20])
    natural = library.floats([0.5] * 5)
    found = library.call(rule.distance_ceiling, start, natural)
    assert found.tolist() == [3, 0.5, 0.5, 0.5, 1e20]


def test_the_initial_distance_is_a_sixtieth_of_the_ceiling(library):
    found = rule.initial_distance(library.floats([3.0, 0.0, 6e20]))
    np.testing.assert_allclose(np.asarray(found), [0.05, 0, 1e19], rtol=1e-15)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**8))
def test_the_sample_stride_is_coprime_to_the_size_and_the_sample_small(size):
    stride = rule.sample_stride(size)
    assert 1 <= stride <= max(1, size // 4096)
    assert math.gcd(stride, size) == 1 or size == 0
    # The worst is 60060 = 2 * 2 * 3 * 5 * 7 * 11 * 13: no number from 14 down to 2 will do.
    assert min(size, 4096) <= -(-size // stride) <= 60060


@pytest.mark.parametrize(
    ("axes", "eligible"),
    [
        ([2, 1, 4], [True, False, True]),
        ([1, 0, 1], [True, True, True]),  # there is no matrix
        ([2], [True]),
        ([], []),
    ],
)
def test_matrices_are_eligible_or_all_tensors_if_there_is_none(axes, eligible):
    assert rule.eligible_tensors(axes) == eligible


# --- the step --------------------------------------------------------------------------------


def test_the_step_size_by_hand(library):
    # 3 / sqrt(1 + 8) = 1; the first step has nothing before it; a sixtieth of 12 is 0.2, and with
    # evidence of 2 three times that
    state = scalars(
        library,
        distance=[3, 0.01, 3, 3, 3],
        effective_steps=[8, 0, 8, 8, 8],
        ceiling=[100, 1, 12, 12, 12],
        evidence=[0, 0, 0, 2, 1e9],
    )
    found = library.call(rule.next_step_size, state)
    np.testing.assert_allclose(found, [1, 0.01, 0.2, 0.6, 1], rtol=1e-15)


def test_the_weights_by_hand():
    assert [rule.grad_weight(t) for t in (1, 4, 28)] == [1, 0.5, 0.1]  # 3 / (t + 2)
    assert [rule.average_weight(t) for t in (1, 10, 82)] == [1, 0.5, 0.1]  # 9 / (t + 8)


def test_the_average_weighs_the_iterates_as_t_to_the_eighth():
    # The t-th has c_t times all (1 - c_k) after it. By hand, of 3 iterates: c = 1, 0.9, 9/11, so
    # the weights are 0.1 * 2/11, 0.9 * 2/11, 9/11 = 1/55, 9/55, 45/55.
    weights = np.zeros(3)
    for t in (1, 2, 3):
        c = rule.average_weight(t)
        weights *= 1 - c
        weights[t - 1] = c
    assert weights == pytest.approx([1 / 55, 9 / 55, 45 / 55], rel=1e-12)


def test_the_decay_by_hand(library):
    # 0.1 * 0.02 at the natural scale; a tensor four times as large takes steps four times as large,
    # and decays at the same rate; and never by more than all of it
    rates, alpha = [0.1, 0.1, 1e9, 0, 1e30], [0.02, 0.08, 0.02, 0.02, 1]
    ceiling = [0.5, 2, 0.5, 0.5, 1e-20]
    arrays = map(library.floats, (rates, alpha, [0.5] * 5, ceiling))
    found = library.call(rule.decay_factor, *arrays)
    np.testing.assert_allclose(found, [0.002, 0.002, 1, 0, 1], rtol=1e-15)


# --- agreement -------------------------------------------------------------------------------


def agreement(library, displacement, walk, eligible):
    arrays = library.floats(displacement), library.floats(walk), library.array(eligible, bool)
    return float(library.call(rule.least_agreement, *arrays))


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
def test_the_least_agreement_by_hand(library, ratio, walk, axes, least):
    walk = np.array(walk, float) + INITIAL_WALK
    displacement = np.sqrt(np.array(ratio, float) * walk)
    found = agreement(library, displacement, walk, rule.eligible_tensors(axes))
    assert found == pytest.approx(least, abs=1e-13)


def test_the_initial_walk_is_no_walk_in_float32(library):
    walk = library.floats([INITIAL_WALK], np.float32)
    arrays = library.floats([1.0], np.float32), walk, library.array([True], bool)
    found = library.call(rule.least_agreement, *arrays)
    assert found == 0
    assert found.dtype == np.float32


def test_noise_is_no_evidence_and_a_direction_is():
    """A walk of a thousand coordinates, with a tenth of signal in its squared steps, or none."""
    noise, eligible = np.random.default_rng(0).standard_normal((300, 1000)), np.array([True])
    for signal, low, high in ((0.0, 0.0, 0.1), (0.3, 20.0, 30.0)):
        moved = np.sqrt(np.mean(np.cumsum(noise + signal, 0) ** 2, 1, keepdims=True))
        walk = np.cumsum(np.mean((noise + signal) ** 2, 1, keepdims=True), 0)
        rows = zip(moved, walk)
        found = [float(rule.least_agreement(*row, eligible, np)) for row in rows]
        # By hand: t^2 signal^2 + t, over t (1 + signal^2), less 1, is (t - 1) times this.
        expected = np.arange(300) * signal**2 / (1 + signal**2)
        np.testing.assert_allclose(found, expected, atol=0.15 + 0.1 * expected.max())
        assert low <= found[-1] <= high


# --- after a step ----------------------------------------------------------------------------


def test_after_a_step_by_hand(library):
    """Two tensors of scale 2 and 4, whose agreement is 8 and 3: the least counts for both."""
    before = {"step": 2, "ceiling": [2, 4], "distance": [0.5, 1], "effective_steps": 2.5}
    before |= {"walk": [0.03, 0.06], "evidence": 1.0}
    found = after(
        library,
        before=before,
        step_size=[0.1, 0.2],
        alpha=[0.2, 0.8],
        mean_square=[0.5, 4.0],
        # walk + (alpha / R)^2 mean_square = 0.03 + 0.01 * 0.5, 0.06 + 0.04 * 4
        displacement=[2 * math.sqrt(9 * 0.035), 4 * math.sqrt(4 * 0.22)],
    )
    assert found.step.tolist() == [3, 3]
    assert found.step_size.tolist() == [0.1, 0.2]
    assert found.ceiling.tolist() == [2, 4]
    np.testing.assert_allclose(found.walk, [0.035, 0.22], rtol=1e-14)
    np.testing.assert_allclose(found.distance, [2 * 0.315**0.5, 4 * 0.88**0.5], rtol=1e-14)
    np.testing.assert_allclose(found.effective_steps, [3, 3.5], rtol=1e-14)  # one at most
    np.testing.assert_allclose(found.evidence, [1 + 0.5 * 9, 1 + 9], rtol=1e-12)


@pytest.mark.parametrize(
    ("distance", "displacement", "expected"),
    [(0.1, 0.05, 0.1), (0.1, 0.7, 0.7), (0.1, 9.0, 2.0), (2.0, 2.0, 2.0), (0.1, 1e20, 2.0)],
)
def test_the_distance_is_the_largest_so_far_below_the_ceiling(
    library, distance, displacement, expected
):
    before = {"distance": distance, "ceiling": 2.0}
    assert after(library, before=before, displacement=displacement).distance == expected


def test_a_step_counts_as_the_part_of_the_tensor_that_it_moved(library):
    squares = [0, 1e-20, 0.25, 1, 7, 1e20]
    found = after(library, mean_square=squares).effective_steps
    assert found.tolist() == [0, 1e-20, 0.25, 1, 1, 1]


def test_float32_counts_more_steps_than_it_can_represent(library):
    # 2^24 + 1 is no float32, so that a plain sum would stay at 2^24.
    state = scalars(library, np.float32, effective_steps=2.0**24)
    for _ in range(6):
        state = rule.after_step(state, **measured(library, np.float32), xp=library.xp)
    assert float(state.effective_steps.total[0]) == 2.0**24 + 6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_result_changes_the_dtype(library, dtype):
    found = after(library, dtype, mean_square=[0.5, 7.0], displacement=0.3, alpha=0.1)
    assert all(value.dtype == dtype for value in found)
    state = scalars(library, dtype, distance=[0.01, 3.0])
    assert library.call(rule.next_step_size, state).dtype == dtype


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_the_scale_of_a_tensor_does_not_matter(library, scale):
    before = {"ceiling": scale, "distance": scale / 60}
    state = scalars(library, np.float32, **before)
    eta = library.call(rule.next_step_size, state)
    np.testing.assert_allclose(eta, scale / 60, rtol=1e-6)
    # One step of R / 60 in every coordinate: as far as the random walk, so no agreement yet. A
    # second one in the same direction: 4 / 2 - 1.
    one = after(library, np.float32, before, alpha=scale / 60, displacement=scale / 60)
    np.testing.assert_allclose(one.walk, 1 / 3600, rtol=1e-5)
    np.testing.assert_allclose(one.evidence, 0, atol=1e-9)
    before |= {"walk": 1 / 3600}
    two = after(library, np.float32, before, alpha=scale / 60, displacement=scale / 30)
    np.testing.assert_allclose(two.evidence, 1, rtol=1e-4)
    np.testing.assert_allclose(two.distance, scale / 30, rtol=1e-6)


def test_a_nan_is_kept(library):
    """Otherwise a step from parameters that are not finite would be taken."""
    nan = [math.nan]
    ceiling = library.call(rule.distance_ceiling, library.floats(nan), library.floats([0.5]))
    assert np.isnan(ceiling)
    assert np.isnan(np.asarray(rule.initial_distance(library.floats(nan))))
    state = scalars(library, distance=nan, ceiling=nan)
    assert np.isnan(library.call(rule.next_step_size, state))
    assert np.isnan(library.call(rule.next_step_size, scalars(library, distance=nan)))
    found = after(library, displacement=[math.nan, 0.5], mean_square=[1.0, 1.0], alpha=0.01)
    assert np.isnan(found.distance).tolist() == [True, False]
    assert np.isfinite(found.evidence).all()
    arrays = map(library.floats, ([0.1], nan, [0.5], [0.5]))
    assert np.isnan(library.call(rule.decay_factor, *arrays))
