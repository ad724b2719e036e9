"""The scalar rules: by hand, at the edges, and on every framework."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormplus.rules import (
    SimplifiedStormPlusRule,
    StormPlusRule,
    StormRule,
    Sum,
    Sums,
    make_rule,
)

RULES = [StormPlusRule(), SimplifiedStormPlusRule(), StormRule()]
# 0 and the far ends of what a gradient's norm may be, beside ordinary values
NORMS = st.one_of(
    st.sampled_from([0.0, 1e-20, 1e-10, 1.0, 1e10, 1e20]), st.floats(0, 1e20, allow_nan=False)
)


def run(rule, squares):
    sums, out = Sums(), []
    for t, (g_sq, d_sq) in enumerate(squares, start=1):
        sums, a, eta = rule(sums, g_sq, d_sq, t)
        out.append((a, eta))
    return sums, out


def test_storm_plus_by_hand():
    # |g|^2 = 7, 19, 37 and |d|^2 = 1, 2, 3. The sums of |g|^2 are 7, 26, 63, so
    #   a_2 = 8^(-2/3) = 1/4,  a_3 = 27^(-2/3) = 1/9,  a_4 = 64^(-2/3) = 1/16.
    # The sums of |d|^2/a are 1*4 = 4, 4 + 2*9 = 22, 22 + 3*16 = 70.
    sums, out = run(StormPlusRule(), [(7.0, 1.0), (19.0, 2.0), (37.0, 3.0)])
    assert [a for a, _ in out] == pytest.approx([1 / 4, 1 / 9, 1 / 16], rel=1e-15)
    assert [eta for _, eta in out] == pytest.approx([s ** (-1 / 3) for s in (4, 22, 70)], rel=1e-15)
    assert sums.sum_g_sq.total == 63
    assert sums.sum_d_sq_over_a.total == pytest.approx(70, rel=1e-15)


def test_simplified_storm_plus_by_hand():
    # a_2 = 1, a_3 = 2^(-2/3), a_4 = 3^(-2/3), whatever |g| is. With |d|^2 = 8, 0, 1 the sums
    # of |d|^2/a are 8, 8, 8 + 3^(2/3) = 10.0800838..., so eta = 1/2, 1/2, 10.08..^(-1/3).
    _, out = run(SimplifiedStormPlusRule(), [(5.0, 8.0), (1e9, 0.0), (0.0, 1.0)])
    assert [a for a, _ in out] == pytest.approx([1, 0.6299605249474366, 0.4807498567691361])
    assert [eta for _, eta in out] == pytest.approx([0.5, 0.5, 10.080083823051904 ** (-1 / 3)])


def test_storm_by_hand():
    # theta = 2, w = 1, c = 3, L = 0.5, |g|^2 = 7, 19, 37: the cube roots of 8, 27, 64 are
    # 2, 3, 4, so eta = 1, 2/3, 1/2 and c L^2 eta^2 = 3/4 * (1, 4/9, 1/4) = 3/4, 1/3, 3/16.
    rule = StormRule(theta=2.0, w=1.0, c=3.0, smoothness=0.5)
    _, out = run(rule, [(7.0, 1.0), (19.0, 1.0), (37.0, 1.0)])
    assert [eta for _, eta in out] == pytest.approx([1, 2 / 3, 1 / 2], rel=1e-15)
    assert [a for a, _ in out] == pytest.approx([3 / 4, 1 / 3, 3 / 16], rel=1e-15)


def test_storm_caps_the_gain_at_one():
    # the default constants at |g| = 0: eta = 0.1 / 0.1^(1/3), 100 eta^2 = 4.64, so a = 1
    _, [(a, eta)] = run(StormRule(), [(0.0, 0.0)])
    assert a == 1
    assert eta == pytest.approx(0.1 / 0.1 ** (1 / 3))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_while_every_d_is_zero_the_step_is_finite(rule):
    _, out = run(rule, [(0.0, 0.0)] * 3)
    assert all(math.isfinite(eta) and eta * 0.0 == 0 for _, eta in out)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@given(norms=st.lists(st.tuples(NORMS, NORMS), min_size=1, max_size=30))
def test_gain_and_step_size_are_positive_and_never_grow(rule, norms):
    _, out = run(rule, [(g * g, d * d) for g, d in norms])
    gains, steps = zip(*out)
    assert all(0 < a <= 1 for a in gains)
    assert all(0 < eta < math.inf for eta in steps)
    slack = 1 + 1e-15  # one rounding of the power
    assert all(b <= a * slack for a, b in itertools.pairwise(gains))
    # While all d are zero eta is 1 by definition; from the first d that is not, it falls.
    moving = [eta for eta, (_, d) in zip(steps, np.cumsum(norms, axis=0)) if d * d > 0]
    assert all(b <= a * slack for a, b in itertools.pairwise(moving))


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


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_numpy_and_torch_agree_with_floats(rule):
    torch = pytest.importorskip("torch")
    squares = [(7.0, 1.0), (0.0, 0.0), (1e40, 1e20), (1e-40, 1e-40)]
    sums, out = run(rule, squares)
    for make in (np.float64, lambda v: torch.tensor(v, dtype=torch.float64)):
        others, result = run(rule, [(make(g), make(d)) for g, d in squares])
        as_floats = [[float(v) for v in pair] for pair in result]
        np.testing.assert_allclose(as_floats, out, rtol=1e-14)
        assert float(others.sum_g_sq.total) == sums.sum_g_sq.total


def test_rules_work_elementwise():
    g = np.array([7.0, 0.0])
    _, a, eta = StormPlusRule()(Sums(), g, np.array([1.0, 0.0]), 1)
    assert a == pytest.approx([1 / 4, 1])
    assert eta == pytest.approx([4 ** (-1 / 3), 1])


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan, "1", None])
@pytest.mark.parametrize("name", ["theta", "w", "c", "smoothness"])
def test_storm_refuses_constants(name, bad):
    with pytest.raises(ValueError, match=f"{name} must be a positive finite number, got"):
        StormRule(**{name: bad})


def test_storm_refuses_constants_whose_gain_overflows():
    with pytest.raises(ValueError, match="must be finite"):
        StormRule(c=1e300, smoothness=1e10)


def test_make_rule_names_what_it_takes():
    assert make_rule("storm", theta=0.5) == StormRule(theta=0.5)
    with pytest.raises(ValueError, match=r"method must be one of storm\+, .*, got 'adam'"):
        make_rule("adam")
    with pytest.raises(TypeError, match=r"'storm\+' has no option theta; it takes none"):
        make_rule("storm+", theta=0.5)
