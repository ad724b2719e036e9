"""Sequences for the lemmas: zeros, 1e-20 and 1e20 among ordinary numbers, n = 1 too."""

from decimal import Decimal, localcontext
from functools import wraps

from hypothesis import strategies as st

# The ends of the range come up often, not once in a blue moon.
term = st.one_of(
    st.sampled_from([0.0, 1e-20, 1.0, 1e20]),
    st.floats(1e-20, 1e20),
    st.floats(0.01, 100.0),
)
positive = term.filter(lambda b: b > 0)
terms = st.lists(term, min_size=1, max_size=40)
power = st.one_of(st.sampled_from([1e-6, 1 / 3, 2 / 3, 1 - 1e-6]), st.floats(0.01, 0.99))


def in_80_digits(function):
    """Run a test body with 80 decimal digits: what is false there is false, not rounded."""

    @wraps(function)
    def run(*args, **kwargs):
        with localcontext() as context:
            context.prec = 80
            return function(*args, **kwargs)

    return run


def decimals(value):
    return [Decimal(v) for v in value] if isinstance(value, (list, tuple)) else Decimal(value)


@in_80_digits
def check(inequality, *arguments, **options):
    """True in 80 digits with no slack, and in float64 up to rounding."""
    exact = inequality(*(decimals(a) for a in arguments), **options)
    assert exact.holds(1e-60), f"false, and not by rounding: {exact}"
    rounded = inequality(*arguments, **options)
    # n sums and n powers, each right to an ulp or so.
    assert rounded.holds(1e-12), f"rounding beyond 1e-12: {rounded}"
