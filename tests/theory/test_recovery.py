"""Planted solutions are found again; images too."""

import numpy as np
import pytest

from stormplus import minimize
from stormplus.theory.problems import (
    digit_phase_retrieval,
    digits_nmf,
    image_completion,
    outlier_regression,
    planted_completion,
    planted_nmf,
)


def solve(problem, steps, lr, x0=None):
    start = problem.start() if x0 is None else x0
    return minimize(problem.grad, start, problem.sample, steps, lr=lr, rng=0).x


def test_phase_retrieval_recovers_the_digit_up_to_sign():
    problem, truth = digit_phase_retrieval()
    assert problem.error(problem.start(), truth) > 0.3
    x = solve(problem, 2000, lr=3.0)
    assert problem.error(x, truth) < 1e-6
    assert problem.error(-x, truth) == pytest.approx(problem.error(x, truth))


def test_nmf_recovers_the_planted_factors_up_to_order_and_scale():
    problem, w, h = planted_nmf()
    x = solve(problem, 6000, lr=3.0)
    found_w, found_h = problem.factors(x)
    assert (found_w >= 0).all()
    assert (found_h >= 0).all()
    v = w @ h
    assert np.linalg.norm(found_w @ found_h - v) < 0.01 * np.linalg.norm(v)
    unit, found = (m / np.linalg.norm(m, axis=0) for m in (w, found_w))
    match = unit.T @ found
    assert match.max(axis=0) == pytest.approx(np.ones(3), abs=0.01)
    assert sorted(match.argmax(axis=0)) == [0, 1, 2]


def test_matrix_completion_recovers_entries_it_never_saw():
    problem, full = planted_completion()
    x = solve(problem, 2000, lr=3.0)
    seen = np.zeros(full.shape, bool)
    seen[tuple(problem.data["indices"].T)] = True
    hidden = (problem.matrix(x) - full)[~seen]
    assert np.linalg.norm(hidden) < 1e-6 * np.linalg.norm(full[~seen])


def test_robust_regression_recovers_coefficients_that_least_squares_misses():
    problem, truth = outlier_regression()
    a, y = problem.data["features"], problem.data["targets"]
    least_squares = np.linalg.lstsq(a, y, rcond=None)[0]
    x = solve(problem, 5000, lr=1.0)
    assert np.linalg.norm(least_squares - truth) > 0.3 * np.linalg.norm(truth)
    assert np.linalg.norm(x - truth) < 0.02 * np.linalg.norm(truth)


def test_image_completion_sees_half_the_pixels_and_improves_the_rest():
    problem, image = image_completion(shrink=8, rank=5)
    assert problem.n_samples == pytest.approx(image.size / 2, rel=0.05)
    start, x = problem.start(), solve(problem, 1500, lr=3.0)
    before, after = (np.linalg.norm(problem.matrix(p) - image) for p in (start, x))
    assert after < 0.45 * before


def test_digits_nmf_lowers_the_error():
    problem = digits_nmf(rank=5, images=100)
    x = solve(problem, 1500, lr=3.0)
    assert problem.full_value(x) < 0.5 * problem.full_value(problem.start())
