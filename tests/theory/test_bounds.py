"""The paper's statements about runs, on problems that meet its assumptions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormplus.theory import bounds, lemmas, trace_run
from stormplus.theory.bounds import main_theorem_constants, square_sums, sum_of_gradients
from stormplus.theory.problems import BoundedNonConvex

METHODS = ("storm+", "simplified-storm+", "storm")
few, one_of = settings(max_examples=25, deadline=None), st.sampled_from
profiles = one_of(["well", "ripple"])


@few
@given(one_of(METHODS), one_of([0.0, 1e-20, 0.3, 10.0]), one_of([1e-20, 0.3, 3.0]), profiles)
def test_equation_error_dynamics(method, sigma, lr, profile):
    """eps_t = (1 - a_t) eps_{t-1} + a_t (g_t - g_bar_t) + (1 - a_t) Z_t, to rounding."""
    trace = trace_run(BoundedNonConvex(5, sigma, profile=profile), 60, method=method, lr=lr)
    residual = bounds.error_dynamics(trace)
    scale = np.abs(trace.d).max() + np.abs(trace.g).max()
    assert np.abs(residual).max() <= 20 * np.finfo(float).eps * scale
    if sigma >= 0.3 and lr == 3.0:  # Z_t is not 0 here, and without it the identity fails
        without = residual + (1 - trace.gain[1:-1, None]) * trace.z
        assert np.abs(without).max() > 1e-2


@few
@given(
    one_of(METHODS[:2]), one_of([0.0, 0.1, 1.0, 10.0]), one_of([1e-3, 1.0, 100.0]),
    one_of([0.1, 1.0, 5.0]), one_of([1, 2, 100]), profiles, st.integers(0, 3),
)  # fmt: skip
def test_lemma_sun_grad_storm_p(method, sigma, height, lr, steps, profile, seed):
    """On real runs with known L and B; `lr` is ours, and 1 is the paper's statement."""
    shape = {"profile": profile, "height": height, "seed": seed}
    problem, quiet = (BoundedNonConvex(4, noise, **shape) for noise in (sigma, 0.0))
    trace = trace_run(problem, steps, method=method, lr=lr, rng=seed)
    # The lemma speaks of f, whose smoothness is that of the problem without noise.
    smoothness, known = quiet.constants.smoothness, problem.constants
    assert smoothness <= known.smoothness
    assert sum_of_gradients(trace, smoothness, known.value_range, lr).holds(1e-12)


def test_lemma_sun_grad_storm_p_where_it_is_tight():
    """Not vacuous: a tenth of B would be refuted, the descent term carries the bound here."""
    problem = BoundedNonConvex(1, 0.0, profile="ripple", height=1.0)
    trace = trace_run(problem, 200, x0=problem.data["centre"] + np.pi - 1e-2, lr=0.05)
    assert sum_of_gradients(trace, 1.0, 2.0, lr=0.05).holds()
    assert not sum_of_gradients(trace, 0.0, 0.05, lr=0.05).holds()


@few
@given(one_of([1e-20, 1e-3, 1.0, 1e3]), one_of([1, 10, 300]), profiles, one_of([1, 20]))
def test_theorem_offline(height, steps, profile, dim):
    """sigma = 0: sum |g_bar_t|^2 is bounded by a constant of L and B, for every T."""
    problem = BoundedNonConvex(dim, 0.0, profile=profile, height=height)
    trace = trace_run(problem, steps)
    # Rounding aside, d_t is the exact gradient ("one can directly show by induction").
    assert np.abs(trace.error).max() <= 1e-12 * np.abs(trace.d).max()
    known = problem.constants.smoothness, problem.constants.value_range
    inequality, bound = bounds.offline_sum(trace, *known), bounds.offline_sum_bound(*known)
    assert inequality.holds(1e-12)
    assert inequality.left <= bound
    # The theorem's form, by Jensen: the mean over the iterates.
    mean = np.linalg.norm(trace.g_bar, axis=1).mean()
    assert mean <= (bound / steps) ** 0.5 * (1 + 1e-12)


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(1e-9, 1e9))
def test_theorem_offline_closed_form(smoothness, value_range, factor):
    """A sum beyond the closed form breaks the last line of Eq. (OfflineCase)."""
    s = (1 + factor) * bounds.offline_sum_bound(smoothness, value_range)
    assert s > value_range * (1 + s) ** (2 / 9) * s ** (1 / 3) + smoothness * s ** (2 / 3)


def all_signs(dim):
    """Every sample of a BoundedNonConvex: shape (2, samples, dim)."""
    return np.array(np.meshgrid(*[[-1.0, 1.0]] * (2 * dim))).reshape(2, dim, -1).swapaxes(1, 2)


def test_equation_eps_recurse_1_is_false_without_its_second_expectation():
    """Printed without E on the right, t = 1 (a_1 = 1, eps_0 = 0) reads
    E|g_1 - g_bar_1|^2 <= |g_1 - g_bar_1|^2 for every sample: false when noise varies."""
    problem = BoundedNonConvex(1, 1.0)
    x = problem.data["centre"] + 0.5
    noise_sq = (problem.grad(x, all_signs(1)) - problem.full_grad(x)) ** 2
    assert noise_sq.min() < 0.1 * noise_sq.mean()
    assert noise_sq.mean() <= problem.constants.noise**2


@few
@given(st.integers(0, 20), one_of([0.1, 1.0, 10.0]), one_of(METHODS[:2]))
def test_equation_eps_recurse_1_and_the_martingales(seed, sigma, method):
    """With E, and the expectation over xi_t exact: all 2^(2 dim) samples are enumerated."""
    dim, t = 2, 12
    problem = BoundedNonConvex(dim, sigma, seed=seed)
    trace = trace_run(problem, t, method=method, rng=seed)
    a, x, x_old = trace.gain[t - 1], trace.x[t - 1], trace.x[t - 2]
    d_old, error_old = trace.d[t - 2], trace.error[t - 2]
    g, g_tilde = (problem.grad(point, all_signs(dim)) for point in (x, x_old))  # a row per sample
    g_bar, g_bar_old = problem.full_grad(x), problem.full_grad(x_old)
    z, noise = (g - g_tilde) - (g_bar - g_bar_old), g - g_bar
    error_sq, z_sq, noise_sq = (
        square_sums(v) / len(v) for v in (g + (1 - a) * (d_old - g_tilde) - g_bar, z, noise)
    )
    move_sq, smoothness = float(np.sum((x - x_old) ** 2)), problem.constants.smoothness
    line_1 = (1 - a) ** 2 * error_old @ error_old
    line_2 = line_1 + 2 * (1 - a) ** 2 * z_sq + 2 * a**2 * noise_sq
    line_3 = (1 - a) * error_old @ error_old + 8 * smoothness**2 * move_sq + 2 * a**2 * sigma**2
    assert error_sq <= line_2 * (1 + 1e-12)
    assert line_2 <= line_3 * (1 + 1e-12)
    # |Z_t| <= 2 L |x_t - x_{t-1}| for every sample. Beyond the paper: E|Z|^2 is a variance, so
    # L^2 |move|^2 bounds it, without the 4.
    assert (z * z).sum(-1).max() <= 4 * smoothness**2 * move_sq * (1 + 1e-12)
    assert z_sq <= smoothness**2 * move_sq * (1 + 1e-12)
    # M_t and Y_t are martingale differences: E[M_t | H_{t-1}] = E[Y_t | H_{t-1}] = 0.
    m = 2 * (1 - a) * ((1 - a) * z + a * noise) @ error_old
    y = 2 * (a**-0.5 - a**0.5) * ((1 - a) * z / a**0.5 + a**0.5 * noise) @ error_old
    for values in (m, y):
        assert abs(values.mean()) <= 1e-12 * np.abs(values).max()


@few
@given(st.integers(0, 20), one_of([0.1, 1.0, 10.0]), one_of([0.01, 1.0]), one_of([1, 2, 60]))
def test_equations_eps_tau_star_basis_full_eps_basis_and_zt_bound_1(seed, sigma, height, steps):
    """On every run, without an expectation. eps_0 and Z_1 are 0."""
    problem = BoundedNonConvex(3, sigma, height=height, seed=seed)
    smoothness, grad_bound = problem.constants.smoothness, problem.constants.grad_bound
    trace = trace_run(problem, steps, rng=seed)
    a, a_next, error = trace.gain[:-1], trace.gain[1:], trace.error
    error_old, z = (np.vstack([0 * error[:1], rows]) for rows in (error[:-1], trace.z))
    noise = trace.g - trace.g_bar
    error_sq, z_sq, noise_sq = ((v * v).sum(1) for v in (error, z, noise))
    fresh = (1 - a)[:, None] * z + a[:, None] * noise
    m = 2 * (1 - a) * (error_old * fresh).sum(1)  # M_t; Y_t is M_t / a_t
    last = lemmas.tau_star(trace.gain.tolist(), grad_bound)
    left = lemmas.beta(grad_bound) * error_sq[:last].sum()
    middle = error_sq[last - 1] + (a_next * error_sq)[: last - 1].sum()
    right = 2 * z_sq.sum() + 2 * (a**2 * noise_sq).sum() + m[:last].sum()
    assert left <= middle * (1 + 1e-12)
    assert middle <= right * (1 + 1e-9)  # m cancels
    full = ((1 / a_next - 1 / a) * error_sq).sum() - error_sq[-1] / a[-1]
    full += ((2 * z_sq + m) / a + 2 * a * noise_sq).sum()
    assert square_sums(error_old) <= full + 1e-9 * error_sq.sum() / a[-1]
    total = (1 + square_sums(trace.g)) ** (2 / 9) * square_sums(trace.d) ** (1 / 3)
    assert (z_sq / a).sum() <= 12 * smoothness**2 * total


@pytest.mark.parametrize("sigma", [0.1, 1.0])
@pytest.mark.parametrize("height", [0.1, 1.0])
@pytest.mark.parametrize("steps", [1, 20, pytest.param(400, marks=pytest.mark.long)])
def test_equations_eps_final_part_a_eps_bound_first_part_and_final_form(sigma, height, steps):
    """E is the mean over 20 runs; the right sides are larger by orders of magnitude."""
    problem = BoundedNonConvex(3, sigma, height=height)
    smoothness, grad_bound = problem.constants.smoothness, problem.constants.grad_bound

    def traces(method):
        return [trace_run(problem, steps, method=method, rng=seed) for seed in range(20)]

    found = [
        bounds.expected_error_simplified(traces("simplified-storm+"), smoothness, sigma),
        *bounds.expected_error(traces("storm+"), smoothness, grad_bound),
    ]
    assert all(inequality.left > 0 and inequality.holds() for inequality in found)


def test_constants_of_the_main_theorem_and_of_the_first_error():
    printed = main_theorem_constants(0.0, 1.0, 0.0, as_printed=True)
    corrected = main_theorem_constants(0.0, 1.0, 0.0)
    # kappa = 0 as printed, "no dependence on sigma": false, see docs/theory.md.
    assert [*printed, *corrected] == [0, 2, 1, 2]
    # prod (1 - a_i) with |g| = G is exp(-3 t^(1/3) / G^(4/3)): half is left at 0.0123 G^4.
    weights = np.cumprod(1 - (1 + 30.0**2 * np.arange(1, 20_000)) ** (-2 / 3))
    half = int(np.argmax(weights < 0.5)) + 1
    assert half == pytest.approx((np.log(2) / 3) ** 3 * 30.0**4, rel=0.25)
