"""Problems: gradients, the two faces, the constants, and recovery of planted solutions."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormplus.theory.problems import (
    BoundedNonConvex,
    FiniteSum,
    MatrixCompletion,
    NonConvexLogistic,
    NonNegativeFactorisation,
    PhaseRetrieval,
    Problem,
    RobustRegression,
    breast_cancer,
    diabetes_robust,
    digit_image,
    digit_phase_retrieval,
    digits_parity,
    masked_matrix,
    measured_image,
    outlier_regression,
    planted_completion,
    planted_nmf,
    sample_image,
)

PROBLEMS = {
    "well": lambda: BoundedNonConvex(4, 0.7),
    "ripple": lambda: BoundedNonConvex(4, 0.7, profile="ripple", height=2.0),
    "noiseless": lambda: BoundedNonConvex(4, 0.0),
    "logistic": lambda: breast_cancer(batch_size=3),
    "parity": lambda: digits_parity(batch_size=2),
    "robust": lambda: diabetes_robust(batch_size=3),
    "outliers": lambda: outlier_regression(50, 4)[0],
    "phase": lambda: digit_phase_retrieval()[0],
    "nmf": lambda: planted_nmf((6, 9), 2, batch_size=5)[0],
    "completion": lambda: planted_completion((5, 7), 2)[0],
}


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]()


def near(problem, seed, spread=0.3):
    rng = np.random.default_rng(seed)
    return problem.start(rng) + spread * rng.standard_normal(problem.dim)


@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_by_finite_differences(problem, seed):
    rng = np.random.default_rng(seed)
    x, xi = near(problem, seed), problem.sample(rng)
    direction = rng.standard_normal(problem.dim)
    direction /= np.linalg.norm(direction)
    step = 1e-5
    ahead, behind = (problem.value(x + s * direction, xi) for s in (step, -step))
    slope = (ahead - behind) / (2 * step)
    assert problem.grad(x, xi) @ direction == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_full_gradient_and_value_are_the_mean_over_samples(problem):
    x = near(problem, 2)
    if isinstance(problem, FiniteSum):
        single = [problem.grad(x, np.array([i])) for i in range(problem.n_samples)]
        values = [problem.value(x, np.array([i])) for i in range(problem.n_samples)]
    else:  # all signs
        signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 8)).reshape(2, 4, -1)
        pairs = [(signs[0, :, k], signs[1, :, k]) for k in range(256)]
        single = [problem.grad(x, xi) for xi in pairs]
        values = [problem.value(x, xi) for xi in pairs]
    np.testing.assert_allclose(problem.full_grad(x), np.mean(single, 0), atol=1e-12)
    assert problem.full_value(x) == pytest.approx(np.mean(values), rel=1e-12)


def test_torch_face_equals_numpy_face_and_autograd(problem):
    rng = np.random.default_rng(3)
    x = near(problem, 3)
    module = problem.module(x)
    for _ in range(3):
        xi = problem.sample(rng)
        module.zero_grad()
        loss = module(xi)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(problem.value(x, xi), rel=1e-12)
        np.testing.assert_allclose(
            module.x.grad.numpy(), problem.grad(x, xi), rtol=1e-10, atol=1e-13
        )


def test_module_starts_where_the_problem_does(problem):
    np.testing.assert_array_equal(problem.module().x.detach().numpy(), problem.start())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([n for n in PROBLEMS if n not in ("phase", "nmf", "completion", "parity")]),
    st.integers(0, 100),
    st.sampled_from([0.01, 1.0, 30.0]),
)
def test_constants_bound_what_they_should(name, seed, spread):
    problem, rng = PROBLEMS[name](), np.random.default_rng(seed)
    x, y = near(problem, seed, spread), near(problem, seed + 1000, spread)
    if seed % 2:
        y = x + 1e-4 * (y - x)  # close by, where curvature shows
    xi, known = problem.sample(rng), problem.constants
    assert np.linalg.norm(problem.grad(x, xi)) <= known.grad_bound * (1 + 1e-12)
    difference = np.linalg.norm(problem.grad(x, xi) - problem.grad(y, xi))
    assert difference <= known.smoothness * np.linalg.norm(x - y) * (1 + 1e-9)
    if known.value_range is not None:
        assert abs(problem.full_value(x) - problem.full_value(y)) <= known.value_range
    if isinstance(problem, FiniteSum):
        full = problem.full_grad(x)
        singles = [problem.grad(x, np.array([i])) - full for i in range(problem.n_samples)]
        variance = np.mean([s @ s for s in singles]) / problem.batch_size
    else:
        dphi, dpsi = problem.slopes(x)
        variance = float((problem.scale**2 * (dphi**2 + dpsi**2)).sum())
    assert variance <= known.noise**2 * (1 + 1e-12)


@pytest.mark.parametrize("profile", ["well", "ripple"])
def test_bounded_constants_are_attained(profile):
    """Not only bounds: sigma and B are exact, and so are L and G of the ripple."""
    problem = BoundedNonConvex(3, 0.6, profile=profile)
    centre, known = problem.data["centre"], problem.constants
    plus = (np.ones(3), np.ones(3))
    dphi, dpsi = problem.slopes(centre)
    assert (problem.scale**2 * (dphi**2 + dpsi**2)).sum() == pytest.approx(known.noise**2)
    far = centre + (np.pi if profile == "ripple" else 1e6)
    rise = problem.full_value(far) - problem.full_value(centre)
    assert rise == pytest.approx(known.value_range, rel=1e-6)
    u = np.linspace(-4, 4, 200_001)
    x = centre + u[:, None]
    steepest = np.abs(problem.grad(x, plus)).max() * np.sqrt(3)
    bend = np.abs(np.diff(problem.grad(x, plus), axis=0)).max() / (u[1] - u[0])
    tight = 1e-4 if profile == "ripple" else 0.35
    assert steepest == pytest.approx(known.grad_bound, rel=tight)
    assert bend == pytest.approx(known.smoothness, rel=tight)


def test_noise_dial_reaches_exactly_zero():
    problem = BoundedNonConvex(6, 0.0)
    x, rng = near(problem, 0), np.random.default_rng(0)
    np.testing.assert_array_equal(problem.grad(x, problem.sample(rng)), problem.full_grad(x))
    assert problem.constants.noise == 0


def test_samples_differ_in_curvature_also_at_the_minimum():
    problem, rng = BoundedNonConvex(6, 1.0), np.random.default_rng(0)
    x, e = problem.data["centre"], 1e-4
    bends = [
        (problem.grad(x + e, xi) - problem.grad(x - e, xi)) / (2 * e)
        for xi in (problem.sample(rng) for _ in range(50))
    ]
    assert np.std(bends) > 0.3
    assert np.linalg.norm(problem.grad(x, problem.sample(rng))) == pytest.approx(1.0)  # sigma


def test_bounded_works_on_arrays_of_points_and_of_sigmas():
    sigmas = np.array([0.0, 0.5])[:, None]
    many, rng = BoundedNonConvex(4, sigmas), np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4))
    xi = tuple(2.0 * rng.integers(2, size=(2, 3, 4)) - 1)
    for i, sigma in enumerate((0.0, 0.5)):
        for k in range(3):
            one = BoundedNonConvex(4, sigma)
            own = (xi[0][k], xi[1][k])
            np.testing.assert_allclose(many.grad(x, xi)[i, k], one.grad(x[i, k], own))
            assert many.value(x, xi)[i, k] == pytest.approx(one.value(x[i, k], own))


def test_phase_retrieval_constants_on_a_ball():
    problem, truth = digit_phase_retrieval()
    radius = 2 * float(np.linalg.norm(truth))
    known = problem.constants_within(radius)
    rng = np.random.default_rng(0)
    for _ in range(50):
        x, y = (rng.standard_normal(problem.dim) for _ in range(2))
        x, y = radius * x / np.linalg.norm(x), 0.9 * radius * y / np.linalg.norm(y)
        xi = problem.sample_batch(rng, 1)
        gap = np.linalg.norm(problem.grad(x, xi) - problem.grad(y, xi))
        assert gap <= known.smoothness * np.linalg.norm(x - y)
        assert np.linalg.norm(problem.grad(x, xi)) <= known.grad_bound


def test_real_data_is_what_it_says():
    assert breast_cancer().data["features"].shape == (569, 31)
    assert digits_parity().data["features"].shape == (1797, 62)
    assert diabetes_robust().data["features"].shape == (442, 11)
    assert digit_image(3).shape == (8, 8)
    assert sample_image("flower").shape == (106, 160)
    assert 0 <= sample_image().min() < sample_image().max() <= 1


def test_a_users_own_problem_is_a_few_lines(capsys):
    """The example of docs/theory.md, as it stands there."""
    page = Path(__file__).parents[2] / "docs" / "theory.md"
    if not page.exists():
        pytest.skip("needs docs, which the source distribution leaves out")
    example = page.read_text().split("A problem of your own")[1].split("```python\n")[1]
    scope = {}
    exec(example.split("```")[0], scope)
    assert isinstance(scope["problem"], Problem)
    assert np.linalg.norm(scope["result"].x - [1.0, -2.0]) < 0.1
    assert scope["observer"].latest["smoothness"] <= 2  # the loss is 2-smooth
    assert "noise_sq" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BoundedNonConvex(3, -1.0), "sigma must be finite and not negative, got -1.0"),
        (lambda: BoundedNonConvex(3, profile="hill"), "profile must be 'well' or 'ripple'"),
        (lambda: NonConvexLogistic(np.ones((2, 2)), [0, 1]), "targets must be -1 or 1"),
        (lambda: RobustRegression(np.ones((2, 2)), [1.0]), "one number a row"),
        (lambda: PhaseRetrieval(np.ones((2, 2)), [1.0, -1.0]), "none negative"),
        (lambda: NonNegativeFactorisation(-np.ones((2, 2)), 1), "no negative entry"),
        (lambda: MatrixCompletion((2, 2), np.zeros((3, 2), int), [1.0], 1), "one row"),
        (lambda: planted_nmf(batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: sample_image("cat"), "'china' or 'flower', got 'cat'"),
    ],
)
def test_errors_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_helpers_on_a_given_image():
    image = np.outer(np.arange(1.0, 5), np.ones(4))
    phase, truth = measured_image(image)
    assert (truth**2).mean() == pytest.approx(1.0)
    assert phase.error(truth, truth) == 0
    completion, mask = masked_matrix(image, 1, seen=0.7)
    assert completion.n_samples == mask.sum()


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_problems_and_theory_imports_no_framework():
    done = run_python(
        "import sys, stormplus, stormplus.theory.problems, stormplus.theory, stormplus.theory.rates, "
        "stormplus.theory.rivals\n"
        "print([m for m in ('torch', 'jax', 'sklearn', 'matplotlib') if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("missing", "use", "advice"),
    [
        ("sklearn", "breast_cancer()", "pip install 'stormplus[demo]'"),
        ("torch", "BoundedNonConvex().module()", "pip install 'stormplus[torch]'"),
    ],
)
def test_a_missing_extra_says_what_to_install(missing, use, advice):
    done = run_python(
        f"import sys\nsys.modules[{missing!r}] = None\nfrom stormplus.theory.problems import *\n{use}"
    )
    assert done.returncode != 0
    assert advice in done.stderr
