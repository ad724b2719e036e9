"""The two theorems of docs/untuned-rule.md, on runs of the independent transcription."""

import math

import numpy as np
import pytest

from tests.support.untuned_oracle import untuned_run


def run_and_step_sizes(grad, x1, steps):
    rows = untuned_run(lambda k, blocks: [grad(k, blocks[0])], [x1], steps)
    return rows, np.array([row["eta"][0] for row in rows])


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_for_convex_problems(seed):
    """The largest residual of linear equations: convex, not smooth, its subgradients exact."""
    rng = np.random.default_rng(seed)
    a, solution, steps = rng.standard_normal((40, 10)), rng.standard_normal(10), 500
    x1 = solution + rng.standard_normal(10)

    def value(x):
        return np.abs(a @ (x - solution)).max()

    def grad(_, y):
        residuals = a @ (y - solution)
        worst = np.abs(residuals).argmax()
        return np.sign(residuals[worst]) * a[worst]

    gradients = []

    def recorded(k, y):
        gradients.append(grad(k, y))
        return gradients[-1]

    rows, alpha = run_and_step_sizes(recorded, x1, steps)
    s = np.array([row["s"][0] for row in rows])
    z = np.array([x1, *(row["z"][0] for row in rows)])
    np.testing.assert_allclose(np.diff(z, axis=0), -alpha[:, None] * gradients / s, rtol=1e-6)
    # The theorem's symbols; rows are steps.
    t = np.arange(1, steps + 1)
    a_t = alpha * np.sqrt(t)
    d = np.abs(z - solution).max(0)
    w = np.array([math.prod(range(k - 1, k + 7)) for k in t], float)
    mu = w[:, None] * s * np.sqrt(t)[:, None]
    rises = np.maximum(np.diff(mu / a_t[:, None], axis=0, prepend=0.0), 0).sum(0)
    bound = s[-1] / math.sqrt(steps) * (4.5 * d**2 * rises / mu[-1] + 3 * a_t.max())
    # The average of z_2, ..., z_T, which the row before the last has.
    average = (w[:, None] * z[:-1]).sum(0) / w.sum()
    np.testing.assert_allclose(rows[-2]["average"][0], average, rtol=1e-9)
    assert value(average) <= bound.sum()
    # Once a grows slowly the rises are mu / a at the end, so the bound is that of the theorem.
    slow = a_t[51:] <= (1 + 7 / t[51:]) * a_t[50:-1]
    assert slow.all()
    np.testing.assert_allclose(rises, mu[-1] / a_t[-1], rtol=1e-4)


LAWS = {
    "normal": lambda rng: rng.standard_normal(50),
    "in one direction": lambda rng: np.full(50, rng.standard_normal()),
    "Cauchy": lambda rng: rng.standard_cauchy(50),
    "Cauchy in one direction": lambda rng: np.full(50, rng.standard_cauchy()),
}


@pytest.mark.parametrize("law", LAWS)
def test_symmetric_noise_of_any_law_stays_near_the_start(law):
    delta = 1e-3
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x1 = rng.standard_normal(50)
        noise = [LAWS[law](rng) for _ in range(500)]
        rows, _ = run_and_step_sizes(lambda k, _, noise=noise: noise[k], x1, len(noise))
        z = np.array([x1, *(row["z"][0] for row in rows)])
        unit = np.mean(x1**2) / 200**2
        v = np.cumsum(np.mean(np.diff(z, axis=0) ** 2, 1))
        far = np.mean((z[1:] - x1) ** 2, 1)
        assert (far <= (v + unit) * (np.log1p(v / unit) + 2 * math.log(1 / delta))).all()


def skewed(rng):
    return np.where(rng.random(400) < 0.02, 49.0, -1.0)


T = np.arange(1, 401)
ANY = {  # one number per step, the same in all coordinates
    "skewed noise": skewed(np.random.default_rng(0)),
    "Cauchy": np.random.default_rng(0).standard_cauchy(400),
    "constant": np.ones(400),
    "growing": T**10.0,
    "large, then constant": np.where(T == 1, 1e3, 1.0),
    "zero, then constant": np.where(T < 200, 0.0, 1.0),
}


@pytest.mark.parametrize("law", ANY)
def test_gradients_of_any_law_lead_at_most_two_thirds_of_r_t_to_the_three_halves(law):
    x1 = np.random.default_rng(0).standard_normal(20)
    scale = math.sqrt(np.mean(x1**2))
    rows, _ = run_and_step_sizes(lambda k, _: np.full(20, ANY[law][k]), x1, len(T))
    far = np.array([np.abs(row["z"][0] - x1).max() for row in rows]) / scale
    assert (np.array([row["r"][0] for row in rows]) <= scale * np.sqrt(T) * (1 + 1e-12)).all()
    assert (far <= 2 / 3 * T**1.5).all()
    if law == "constant":  # u = 1 in every step
        assert 0.9 * T[-1] < far[-1]
        assert (far <= T).all()


def test_skewed_noise_agrees_in_every_step():
    """Divided by s it is biased: a rule that forgets E would forget nothing here."""
    rng = np.random.default_rng(0)
    noise = np.array([skewed(rng) for _ in range(500)]).T
    rows, _ = run_and_step_sizes(lambda k, _: noise[k], rng.standard_normal(500), len(T))
    added = np.diff([row["evidence"][0] for row in rows])  # A^2, about
    assert (added > 0).all()
    assert (added[-100:] > 100).all()
