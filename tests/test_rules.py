"""The scalar rules: by hand, at the edges, and on every framework."""

import itertools
import json
import math
from dataclasses import make_dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormplus import rules
from stormplus.rules import (
    AdaStormRule,
    MetaStormNARule,
    MetaStormSGRule,
    NormalizedStormRule,
    SimplifiedStormPlusRule,
    StormPlusRule,
    StormRule,
    Sum,
    Sums,
    make_rule,
)

REQUIRED = {"ada-storm": {"horizon": 1000}}
RULES = {name: make_rule(name, **REQUIRED.get(name, {})) for name in rules._RULES}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
# 0 and the far ends of what a gradient's norm may be, beside ordinary values
NORMS = st.one_of(st.sampled_from([0.0, 1e-20, 1e-10, 1.0, 1e10, 1e20]), st.floats(0, 1e20))


def run(rule, squares):
    sums, out = Sums(), []
    for t, (g_sq, d_sq) in enumerate(squares, start=1):
        sums, a, eta = rule(sums, g_sq, d_sq, t)
        out.append((float(a), float(eta)))
    return zip(*out)


def torch_number(value):
    torch = pytest.importorskip("torch")
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rule", "squares", "gains", "steps"),
    [
        # The sums of |g|^2 are 7, 26, 63, so a_2 = 8^(-2/3) = 1/4, a_3 = 27^(-2/3) = 1/9,
        # a_4 = 64^(-2/3) = 1/16. The sums of |d|^2/a are 1*4 = 4, 4 + 2*9 = 22, 22 + 3*16 = 70.
        (StormPlusRule(), [(7.0, 1.0), (19.0, 2.0), (37.0, 3.0)], [1 / 4, 1 / 9, 1 / 16],
         [4 ** (-1 / 3), 22 ** (-1 / 3), 70 ** (-1 / 3)]),
        # While every d is zero, so is the step: eta is taken as 1.
        (StormPlusRule(), [(0.0, 0.0)], [1], [1]),
        # a_2 = 1, a_3 = 2^(-2/3), a_4 = 3^(-2/3), whatever |g| is. The sums of |d|^2/a are 8, 8,
        # 8 + 3^(2/3).
        (SimplifiedStormPlusRule(), [(5.0, 8.0), (1e9, 0.0), (0.0, 1.0)],
         [1, 2 ** (-2 / 3), 3 ** (-2 / 3)], [0.5, 0.5, (8 + 3 ** (2 / 3)) ** (-1 / 3)]),
        # The cube roots of 1 + 7, 27, 64 are 2, 3, 4, so eta = 1, 2/3, 1/2 and
        # c L^2 eta^2 = 3/4 * (1, 4/9, 1/4) = 3/4, 1/3, 3/16.
        (StormRule(2.0, 1.0, 3.0, 0.5), [(7.0, 1.0), (19.0, 1.0), (37.0, 1.0)],
         [3 / 4, 1 / 3, 3 / 16], [1, 2 / 3, 1 / 2]),
        # The default constants: eta = 0.1 / 0.1^(1/3), 100 eta^2 = 4.64, capped at a = 1. Then
        # a = (0.1 + sum |g|^2)^(-2/3), as STORM+ with 0.1 in place of 1: 8^(-2/3).
        (StormRule(), [(0.0, 0.0), (7.9, 0.0)], [1, 1 / 4], [0.1 ** (2 / 3), 0.05]),
        # a_0 = 2, b_0 = 3, p = 1/2, q = 1/4. sum |g|^2 / 4 is 7, 26: a = 1/4, 1/9. With
        # sum |d|^2 = 7, 16: 1/b = a^(1/4) / (3^2 + 7)^(1/2), ... / (9 + 16)^(1/2).
        (MetaStormSGRule(2.0, 3.0), [(28.0, 7.0), (76.0, 9.0)], [1 / 4, 1 / 9],
         [0.5**0.5 / 4, (1 / 3) ** 0.5 / 5]),
        # p = q = 1/3 (p + 2q = 1), b_0 = 1: 1/b = a^(1/3) (1 + sum |d|^2)^(-1/3)
        (MetaStormSGRule(p=1 / 3), [(7.0, 26.0)], [1 / 4], [0.25 ** (1 / 3) / 3]),
        # a_0 = 1/7: a_2 = 8^(-2/3), a_3 = 15^(-2/3), whatever |g| is
        (MetaStormNARule(1 / 7, 3.0), [(5.0, 7.0), (1e9, 9.0)], [1 / 4, 15 ** (-2 / 3)],
         [0.5**0.5 / 4, 15 ** (-1 / 6) / 5]),
        # a move of length t^(-2/3): eta |d| = 1, 2^(-2/3)
        (NormalizedStormRule(), [(5.0, 16.0), (1.0, 9.0)], [1, 2 ** (-2 / 3)],
         [1 / 4, 2 ** (-2 / 3) / 3]),
        # T = 1000, alpha = 1/4: a = 1/100; eta = min(1/10, (1000 S)^(-1/4)) with S = sum |d|^2,
        # which is 4 and then 160. The two are equal at S = 10.
        (AdaStormRule(1000.0, 1 / 4), [(5.0, 4.0), (5.0, 156.0)], [0.01, 0.01],
         [0.1, 160_000 ** (-1 / 4)]),
    ],
    ids=lambda value: type(value).__name__ if callable(value) else "",
)  # fmt: skip
@pytest.mark.parametrize("number", [float, np.float64, torch_number])
def test_rules_by_hand(rule, squares, gains, steps, number):
    found_gains, found_steps = run(rule, [(number(g), number(d)) for g, d in squares])
    assert found_gains == pytest.approx(gains, rel=1e-12)
    assert found_steps == pytest.approx(steps, rel=1e-12)


@every_rule
@settings(max_examples=50, deadline=None)
@given(norms=st.lists(st.tuples(NORMS, NORMS), min_size=1, max_size=20))
def test_gain_and_step_size_are_positive_and_never_grow(rule, norms):
    gains, steps = run(rule, [(g * g, d * d) for g, d in [(0.0, 0.0), *norms]])
    assert all(0 < a <= 1 for a in gains)
    assert all(0 < eta < math.inf for eta in steps)
    slack = 1 + 1e-15  # one rounding of the power
    assert all(b <= a * slack for a, b in itertools.pairwise(gains))
    if isinstance(rule, NormalizedStormRule):  # the length of a move falls, not eta
        return
    # While all d are zero eta is 1 by definition; from the first d that is not, it falls.
    moving = [eta for eta, (_, d) in zip(steps[1:], np.cumsum(norms, axis=0)) if d * d > 0]
    assert all(b <= a * slack for a, b in itertools.pairwise(moving))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([1e-40, 1.0, 1e20, 3.0, 1e-7, 2.0**24]), min_size=1, max_size=50))
def test_compensated_float32_sum_is_float64_accurate(terms):
    total = Sum(np.float32(0), np.float32(0))
    for term in terms:
        total = total.plus(np.float32(term))
    exact = math.fsum(float(np.float32(term)) for term in terms)  # 2^24 + 1 is no float32
    assert float(total.value) + float(total.lost) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (partial(StormRule, **{name: bad}), f"{name} must be a positive finite number, got")
            for name in ("theta", "w", "c", "smoothness")
            for bad in (0, -1.0, math.inf, math.nan, "1", None, np.array(1.0))
        ),
        (partial(StormRule, smoothness=1e-170), r"eta\^2 must be positive and finite, got 0"),
        (partial(StormRule, smoothness=1e170), r"eta\^2 must be positive and finite, got inf"),
        (partial(MetaStormSGRule, p=0.6), "p must be between 1/4 and 1/2, got 0.6"),
        (partial(MetaStormNARule, b_0=0), "b_0 must be a positive finite number, got 0"),
        (partial(AdaStormRule, 100, alpha=0.5), "alpha must be below 1/3"),
        (partial(AdaStormRule, math.inf), "horizon must be a positive finite number, got inf"),
    ],
)
def test_constants_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_names_and_options_are_checked():
    assert RULES["storm"] == StormRule()
    assert RULES["ada-storm"] == AdaStormRule(1000, alpha=0.3)
    assert StormRule(theta=np.float32(0.5), w=1) == StormRule(theta=0.5, w=1.0)
    assert json.dumps(rules.describe(StormRule(theta=np.float32(0.5))))  # a checkpoint has it
    with pytest.raises(ValueError, match=r"method must be one of storm\+, .*, got 'adam'"):
        make_rule("adam")
    with pytest.raises(TypeError, match="argument 'theta'"):
        make_rule("storm+", theta=0.5)
    with pytest.raises(TypeError, match=r"missing .*'horizon'"):
        make_rule("ada-storm", alpha=0.2)


def test_describe_names_the_class_and_its_fields():
    fields = {"theta": 0.5, "w": 0.1, "c": 100.0, "smoothness": 1.0}
    expected = {"rule": "StormRule"} | {f"rule.{name}": value for name, value in fields.items()}
    assert rules.describe(StormRule(theta=0.5)) == expected
    odd = make_dataclass("Odd", [("field", object, None)], frozen=True)()
    for rule in (lambda *_: None, StormRule, odd):
        with pytest.raises(TypeError, match="a rule must be an instance of a frozen dataclass"):
            rules.describe(rule)
