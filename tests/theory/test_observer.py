"""The observer: its rows are the theory's quantities, in NumPy and in torch."""

import csv
import gc

import numpy as np
import pytest

from stormplus import minimize
from stormplus.theory import Observer, trace_run
from stormplus.theory.problems import BoundedNonConvex

torch = pytest.importorskip("torch")

from stormplus import StormPlus, Untuned  # noqa: E402


def observed(problem, steps, observer, grad=None, **options):
    grad = observer.watch(grad or problem.grad)
    options = {"rng": 0, "callback": observer} | options
    return minimize(grad, problem.start(), problem.sample, steps, **options)


def square(v):
    return (v * v).sum(-1)


def column(observer, name, rows=slice(None)):
    return np.array([row[name] for row in observer.rows[rows]])


@pytest.fixture
def problem():
    return BoundedNonConvex(5, 1.0)


@pytest.mark.parametrize("options", [{}, {"method": "storm"}, {"unit": "first"}])
def test_rows_are_the_quantities_of_the_run(problem, options):
    observer = Observer(problem.full_grad)
    observed(problem, 30, observer, **options)
    trace = trace_run(problem, 30, **options)
    for name, expected in {
        "step": np.arange(1, 31),
        "gain": trace.gain[1:],
        "step_size": trace.step_size,
        "grad_norm": square(trace.g) ** 0.5,
        "estimator_norm": square(trace.d) ** 0.5,
        "true_error_sq": square(trace.error),
        "true_noise_sq": square(trace.g - trace.g_bar),
    }.items():
        np.testing.assert_allclose(column(observer, name), expected)
    later, innovation = slice(1, None), square(trace.d[:-1] - trace.g_tilde)
    np.testing.assert_allclose(column(observer, "innovation_sq", later), innovation)
    drift = square(trace.g[1:] - trace.g_tilde)
    np.testing.assert_allclose(column(observer, "drift_sq", later), drift)
    assert "innovation_sq" not in observer.rows[0]  # the first sample has one gradient


def test_estimates_are_unbiased(problem):
    observer = Observer(problem.full_grad, window=1e9)  # plain means over all steps
    observed(problem, 4000, observer, method="storm", theta=0.05, w=1.0, c=4.0)
    error, noise = (column(observer, f"true_{k}_sq")[:-1].mean() for k in ("error", "noise"))
    assert observer.latest["noise_sq"] == pytest.approx(noise, rel=0.05)
    assert observer.latest["error_sq"] == pytest.approx(error, abs=0.05 * noise)
    assert error > 0.1 * noise  # otherwise the line above shows nothing


def test_smoothness_is_a_lower_bound_and_the_variance_is_reduced(problem):
    observer = Observer(problem.full_grad)
    observed(problem, 2000, observer)
    smoothness = column(observer, "smoothness", slice(1, None))
    assert (np.diff(smoothness) >= 0).all()
    assert 0.5 * problem.constants.smoothness < smoothness[299] <= problem.constants.smoothness
    error, noise = (column(observer, f"true_{k}_sq")[1000:].mean() for k in ("error", "noise"))
    assert error < 0.02 * noise
    observed(problem, 3, still := Observer(), lr=0.0)  # no move, no ratio
    assert still.latest["smoothness"] == 0


def test_every_thins_rows_and_full_gradients_but_not_the_running_means(problem):
    calls = []
    all_rows, some = Observer(problem.full_grad), Observer(every=10)
    some.full_grad = lambda x: calls.append(1) or problem.full_grad(x)
    observed(problem, 95, all_rows)
    observed(problem, 95, some)
    assert [row["step"] for row in some.rows] == list(range(1, 96, 10))
    assert some.rows == all_rows.rows[::10]
    assert len(calls) == 10


def test_a_list_of_blocks_is_one_long_vector(problem):
    def grad(x, xi):
        g = problem.grad(np.concatenate(x), xi)
        return [g[:1], g[1:]]

    x0, observer, whole = problem.start(), Observer(), Observer()
    blocks, watched = [x0[:1], x0[1:]], observer.watch(grad)
    minimize(watched, blocks, problem.sample, 20, rng=0, callback=observer)
    observed(problem, 20, whole)
    for row, expected in zip(observer.rows, whole.rows, strict=True):
        assert row == pytest.approx(expected)


@pytest.mark.parametrize("fails_at", [5, 6])  # in the first evaluation of a pair, or the second
def test_a_failed_run_leaves_nothing_to_the_next(problem, fails_at):
    calls = []

    def breaks(x, xi):
        calls.append(xi)
        if len(calls) == fails_at:
            raise FloatingPointError("a broken sensor")
        return problem.grad(x, xi)

    observer, fresh = Observer(), Observer()
    with pytest.raises(FloatingPointError, match="a broken sensor"):
        observed(problem, 9, observer, breaks)
    observer.rows.clear()
    for watcher in (observer, fresh):
        observed(problem, 9, watcher, rng=1)
    for name in ("grad_norm", "estimator_norm"):
        np.testing.assert_array_equal(column(observer, name), column(fresh, name))
    later = slice(1, None)
    drifts = column(observer, "drift_sq", later), column(fresh, "drift_sq", later)
    np.testing.assert_array_equal(*drifts)


def test_errors_say_what_to_do(problem):
    with pytest.raises(RuntimeError, match=r"observer\.watch\(grad\)"):
        minimize(problem.grad, problem.start(), problem.sample, 3, rng=0, callback=Observer())
    with pytest.raises(ValueError, match="window and every must be at least 1, got 0 and 1"):
        Observer(window=0)
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    for other in (torch.optim.SGD(parameter, lr=1.0), Untuned(parameter)):
        with pytest.raises(TypeError, match=rf"pairs of gradients.*got {type(other).__name__}"):
            Observer().attach(other)


def test_the_table_in_three_formats(problem):
    observer = Observer(every=5)
    observed(problem, 11, observer)
    read = list(csv.DictReader(observer.table("csv").splitlines()))
    assert [float(row["gain"]) for row in read] == column(observer, "gain").tolist()
    assert read[0]["drift_sq"] == ""  # the first sample has no pair
    observer.rows = [{"step": 1.0, "grad_norm": 2 / 3}]
    assert observer.table() == "| step | grad_norm |\n| --- | --- |\n| 1 | 0.6667 |\n"
    assert observer.table("latex", ["grad_norm"]) == (
        "\\begin{tabular}{r}\ngrad\\_norm \\\\\n0.6667 \\\\\n\\end{tabular}\n"
    )
    with pytest.raises(ValueError, match="style must be 'csv', 'markdown' or 'latex', got 'html'"):
        observer.table("html")


@pytest.mark.parametrize("full", [False, True])
def test_the_plot_has_gain_norms_and_errors(problem, full, tmp_path):
    pytest.importorskip("matplotlib")
    observer = Observer(problem.full_grad if full else None)
    observed(problem, 50, observer)
    figure = observer.plot()
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 4 if full else 2]
    figure.savefig(tmp_path / "run.png")


def test_tensorboard_gets_every_row_that_is_kept(problem, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tensorboard.SummaryWriter(tmp_path) as writer:
        observer = Observer(every=5, writer=writer, tag="theory")
        observed(problem, 20, observer)
    events = EventAccumulator(str(tmp_path / "theory_noise_sq")).Reload().Scalars("theory")
    kept = [(row["step"], row["noise_sq"]) for row in observer.rows[1:]]
    assert [step for step, _ in kept] == [6, 11, 16]
    np.testing.assert_allclose([(e.step, e.value) for e in events], kept, rtol=1e-6)


# Torch.


def take(opt, loss):
    def closure():
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    opt.step(closure)


def take_by_halves(opt, loss):
    def backward():
        opt.zero_grad()
        loss().backward()

    backward()
    if opt.started:
        opt.move()
        backward()
    opt.estimate()


def torch_run(problem, steps, *observers, drive=take, **options):
    module, rng = problem.module(), np.random.default_rng(0)
    optimizer = StormPlus(module.parameters(), **options)
    attachments = [observer.attach(optimizer) for observer in observers]
    for _ in range(steps):
        xi = problem.sample(rng)
        drive(optimizer, lambda: module(xi))
    for attachment in attachments:
        attachment.close()
    return module.x.detach().numpy()


@pytest.mark.parametrize("drive", [take, take_by_halves])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_torch_rows_equal_numpy_rows_and_recording_changes_nothing(problem, drive, decay):
    """With L2 decay the observer sees what the optimizer sees: g + weight_decay x."""
    expected, found, also = Observer(), Observer(), Observer(every=5)  # two may watch
    result = observed(problem, 25, expected, lambda x, xi: problem.grad(x, xi) + decay * x)
    watched = torch_run(problem, 25, found, also, drive=drive, weight_decay=decay)
    plain = torch_run(problem, 25, drive=drive, weight_decay=decay)
    for row, target in zip(found.rows, expected.rows, strict=True):
        assert row == pytest.approx(target, rel=1e-6, abs=1e-12)
    assert also.rows == found.rows[::5]
    np.testing.assert_array_equal(watched, plain)
    np.testing.assert_allclose(watched, result.x, rtol=1e-9)


def made(**options):
    """Three parameters and a loss without noise: the estimator is the gradient."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (3, 2, 4)]
    return params, StormPlus(params, lr=0.3, **options)


def loss(params):
    return sum(5 * (1 - torch.cos(p)).sum() for p in params)


def test_torch_one_attachment_at_a_time_until_it_is_closed():
    params, opt = made()
    observer = Observer()
    with observer.attach(opt) as attachment:
        take(opt, lambda: loss(params))
        with pytest.raises(RuntimeError, match="attached already"):
            observer.attach(opt)
    take(opt, lambda: loss(params))
    attachment.close()  # a second time
    assert [row["step"] for row in observer.rows] == [1]
    with observer.attach(opt):  # halfway through a run: no g_t yet
        for _ in range(2):
            take(opt, lambda: loss(params))
    found = [(row["step"], "drift_sq" in row) for row in observer.rows[1:]]
    assert found == [(3, False), (4, True)]


def test_torch_only_a_completed_pair_is_recorded():
    """An abandoned move and a restart give no pair; a failed evaluation can be repeated."""
    params, opt = made()
    observer = Observer()
    with observer.attach(opt):
        for _ in range(2):
            take(opt, lambda: loss(params))
        loss(params).backward()
        opt.move()
        take(opt, lambda: loss(params))  # another sample: a restart
        with pytest.raises(FloatingPointError):
            take(opt, lambda: loss(params) * float("inf"))
        take(opt, lambda: loss(params))
        scales = iter([1.0, float("nan")])
        with pytest.raises(FloatingPointError):
            take(opt, lambda: loss(params) * next(scales))
        opt.zero_grad()
        loss(params).backward()
        opt.estimate()  # the same sample again
    assert ["drift_sq" in row for row in observer.rows] == [False, True, False, True, True]


@pytest.mark.long
@pytest.mark.parametrize("ends", ["failed", "restarted"])
def test_torch_copies_are_released_when_a_pair_is_not_completed(ends):
    x = torch.nn.Parameter(torch.ones(12_345))

    def copies():
        gc.collect()
        kinds = (torch.Tensor, torch.nn.Parameter)  # isinstance would import lazy torch objects
        return sum(type(o) in kinds and o.shape == x.shape for o in gc.get_objects())

    opt = StormPlus([x])
    with Observer().attach(opt):
        for _ in range(2):
            take(opt, lambda: x.square().mean())
        between = copies()
        x.grad = torch.ones_like(x)
        if ends == "failed":
            x.grad[0] = float("nan")
            with pytest.raises(FloatingPointError):
                opt.move()
        else:
            opt.move()
            opt.restart()
        # g_t stays for the next sample, unless the parameters have moved.
        assert copies() <= between - (ends == "restarted")


DECAY = {"weight_decay": 0.1}


@pytest.mark.parametrize(
    ("options", "frozen"),
    [({}, True), (DECAY, False), (DECAY | {"maximize": True}, False),
     (DECAY | {"decoupled_weight_decay": True}, False)],
)  # fmt: skip
def test_torch_full_gradient_is_of_what_is_minimized(options, frozen):
    """No noise shows, also while parameters are frozen and thawed."""
    params, opt = made(**options)
    params[0].requires_grad_(not frozen)

    def full_grad():
        free = [p for p in params if p.requires_grad]
        found = dict(zip(free, torch.autograd.grad(loss(params), free)))
        return [found.get(p) for p in params]

    observer = Observer(full_grad)
    with observer.attach(opt):
        for i in range(9):
            params[1].requires_grad_(not (frozen and 3 <= i < 6))
            take(opt, lambda: loss(params))
    assert len(observer.rows) == 9
    for row in observer.rows:
        for name in ("true_error_sq", "true_noise_sq", "noise_sq", "error_sq", "innovation_sq"):
            assert abs(row.get(name, 0.0)) < 1e-24, (name, row)


def test_torch_a_parameter_that_joins_late_is_no_noise():
    params, opt = made()
    observer = Observer()
    with observer.attach(opt):
        for i in range(6):
            take(opt, lambda: loss(params if i >= 3 else params[:2]))
    assert all(abs(row.get("noise_sq", 0.0)) < 1e-24 for row in observer.rows)
