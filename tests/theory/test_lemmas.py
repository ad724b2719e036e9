"""The paper's statements on sequences. docs/theory.md tells what was found."""

from decimal import Context, Decimal, localcontext

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stormplus.rules import StormPlusRule, Sums
from stormplus.theory import lemmas

# Zeros, 1e-20 and 1e20 come up often among ordinary numbers.
term = st.one_of(
    st.sampled_from([0.0, 1e-20, 1.0, 1e20]), st.floats(1e-20, 1e20), st.floats(0.01, 100.0)
)
positive = term.filter(lambda b: b > 0)
terms = st.lists(term, min_size=1, max_size=30)
power = st.one_of(st.sampled_from([1e-6, 1 / 3, 2 / 3, 1 - 1e-6]), st.floats(0.01, 0.99))
few = settings(max_examples=60, deadline=None)
# With smaller constants than the paper prints, where docs/theory.md says so.
STATEMENTS = {
    "technical-1": lambda b, first, p: lemmas.technical_1(b, p),
    "shifted-technical-1": lambda b, first, p: lemmas.shifted_technical_1(b, first, p, factor=1),
    "ConstSum": lambda b, first, p: lemmas.const_sum(b, constant=3),
    "ConstSum_Delayed": lambda b, first, p: lemmas.const_sum_delayed(b, constant=3, multiple=1),
}


def decimals(value):
    return [Decimal(v) for v in value] if isinstance(value, list) else Decimal(value)


def check(inequality, *arguments):
    """True in 80 digits with no slack, and in float64 up to rounding."""
    with localcontext(Context(prec=80)):
        exact = inequality(*map(decimals, arguments))
        assert exact.holds(1e-60), f"false, and not by rounding: {exact}"
    rounded = inequality(*arguments)
    # n sums and n powers, each right to an ulp or so.
    assert rounded.holds(1e-12), f"rounding beyond 1e-12: {rounded}"


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
@few
@given(terms, positive, power)
@example([0.0], 1.0, 0.5)
@example([0.0, 1.0], 1.0, 0.5)
@example([1.0], 1.0, 0.5)
@example([0.9, 1.0], 1.0, 2 / 3)
@example([1e20, 1e20], 1.0, 0.5)
@example([1e20, 1e-20], 1e-20, 2 / 3)
def test_lemmas_on_sequences(statement, b, first, p):
    check(statement, b, first, p)


def test_lemma_shifted_technical_1_proof_line_3_is_false_as_printed():
    """Case 2, since b_0 = 0.9 < b = 1, with b = (0.9, 1, 1), p = 1/2 and so T_0 = 3."""
    inequality = lemmas.shifted_technical_1([0.9, 1.0, 1.0], 0.9, 0.5)
    assert inequality.left == pytest.approx(0.9**0.5 + 1.8**-0.5 + 2.8**-0.5)  # 2.292
    # Line 3 is b / b_0^p + sum_{i >= T_0} b_i / ((b + sum_{j<i} b_j) / 2)^p.
    line_3 = 0.9**-0.5 + ((1 + 1.9) / 2) ** -0.5  # 1.885
    assert inequality.left > 1.2 * line_3
    assert inequality.holds()


def test_lemmas_technical_1_and_const_sum_are_tight():
    # A right sum of the integral of s^(-p): both sides agree as n grows.
    inequality = lemmas.technical_1([1.0] * 100_000, 2 / 3)
    assert inequality.left > 0.98 * inequality.right
    # A geometric sequence of ratio 1.001: a fine grid up to 1e6.
    assert 2.98 < lemmas.const_sum([0.001 * 1.001**i for i in range(21_000)]).left < 3


@few
@given(positive, positive, st.one_of(st.sampled_from([1e-6, 1e6]), st.floats(0.001, 1000)))
def test_equation_youngs_inequality_version(a, b, rho):
    check(lemmas.young, a, b, rho)


@few
@given(st.floats(1e-3, 1e3), positive, positive)
def test_equations_zt_bound_2_app_and_case_2_app_1_constants(constant, a, b):
    """rho^3 = 512 L^2 gives 512 L^3 and 1/128; rho^3 = 128 B / 3 gives 20 B^(3/2) and 1/64."""
    right = lemmas.young(a, b, (512 * constant**2) ** (1 / 3)).right * 12 * constant**2
    # The first constant is 12 (2/3) sqrt(512) = 181, not 512.
    assert right <= (182 * constant**3 * a ** (1 / 3) + b / 128) * (1 + 1e-12)
    # The other is 2 (2/3) sqrt(128 / 3) = 8.71, not 20.
    right = 2 * constant * lemmas.young(a, b, (128 * constant / 3) ** (1 / 3)).right
    assert right <= (8.72 * constant**1.5 * a ** (1 / 3) + b / 64) * (1 + 1e-12)


@few
@given(terms, st.one_of(st.just(1.0), st.floats(1.0, 10.0)))
@example([0.0], 1.0)
@example([1e20], 1.0)
@example([1.0, 1.0, 1.0], 1.0)
@example([4.0] * 30, 1.0)
def test_lemma_ats_tau_star(g_sq, slack):
    """Both parts; the gains are the rule's; tau* <= t is decided by a_{t+1}: a stopping time."""
    with localcontext(Context(prec=80)):
        grad_bound = Decimal(max(g_sq)).sqrt() * Decimal(slack)  # G: any bound will do
        first, second = lemmas.ats_tau_star(decimals(g_sq), grad_bound)
        assert len(first) + len(second) == len(g_sq)
        # 1/a is at most 1e15 here: its differences are right to 60 digits.
        assert all(inequality.holds(1e-60) for inequality in first + second)
    sums, expected = Sums(), [1.0]
    for t, value in enumerate(g_sq, start=1):
        sums, a, _ = StormPlusRule()(sums, value, 1.0, t)
        expected.append(a)
    gains = lemmas.gains(g_sq)
    assert gains == pytest.approx(expected, rel=1e-12)
    grad_bound = max(1.0, *g_sq) ** 0.5
    last = lemmas.tau_star(gains, grad_bound)
    assert all((last <= t) == (gains[t] < lemmas.beta(grad_bound)) for t in range(1, len(g_sq)))


def test_tau_star_grows_like_g_to_the_fourth():
    """With |g_t| = G throughout, tau* is about G^4."""
    for grad_bound in (2.0, 3.0, 5.0):
        g_sq = [grad_bound**2] * round(2 * grad_bound**4)
        last = lemmas.tau_star(lemmas.gains(g_sq), grad_bound)
        assert last == pytest.approx(grad_bound**4, rel=0.05)
        _, second = lemmas.ats_tau_star(g_sq, grad_bound)  # here it has terms
        assert second
        assert all(inequality.holds(1e-9) for inequality in second)


def test_simplified_bounding_b_and_d():
    """Sec. 4.2: t^(2/3) - (t-1)^(2/3) <= 2/3 for t >= 2, and sum a_t <= 4 T^(1/3)."""
    t = np.arange(1, 10_001)
    assert (np.diff(t ** (2 / 3)) <= 2 / 3).all()
    a = np.array([1.0, *(t[:-1] ** (-2 / 3))])
    assert (a.cumsum() <= 4 * t ** (1 / 3)).all()
