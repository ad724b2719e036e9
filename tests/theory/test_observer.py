"""The observer: its rows are the theory's quantities, in NumPy and in torch."""

import numpy as np
import pytest

from stormplus import minimize
from stormplus.theory.problems import BoundedNonConvex, breast_cancer
from stormplus.theory import Observer, trace_run

torch = pytest.importorskip("torch")


def observed(problem, steps, observer, **options):
    return minimize(
        observer.watch(problem.grad),
        problem.start(),
        problem.sample,
        steps,
        rng=0,
        callback=observer,
        **options,
    )


def square(v):
    return (v * v).sum(-1)


@pytest.fixture
def problem():
    return BoundedNonConvex(5, 1.0)


@pytest.mark.parametrize("method", ["storm+", "simplified-storm+", "storm"])
def test_rows_are_the_quantities_of_the_run(problem, method):
    observer = Observer(problem.full_grad)
    observed(problem, 30, observer, method=method)
    trace = trace_run(problem, 30, method=method)
    rows = {name: [row.get(name) for row in observer.rows] for name in observer.latest}
    assert rows["step"] == list(range(1, 31))
    np.testing.assert_allclose(rows["gain"], trace.gain[1:])
    np.testing.assert_allclose(rows["step_size"], trace.step_size)
    np.testing.assert_allclose(rows["grad_norm"], square(trace.g) ** 0.5)
    np.testing.assert_allclose(rows["estimator_norm"], square(trace.d) ** 0.5)
    np.testing.assert_allclose(rows["innovation_sq"][1:], square(trace.d[:-1] - trace.g_tilde))
    np.testing.assert_allclose(rows["drift_sq"][1:], square(trace.g[1:] - trace.g_tilde))
    np.testing.assert_allclose(rows["true_error_sq"], square(trace.error))
    np.testing.assert_allclose(rows["true_noise_sq"], square(trace.g - trace.g_bar))
    assert rows["innovation_sq"][0] is None  # the first sample has one gradient


def test_estimates_are_unbiased(problem):
    """Over many steps sigma^2 and |eps|^2 come out right, without a full gradient."""
    steps = 4000
    # `memory` far beyond the run: plain means over all steps.
    observer = Observer(problem.full_grad, window=1e9)
    observed(problem, steps, observer, method="storm", theta=0.05, w=1.0, c=4.0)
    true_error = np.mean([row["true_error_sq"] for row in observer.rows[:-1]])
    true_noise = np.mean([row["true_noise_sq"] for row in observer.rows[:-1]])
    assert observer.latest["noise_sq"] == pytest.approx(true_noise, rel=0.05)
    assert observer.latest["error_sq"] == pytest.approx(true_error, abs=0.05 * true_noise)
    assert true_error > 0.1 * true_noise  # so that the line above says something


def test_smoothness_is_a_lower_bound_that_finds_the_curvature(problem):
    observer = Observer()
    observed(problem, 300, observer)
    estimates = [row["smoothness"] for row in observer.rows[1:]]
    assert (np.diff(estimates) >= 0).all()
    assert 0.5 * problem.constants.smoothness < estimates[-1] <= problem.constants.smoothness


def test_variance_reduction_shows(problem):
    observer = Observer(problem.full_grad)
    observed(problem, 2000, observer)
    late = observer.rows[1000:]
    error = np.mean([row["true_error_sq"] for row in late])
    noise = np.mean([row["true_noise_sq"] for row in late])
    assert error < 0.02 * noise


def test_every_thins_rows_but_not_the_running_means(problem):
    all_rows, some = Observer(), Observer(every=10)
    observed(problem, 95, all_rows)
    observed(problem, 95, some)
    assert [row["step"] for row in some.rows] == list(range(1, 96, 10))
    assert some.rows == all_rows.rows[::10]


def test_full_gradient_is_asked_for_only_when_a_row_is_kept(problem):
    calls = []
    observer = Observer(lambda x: calls.append(1) or problem.full_grad(x), every=10)
    observed(problem, 95, observer)
    assert len(calls) == 10


def test_watching_does_not_change_the_run(problem):
    plain = minimize(problem.grad, problem.start(), problem.sample, 50, rng=0)
    np.testing.assert_array_equal(observed(problem, 50, Observer()).x, plain.x)


def test_blocks():
    """A list of blocks is one long vector."""
    problem = BoundedNonConvex(4, 0.5)

    def grad(x, xi):
        g = problem.grad(np.concatenate(x), xi)
        return [g[:1], g[1:]]

    start, observer, whole = problem.start(), Observer(), Observer()
    minimize(
        observer.watch(grad), [start[:1], start[1:]], problem.sample, 20, rng=0, callback=observer
    )
    observed(problem, 20, whole)
    for row, expected in zip(observer.rows, whole.rows):
        assert row == pytest.approx(expected)


def test_forgetting_to_watch_is_an_error(problem):
    with pytest.raises(RuntimeError, match=r"observer\.watch\(grad\)"):
        minimize(problem.grad, problem.start(), problem.sample, 3, rng=0, callback=Observer())


def test_settings_are_checked():
    with pytest.raises(ValueError, match="at least 1, got 0 and 1"):
        Observer(window=0)


# Torch.


def torch_run(problem, steps, observer, drive, **options):
    from stormplus import StormPlus

    module = problem.module()
    optimizer = StormPlus(module.parameters(), **options)
    rng = np.random.default_rng(0)
    with observer.attach(optimizer):
        for _ in range(steps):
            drive(optimizer, module, problem.sample(rng))
    return module, optimizer


def with_step(optimizer, module, xi):
    def closure():
        optimizer.zero_grad()
        loss = module(xi)
        loss.backward()
        return loss

    optimizer.step(closure)


def with_halves(optimizer, module, xi):
    def backward():
        optimizer.zero_grad()
        module(xi).backward()

    backward()
    if optimizer.started:
        optimizer.move()
        backward()
    optimizer.estimate()


@pytest.mark.parametrize("drive", [with_step, with_halves])
def test_torch_rows_equal_numpy_rows(problem, drive):
    expected, found = Observer(problem.full_grad), Observer()
    observed(problem, 25, expected)
    module_x = []

    def full_grad():
        return [torch.from_numpy(problem.full_grad(module_x[0].detach().numpy()))]

    found.full_grad = full_grad

    def remember(optimizer, module, xi):
        module_x[:] = [module.x]
        drive(optimizer, module, xi)

    torch_run(problem, 25, found, remember)
    assert len(found.rows) == 25
    for row, target in zip(found.rows, expected.rows):
        assert row == pytest.approx(target, rel=1e-6, abs=1e-12)


def test_torch_l2_decay_is_part_of_the_gradient():
    """The observer sees what the optimizer sees: g + weight_decay x."""
    problem, decay = BoundedNonConvex(4, 0.5), 0.1
    expected, found = Observer(), Observer()
    minimize(
        expected.watch(lambda x, xi: problem.grad(x, xi) + decay * x),
        problem.start(),
        problem.sample,
        15,
        rng=0,
        callback=expected,
    )
    torch_run(problem, 15, found, with_step, weight_decay=decay)
    for row, target in zip(found.rows, expected.rows):
        assert row == pytest.approx(target, rel=1e-6, abs=1e-12)


def test_torch_detached_the_optimizer_is_as_it_was(problem):
    from stormplus import StormPlus

    module = problem.module()
    optimizer = StormPlus(module.parameters())
    observer = Observer()
    attachment = observer.attach(optimizer)
    with pytest.raises(RuntimeError, match="attached to this optimizer already"):
        observer.attach(optimizer)
    with_step(optimizer, module, problem.sample(np.random.default_rng(0)))
    attachment.close()
    assert not {"_move", "_estimate"} & vars(optimizer).keys()
    with_step(optimizer, module, problem.sample(np.random.default_rng(1)))
    assert len(observer.rows) == 1


def test_torch_watching_does_not_change_the_run(problem):
    watched, _ = torch_run(problem, 20, Observer(), with_step)
    plain, _ = torch_run(problem, 20, Observer(every=1000), with_step)
    expected = minimize(problem.grad, problem.start(), problem.sample, 20, rng=0).x
    np.testing.assert_array_equal(watched.x.detach().numpy(), plain.x.detach().numpy())
    np.testing.assert_allclose(watched.x.detach().numpy(), expected, rtol=1e-9)


def test_torch_a_restart_has_no_pair(problem):
    """A move left halfway and a restart: the new gradient has no partner."""
    from stormplus import StormPlus

    module, rng, observer = problem.module(), np.random.default_rng(0), Observer()
    optimizer = StormPlus(module.parameters())
    with observer.attach(optimizer):
        for _ in range(3):
            with_step(optimizer, module, problem.sample(rng))
        optimizer.zero_grad()
        module(problem.sample(rng)).backward()
        optimizer.move()
        with_step(optimizer, module, problem.sample(rng))
        with_step(optimizer, module, problem.sample(rng))
    assert ["drift_sq" in row for row in observer.rows] == [False, True, True, False, True]


def test_torch_refuses_other_optimizers():
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(TypeError, match="optimizers of stormplus"):
        Observer().attach(sgd)


def test_tensorboard_gets_every_row_that_is_kept(problem, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tensorboard.SummaryWriter(tmp_path) as writer:
        observer = Observer(every=5, writer=writer, tag="theory")
        observed(problem, 20, observer)
    events = EventAccumulator(str(tmp_path / "theory_noise_sq")).Reload()
    found = [(e.step, e.value) for e in events.Scalars("theory")]
    kept = [(int(r["step"]), r["noise_sq"]) for r in observer.rows if "noise_sq" in r]
    assert [step for step, _ in found] == [step for step, _ in kept] == [6, 11, 16]
    np.testing.assert_allclose([v for _, v in found], [v for _, v in kept], rtol=1e-6)


def test_any_writer_with_add_scalars_will_do(problem):
    class Writer:
        def __init__(self):
            self.seen = []

        def add_scalars(self, tag, scalars, step):
            self.seen.append((tag, step, dict(scalars)))

    writer = Writer()
    observer = Observer(writer=writer)
    observed(problem, 3, observer)
    assert [(tag, step) for tag, step, _ in writer.seen] == [("stormplus", t) for t in (1, 2, 3)]
    assert all(isinstance(v, float) for _, _, row in writer.seen for v in row.values())


def test_on_real_data_the_estimates_are_of_the_right_size():
    problem = breast_cancer()
    observer = Observer(problem.full_grad, window=500)
    observed(problem, 1500, observer)
    true_noise = np.mean([row["true_noise_sq"] for row in observer.rows[1000:]])
    assert observer.latest["noise_sq"] == pytest.approx(true_noise, rel=0.5)
    assert observer.latest["smoothness"] <= problem.constants.smoothness
