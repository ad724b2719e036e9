"""Each test is named after the paper's statement. docs/theory.md tells what was found."""

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from theory_strategies import check, decimals, in_80_digits, positive, power, term, terms

from stormplus.rules import StormPlusRule, Sums
from stormplus.theory import (
    ats_tau_star,
    beta,
    const_sum,
    const_sum_delayed,
    gains,
    shifted_technical_1,
    shifted_technical_1_line_3,
    shifted_technical_1_sharp,
    tau_star,
    technical_1,
    young,
)


@given(terms, power)
@example([0.0], 0.5)
@example([0.0, 1.0], 0.5)
@example([1e20, 1e-20], 2 / 3)
def test_lemma_technical_1(b, p):
    check(technical_1, b, p)


def test_lemma_technical_1_is_tight_for_many_equal_terms():
    # A right sum of the integral of s^(-p): both sides agree as n grows.
    inequality = technical_1([1.0] * 100_000, 2 / 3)
    assert inequality.left > 0.98 * inequality.right


@given(terms, positive, power)
@example([1.0], 1.0, 0.5)
@example([0.9, 1.0], 1.0, 2 / 3)
@example([1e20, 1e-20], 1e-20, 2 / 3)
def test_lemma_shifted_technical_1(b, first, p):
    check(shifted_technical_1, b, first, p)


@given(terms, positive, power)
@example([0.9, 1.0], 1.0, 2 / 3)
@in_80_digits
def test_lemma_shifted_technical_1_holds_with_factor_1(b, first, p):
    """1/(1-p) in place of 2/(1-p), less b_0^(1-p)/(1-p): a smaller right side."""
    b, first, p = decimals(b), decimals(first), decimals(p)
    exact = shifted_technical_1_sharp(b, first, p)
    assert exact.holds(1e-30), f"false, and not by rounding: {exact}"
    assert exact.right <= shifted_technical_1(b, first, p).right


def test_lemma_shifted_technical_1_proof_line_3_is_false_as_printed():
    """The smallest counterexample: n = 2, b_0 = b = 1, b_1 = 9/10, b_2 = 1."""
    line = shifted_technical_1_line_3([0.9, 1.0], 1.0, 0.5)
    assert not line.holds(0.5)  # not a matter of rounding
    # 0.9 / 1 + 1 / sqrt(1.9) = 1.625 on the left, b / b_0^p = 1 on the right.
    assert float(line.left) == pytest.approx(0.9 + 1 / math.sqrt(1.9))
    assert float(line.right) == 1
    # n = 1 is no counterexample: the first term is at most b / b_0^p.
    assert shifted_technical_1_line_3([1.0], 1.0, 0.5).holds()


@given(terms)
@example([1e20])
@example([0.0])
def test_lemma_const_sum(a):
    check(const_sum, a)


@given(terms)
def test_lemma_const_sum_holds_with_3(a):
    check(const_sum, a, constant=3)


def test_lemma_const_sum_fails_below_3():
    # Steps of 0.001 up to 1e6 in effect: a geometric sequence of ratio 1.001.
    a = [0.001 * 1.001**i for i in range(21_000)]
    assert const_sum(a, constant=3).holds()
    assert const_sum(a).left > 2.98


@given(terms)
@example([1e20, 1e20])
@example([0.0])
def test_lemma_const_sum_delayed(a):
    check(const_sum_delayed, a)


@given(terms)
@example([1.0])
def test_lemma_const_sum_delayed_holds_with_3_plus_a_max(a):
    check(const_sum_delayed, a, constant=3, multiple=1)


@given(positive, positive, st.one_of(st.sampled_from([1e-6, 1e6]), st.floats(0.001, 1000)))
def test_equation_youngs_inequality_version(a, b, rho):
    check(young, a, b, rho)


@given(st.floats(1e-3, 1e3), positive, positive)
def test_equation_zt_bound_2_app_constants(smoothness, a, b):
    """rho^3 = 512 L^2 in Young's inequality gives 512 L^3 and 1/128, with room to spare."""
    rho = (512 * smoothness**2) ** (1 / 3)
    right = young(a, b, rho).right * 12 * smoothness**2
    printed = 512 * smoothness**3 * a ** (1 / 3) + b / 128
    assert right <= printed * (1 + 1e-12)
    # The first constant is 12 (2/3) sqrt(512) = 181, not 512.
    sharp = 182 * smoothness**3 * a ** (1 / 3) + b / 128
    assert right <= sharp * (1 + 1e-12)


@given(st.floats(1e-3, 1e3), positive, positive)
def test_equation_case_2_app_1_constants(value_range, a, b):
    """rho^3 = 128 B / 3 gives 20 B^(3/2) and 1/64."""
    rho = (128 * value_range / 3) ** (1 / 3)
    right = 2 * value_range * young(a, b, rho).right
    printed = 20 * value_range**1.5 * a ** (1 / 3) + b / 64
    assert right <= printed * (1 + 1e-12)


gradient_squares = st.lists(term, min_size=1, max_size=30)


@given(gradient_squares)
@example([0.0])
@example([1e20])
def test_gains_are_those_of_the_rule(g_sq):
    sums, expected = Sums(), [1.0]
    for t, value in enumerate(g_sq, start=1):
        sums, a, _ = StormPlusRule()(sums, value, 1.0, t)
        expected.append(a)
    assert gains(g_sq) == pytest.approx(expected, rel=1e-12)


@given(gradient_squares, st.one_of(st.just(1.0), st.floats(1.0, 10.0)))
@example([0.0], 1.0)
@example([1.0, 1.0, 1.0], 1.0)
@example([4.0] * 30, 1.0)
@in_80_digits
def test_lemma_ats_tau_star(g_sq, slack):
    grad_bound = Decimal(max(g_sq)).sqrt() * Decimal(slack)  # G: any bound will do
    first, second = ats_tau_star(decimals(g_sq), grad_bound)
    assert len(first) + len(second) == len(g_sq)
    # 1/a is at most 1e15 here: its differences are right to 60 digits.
    assert all(inequality.holds(1e-60) for inequality in first + second)


@given(st.floats(0.1, 4.0), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20))
@example(3.0, [1.0])
def test_lemma_ats_tau_star_second_part_on_long_runs(grad_bound, fractions):
    """Steps of every size up to G, for long enough to pass tau*, about G^4 steps."""
    pattern = [(grad_bound * fraction) ** 2 for fraction in (*fractions, 1.0)]
    # For G < 1 beta is 1; and the last gradient of a pattern alone has the norm G.
    repeats = math.ceil(2 * max(1.0, grad_bound**4))
    _, second = ats_tau_star(pattern * repeats, grad_bound)
    assert second
    assert all(inequality.holds(1e-9) for inequality in second)


def test_tau_star_grows_like_g_to_the_fourth():
    """With |g_t| = G throughout, tau* is about G^4: the memory that the units decide."""
    for grad_bound in (2.0, 3.0, 5.0):
        g_sq = [grad_bound**2] * round(2 * grad_bound**4)
        assert tau_star(gains(g_sq), grad_bound) == pytest.approx(grad_bound**4, rel=0.05)


@given(gradient_squares)
def test_tau_star_is_a_stopping_time(g_sq):
    """{tau* <= t} is decided by a_{t+1}, so by g_1..g_t: the future does not matter."""
    grad_bound = max(1.0, *g_sq) ** 0.5
    a = gains(g_sq)
    last = tau_star(a, grad_bound)
    for t in range(1, len(g_sq)):
        assert (last <= t) == (a[t] < beta(grad_bound))


def test_tau_star_needs_gains_that_never_grow():
    """With gains that may grow, time 1 does not know that tau* is 3: no stopping time."""
    grad_bound = 2**0.25  # beta = 1/2
    assert tau_star([1.0, 0.1, 0.9, 0.1], grad_bound) == 3
    assert tau_star([1.0, 0.1, 0.09, 0.08], grad_bound) == 1  # the same up to time 1


@given(st.integers(1, 10_000))
def test_simplified_bounding_b_and_d(T):
    """Sec. 4.2: t^(2/3) - (t-1)^(2/3) <= 2/3 for t >= 2, and sum a_t <= 4 T^(1/3)."""
    assert T < 2 or T ** (2 / 3) - (T - 1) ** (2 / 3) <= 2 / 3
    a = np.array([1.0, *(np.arange(1, T) ** (-2 / 3))])
    assert a.sum() <= 4 * T ** (1 / 3)
