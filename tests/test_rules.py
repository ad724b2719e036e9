"""The scalar rules: by hand, at the edges, and on every framework."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormplus import rules
from stormplus.rules import SimplifiedStormPlusRule, StormPlusRule, StormRule, Sum, Sums, make_rule

NAMES = ("storm+", "simplified-storm+", "storm")
every_rule = pytest.mark.parametrize("rule", [make_rule(name) for name in NAMES], ids=NAMES)
# 0 and the far ends of what a gradient's norm may be, beside ordinary values
NORMS = st.one_of(st.sampled_from([0.0, 1e-20, 1e-10, 1.0, 1e10, 1e20]), st.floats(0, 1e20))


def run(rule, squares):
    sums, out = Sums(), []
    for t, (g_sq, d_sq) in enumerate(squares, start=1):
        sums, a, eta = rule(sums, g_sq, d_sq, t)
        out.append((a, eta))
    return sums, *zip(*out)


def test_storm_plus_by_hand():
    # |g|^2 = 7, 19, 37 and |d|^2 = 1, 2, 3. The sums of |g|^2 are 7, 26, 63, so
    #   a_2 = 8^(-2/3) = 1/4,  a_3 = 27^(-2/3) = 1/9,  a_4 = 64^(-2/3) = 1/16.
    # The sums of |d|^2/a are 1*4 = 4, 4 + 2*9 = 22, 22 + 3*16 = 70.
    sums, gains, steps = run(StormPlusRule(), [(7.0, 1.0), (19.0, 2.0), (37.0, 3.0)])
    assert gains == pytest.approx([1 / 4, 1 / 9, 1 / 16], rel=1e-15)
    assert steps == pytest.approx([s ** (-1 / 3) for s in (4, 22, 70)], rel=1e-15)
    assert sums.sum_g_sq.total == 63
    assert sums.sum_d_sq_over_a.total == pytest.approx(70, rel=1e-15)
    # The same formulas work elementwise.
    _, a, eta = StormPlusRule()(Sums(), np.array([7.0, 0.0]), np.array([1.0, 0.0]), 1)
    assert a == pytest.approx([1 / 4, 1])
    assert eta == pytest.approx([4 ** (-1 / 3), 1])


def test_simplified_storm_plus_by_hand():
    # a_2 = 1, a_3 = 2^(-2/3), a_4 = 3^(-2/3), whatever |g| is. With |d|^2 = 8, 0, 1 the sums
    # of |d|^2/a are 8, 8, 8 + 3^(2/3) = 10.0800838..., so eta = 1/2, 1/2, 10.08..^(-1/3).
    _, gains, steps = run(SimplifiedStormPlusRule(), [(5.0, 8.0), (1e9, 0.0), (0.0, 1.0)])
    assert gains == pytest.approx([1, 0.6299605249474366, 0.4807498567691361])
    assert steps == pytest.approx([0.5, 0.5, 10.080083823051904 ** (-1 / 3)])


def test_storm_by_hand():
    # theta = 2, w = 1, c = 3, L = 0.5, |g|^2 = 7, 19, 37: the cube roots of 8, 27, 64 are
    # 2, 3, 4, so eta = 1, 2/3, 1/2 and c L^2 eta^2 = 3/4 * (1, 4/9, 1/4) = 3/4, 1/3, 3/16.
    rule = StormRule(theta=2.0, w=1.0, c=3.0, smoothness=0.5)
    _, gains, steps = run(rule, [(7.0, 1.0), (19.0, 1.0), (37.0, 1.0)])
    assert steps == pytest.approx([1, 2 / 3, 1 / 2], rel=1e-15)
    assert gains == pytest.approx([3 / 4, 1 / 3, 3 / 16], rel=1e-15)
    # the default constants at |g| = 0: eta = 0.1 / 0.1^(1/3), 100 eta^2 = 4.64, capped at a = 1
    _, gains, steps = run(StormRule(), [(0.0, 0.0)])
    assert gains == (1,)
    assert steps == pytest.approx([0.1 / 0.1 ** (1 / 3)])


@every_rule
@settings(max_examples=50, deadline=None)
@given(norms=st.lists(st.tuples(NORMS, NORMS), min_size=1, max_size=20))
def test_gain_and_step_size_are_positive_and_never_grow(rule, norms):
    _, gains, steps = run(rule, [(g * g, d * d) for g, d in [(0.0, 0.0), *norms]])
    assert all(0 < a <= 1 for a in gains)
    assert all(0 < eta < math.inf for eta in steps)
    slack = 1 + 1e-15  # one rounding of the power
    assert all(b <= a * slack for a, b in itertools.pairwise(gains))
    # While all d are zero eta is 1 by definition; from the first d that is not, it falls.
    moving = [eta for eta, (_, d) in zip(steps[1:], np.cumsum(norms, axis=0)) if d * d > 0]
    assert all(b <= a * slack for a, b in itertools.pairwise(moving))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([1e-40, 1.0, 1e20, 3.0, 1e-7, 1e7]), min_size=1, max_size=50))
def test_compensated_float32_sum_is_float64_accurate(terms):
    total = Sum(np.float32(0), np.float32(0))
    for term in terms:
        total = total.plus(np.float32(term))
    exact = math.fsum(float(np.float32(term)) for term in terms)
    assert float(total.value) + float(total.lost) == pytest.approx(exact, rel=1e-12)


def test_plain_float32_sum_would_stop_growing():
    # 2^24 + 1 is not a float32: without compensation a long run's sum stands still.
    total = Sum(np.float32(2**24), np.float32(0))
    for _ in range(100):
        total = total.plus(np.float32(1))
    assert float(total.value) + float(total.lost) == 2**24 + 100
    assert np.float32(2**24) + np.float32(1) == np.float32(2**24)


@every_rule
def test_numpy_and_torch_agree_with_floats(rule):
    torch = pytest.importorskip("torch")
    squares = [(7.0, 1.0), (0.0, 0.0), (1e40, 1e20), (1e-40, 1e-40)]
    sums, *expected = run(rule, squares)
    for make in (np.float64, lambda v: torch.tensor(v, dtype=torch.float64)):
        others, *found = run(rule, [(make(g), make(d)) for g, d in squares])
        np.testing.assert_allclose([[float(v) for v in row] for row in found], expected, rtol=1e-14)
        assert float(others.sum_g_sq.total) == sums.sum_g_sq.total


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan, "1", None])
@pytest.mark.parametrize("name", ["theta", "w", "c", "smoothness"])
def test_storm_refuses_constants(name, bad):
    with pytest.raises(ValueError, match=f"{name} must be a positive finite number, got"):
        StormRule(**{name: bad})


@pytest.mark.parametrize(
    "constants", [{"smoothness": 1e-170}, {"smoothness": 1e170}, {"smoothness": 1e10, "c": 1e300}]
)
def test_storm_refuses_constants_whose_gain_is_no_number(constants):
    with pytest.raises(ValueError, match=r"eta\^2 must be positive and finite, got (0|inf)"):
        StormRule(**constants)


def test_names_and_options_are_checked():
    assert make_rule("storm", theta=0.5) == StormRule(theta=0.5)
    assert StormRule(theta=np.float32(0.5), w=1) == StormRule(theta=0.5, w=1.0)
    assert json.dumps(rules.describe(StormRule(theta=np.float32(0.5))))  # a checkpoint has it
    with pytest.raises(ValueError, match=r"method must be one of storm\+, .*, got 'adam'"):
        make_rule("adam")
    with pytest.raises(TypeError, match=r"'storm\+' has no option theta; it takes none"):
        make_rule("storm+", theta=0.5)


def test_describe_names_the_class_and_its_fields():
    fields = {"theta": 0.5, "w": 0.1, "c": 100.0, "smoothness": 1.0}
    told = {"rule": "StormRule"} | {f"rule.{name}": value for name, value in fields.items()}
    assert rules.describe(StormRule(theta=0.5)) == told
    for nameless in (lambda *_: None, StormRule):
        with pytest.raises(TypeError, match="a rule must be an object of a frozen dataclass"):
            rules.describe(nameless)


def test_untuned_scales_by_hand():
    assert [rules.natural_scale(inputs) for inputs in (0, 1, 4, 25)] == [1, 1, 1 / 2, 1 / 5]
    # the larger of the two, elementwise too
    assert rules.distance_ceiling(3.0, 0.5) == 3
    assert rules.distance_ceiling(0.0, 0.5) == 0.5
    assert rules.distance_ceiling(np.array([1e-20, 1e20]), 0.5).tolist() == [0.5, 1e20]
    assert rules.first_distance(3.0) == pytest.approx(0.05, rel=1e-15)  # a sixtieth of it
    # the largest so far, never above the ceiling
    assert rules.next_distance(0.1, 0.05, 2.0) == 0.1
    assert rules.next_distance(0.1, 0.7, 2.0) == 0.7
    assert rules.next_distance(0.1, 9.0, 2.0) == 2
    assert rules.next_distance(2.0, 2.0, 2.0) == 2


def test_untuned_steps_by_hand():
    # 3 / sqrt(1 + 8) = 1; the first step has nothing before it; a sixtieth of 12 is 0.2, and with
    # evidence of 2 three times that
    assert rules.untuned_step_size(3.0, 8.0, 100.0, 0.0) == pytest.approx(1, rel=1e-15)
    assert rules.untuned_step_size(0.01, 0.0, 1.0, 0.0) == 0.01
    assert rules.untuned_step_size(3.0, 8.0, 12.0, 0.0) == pytest.approx(0.2, rel=1e-15)
    assert rules.untuned_step_size(3.0, 8.0, 12.0, 2.0) == pytest.approx(0.6, rel=1e-15)
    assert rules.untuned_step_size(3.0, 8.0, 12.0, 1e9) == pytest.approx(1, rel=1e-15)
    assert [rules.counted_step(square) for square in (0.0, 0.25, 1.0, 7.0)] == [0, 0.25, 1, 1]
    assert [rules.unit_weight(t) for t in (1, 4, 28)] == [1, 0.5, 0.1]  # 3 / (t + 2)
    assert [rules.average_weight(t) for t in (1, 10, 82)] == [1, 0.5, 0.1]  # 9 / (t + 8)
    # 0.1 * 0.02 at the natural scale; a tensor four times that has four times the step, and the
    # same decay; and never more than all of it
    assert rules.decay_factor(0.1, 0.02, 0.5, 0.5) == pytest.approx(0.002, rel=1e-15)
    assert rules.decay_factor(0.1, 0.08, 0.5, 2.0) == pytest.approx(0.002, rel=1e-15)
    assert rules.decay_factor(1e9, 0.02, 0.5, 0.5) == 1
    assert rules.decay_factor(0.0, 0.02, 0.5, 0.5) == 0


def test_agreement_by_hand():
    def agreement(moved, walk):
        arrays = (np.array([float(v)]) for v in (moved, walk))
        return float(rules.least_agreement(*arrays, np.array([True])))

    # Nine steps of 2: in one direction they lead to 18, at random to 2 sqrt(9) = 6.
    assert agreement(18, 9 * 2**2) == 8
    assert agreement(6, 9 * 2**2) == 0
    assert agreement(0, 9 * 2**2) == 0  # and never below
    assert agreement(0, rules.FIRST_WALK) == 0
    assert agreement(1, rules.FIRST_WALK) == 0  # weight decay alone


@pytest.mark.parametrize(
    ("ratio", "walk", "axes", "least"),
    [
        ([5, 2, 3], [1, 1, 1], [2, 4, 2], 1),
        ([5, 2, 3], [1, 1, 1], [2, 1, 2], 2),  # a vector has no say
        ([5, 2, 3], [1, 0, 1], [2, 2, 2], 2),  # nor has what has not moved
        ([5, 2, 3], [1, 1, 1], [1, 0, 1], 1),  # unless there is no matrix
        ([5, 2, 3], [0, 1, 1], [2, 1, 1], 0),  # one that never moves is no evidence
        ([0, 0, 0], [0, 0, 0], [2, 2, 1], 0),  # before the first step
        ([5, math.inf, math.nan], [1, 1, 1], [2, 2, 2], 4),  # their owners are told another way
        ([5, 1e30], [1, 1], [2, 2], 4),
        ([], [], [], 0),
    ],
)
def test_the_least_agreement_by_hand(ratio, walk, axes, least):
    walk = np.array(walk, float) + rules.FIRST_WALK
    moved = np.sqrt(np.array(ratio, float) * walk)
    arrays = [moved, walk, np.array(rules.asked(axes), bool)]
    assert rules.least_agreement(*arrays) == pytest.approx(least, abs=1e-14)
    jnp = pytest.importorskip("jax.numpy")
    found = rules.least_agreement(*map(jnp.asarray, arrays))
    assert float(found) == pytest.approx(least, abs=1e-6)


def test_noise_is_no_evidence_and_a_direction_is():
    """A walk of a thousand coordinates, with a tenth of signal in its squared steps, or none."""
    noise, asked = np.random.default_rng(0).standard_normal((300, 1000)), np.array([True])
    for signal, low, high in ((0.0, 0.0, 0.1), (0.3, 20.0, 30.0)):
        moved = np.sqrt(np.mean(np.cumsum(noise + signal, 0) ** 2, 1, keepdims=True))
        walk = np.cumsum(np.mean((noise + signal) ** 2, 1, keepdims=True), 0)
        found = [float(rules.least_agreement(*pair, asked)) for pair in zip(moved, walk)]
        # By hand: t^2 signal^2 + t, over t (1 + signal^2), less 1, is (t - 1) times this.
        expected = np.arange(300) * signal**2 / (1 + signal**2)
        np.testing.assert_allclose(found, expected, atol=0.15 + 0.1 * expected.max())
        assert low <= found[-1] <= high


def test_the_unit_holds_a_coordinate_within_a_root_of_the_steps():
    # One gradient after t - 1 of zero: s^2 = 3 / (t + 2) g^2, so (g / s)^2 = (t + 2) / 3.
    for t in (1, 10, 1000):
        assert 1 / rules.unit_weight(t) == pytest.approx((t + 2) / 3, rel=1e-15)


def test_the_average_weighs_the_iterates_as_t_to_the_eighth():
    # The t-th has c_t times all (1 - c_k) after it. By hand, of 3 iterates: c = 1, 0.9, 9/11, so
    # the weights are 0.1 * 2/11, 0.9 * 2/11, 9/11 = 1/55, 9/55, 45/55.
    weights = np.zeros(3)
    for t in (1, 2, 3):
        c = rules.average_weight(t)
        weights *= 1 - c
        weights[t - 1] = c
    assert weights == pytest.approx([1 / 55, 9 / 55, 45 / 55], rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**8))
def test_the_sample_has_no_factor_in_common_with_the_size_and_is_small(size):
    stride = rules.sample_stride(size)
    assert 1 <= stride <= max(1, size // 4096)
    assert math.gcd(stride, size) == 1 or size == 0
    # The worst is 60060 = 2 * 2 * 3 * 5 * 7 * 11 * 13: no number from 14 down to 2 will do.
    assert min(size, 4096) <= -(-size // stride) <= 60060


def test_the_sample_by_hand():
    assert rules.sample_stride(60060) == 1
    assert rules.sample_stride(0) == rules.sample_stride(8191) == 1
    assert rules.sample_stride(2**20) == 255  # 256 divides it, as 2 does; 255 does not
    assert rules.sample_stride(4096 * 25) == 23  # 25 and 24 have factors in common with it


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_larger_and_the_smaller_of_two_are_one_of_them(dtype):
    """Never a difference of the two: that of 1e20 and 1 is 1e20."""
    numbers = np.array([0, 1e-20, 1e-3, 0.3, 1, 1e3, 3e7, 1e20, 1e30], dtype)
    r, measured, ceiling = np.meshgrid(numbers, numbers, numbers)
    expected = np.minimum(np.maximum(r, measured), ceiling)
    np.testing.assert_array_equal(rules.next_distance(r, measured, ceiling), expected)
    np.testing.assert_array_equal(rules.distance_ceiling(r, ceiling), np.maximum(r, ceiling))
    np.testing.assert_array_equal(rules.counted_step(numbers), np.minimum(numbers, 1))
    assert rules.next_distance(r, measured, ceiling).dtype == dtype
    assert rules.decay_factor(1e30, 1.0, 1.0, 1.0) == 1


@pytest.mark.parametrize("framework", ["floats", "numpy", "torch", "jax", "jax, compiled"])
def test_a_nan_stays_one_in_every_framework(framework):
    """Else a step from parameters that are not finite would be taken."""
    pick = rules.next_distance
    if framework.startswith("jax"):
        jax = pytest.importorskip("jax")
        pick = jax.jit(pick) if "compiled" in framework else pick
    array = {
        "floats": float,
        "numpy": np.array,
        "torch": lambda x: pytest.importorskip("torch").tensor(x),
    }.get(framework, lambda x: pytest.importorskip("jax").numpy.array(x))
    for place in range(3):
        numbers = [1.0, 2.0, 3.0]
        numbers[place] = math.nan
        assert math.isnan(float(pick(*map(array, numbers))))


def test_untuned_formulas_are_the_same_in_every_framework():
    torch = pytest.importorskip("torch")
    a, b, c = np.array([0.02, 3.0, 0.0]), np.array([5.0, 0.0, 1.0]), np.array([0.5, 2.0, 1.0])
    natural = 0.5
    for formula, arguments in (
        (rules.distance_ceiling, (a, b)),
        (rules.next_distance, (a, b, c)),
        (rules.untuned_step_size, (a, b, c, a)),
        (rules.counted_step, (a,)),
        (rules.decay_factor, (a, b, natural, c)),
    ):
        expected = [
            formula(*(v if isinstance(v, float) else float(v[i]) for v in arguments))
            for i in range(3)
        ]
        ours = formula(*arguments)
        tensors = (v if isinstance(v, float) else torch.from_numpy(v) for v in arguments)
        np.testing.assert_allclose(ours, expected, rtol=1e-15)
        np.testing.assert_allclose(formula(*tensors).numpy(), expected, rtol=1e-15)
