"""The observer: its rows are the theory's quantities, in NumPy and in torch."""

import copy
import csv
from types import SimpleNamespace

import numpy as np
import pytest

from stormplus import minimize
from stormplus.theory import Observer, trace_run
from stormplus.theory.problems import BoundedNonConvex

torch = pytest.importorskip("torch")

from tests.torch.optimizers import on  # noqa: E402

from stormplus import StormPlus, Untuned  # noqa: E402

PROBLEM = BoundedNonConvex(5, 1.0)
LATER = slice(1, None)  # the first sample has one gradient, and no pair


def observed(steps, *, observer=None, grad=PROBLEM.grad, x0=None, rng=0, run=None, **options):
    """Return an observer with these options, or this one, after a run of `minimize`."""
    observer = Observer(**options) if observer is None else observer
    x0 = PROBLEM.start() if x0 is None else x0
    given = {"rng": rng, "callback": observer} | (run or {})
    minimize(observer.watch(grad), x0, PROBLEM.sample, steps, **given)
    return observer


def square(v):
    return (v * v).sum(-1)


def column(observer, name, rows=slice(None)):
    return np.array([row[name] for row in observer.rows[rows]])


@pytest.mark.parametrize("options", [{}, {"method": "storm"}, {"unit": "first"}])
def test_rows_are_the_quantities_of_the_run(options):
    observer = observed(30, full_grad=PROBLEM.full_grad, run=options)
    trace = trace_run(PROBLEM, 30, **options)
    for name, rows, expected in (
        ("step", slice(None), np.arange(1, 31)),
        ("gain", slice(None), trace.gain[1:]),
        ("step_size", slice(None), trace.step_size),
        ("grad_norm", slice(None), square(trace.g) ** 0.5),
        ("estimator_norm", slice(None), square(trace.d) ** 0.5),
        ("true_error_sq", slice(None), square(trace.error)),
        ("true_noise_sq", slice(None), square(trace.g - trace.g_bar)),
        ("innovation_sq", LATER, square(trace.d[:-1] - trace.g_tilde)),
        ("drift_sq", LATER, square(trace.g[1:] - trace.g_tilde)),
    ):
        np.testing.assert_allclose(column(observer, name, rows), expected)
    assert "innovation_sq" not in observer.rows[0]


def test_estimates_are_unbiased():
    constants = {"method": "storm", "theta": 0.05, "w": 1.0, "c": 4.0}
    # A long window: plain means over all steps.
    observer = observed(4000, full_grad=PROBLEM.full_grad, window=1e9, run=constants)
    error, noise = (column(observer, f"true_{k}_sq")[:-1].mean() for k in ("error", "noise"))
    assert observer.latest["noise_sq"] == pytest.approx(noise, rel=0.05)
    assert observer.latest["error_sq"] == pytest.approx(error, abs=0.05 * noise)
    assert error > 0.1 * noise  # otherwise the line above shows nothing


def test_smoothness_is_a_lower_bound_and_the_variance_is_reduced():
    observer = observed(2000, full_grad=PROBLEM.full_grad)
    smoothness = column(observer, "smoothness", LATER)
    assert (np.diff(smoothness) >= 0).all()
    assert 0.5 * PROBLEM.constants.smoothness < smoothness[299] <= PROBLEM.constants.smoothness
    error, noise = (column(observer, f"true_{k}_sq")[1000:].mean() for k in ("error", "noise"))
    assert error < 0.02 * noise
    assert observed(3, run={"lr": 0.0}).latest["smoothness"] == 0  # no move, no ratio


def test_every_thins_rows_full_gradients_and_writes_but_not_the_running_means():
    calls, written = [], []
    some = observed(
        95,
        full_grad=lambda x: calls.append(1) or PROBLEM.full_grad(x),
        every=10,
        writer=SimpleNamespace(add_scalars=lambda *arguments: written.append(arguments)),
    )
    assert some.rows == observed(95, full_grad=PROBLEM.full_grad).rows[::10]
    assert len(calls) == 10
    for (tag, row, step), expected in zip(written, some.rows, strict=True):
        assert (tag, row | {"step": step}) == ("stormplus", expected)


def test_a_list_of_blocks_is_one_long_vector():
    def grad(x, xi):
        g = PROBLEM.grad(np.concatenate(x), xi)
        return [g[:1], g[1:]]

    blocks = observed(20, grad=grad, x0=np.split(PROBLEM.start(), [1]))
    for row, expected in zip(blocks.rows, observed(20).rows, strict=True):
        assert row == pytest.approx(expected)


@pytest.mark.parametrize("fails_at", [5, 6])  # in the first evaluation of a pair, or the second
def test_a_failed_run_leaves_nothing_to_the_next(fails_at):
    calls, observer = [], Observer(window=1)  # means of one value: without a memory

    def breaks(x, xi):
        calls.append(xi)
        if len(calls) == fails_at:
            raise FloatingPointError("a broken sensor")
        return PROBLEM.grad(x, xi)

    with pytest.raises(FloatingPointError, match="a broken sensor"):
        observed(9, observer=observer, grad=breaks)
    observer.rows.clear()
    observer._smoothness = 0.0  # the largest so far
    observed(9, observer=observer, rng=1)
    assert observer.rows == observed(9, rng=1, window=1).rows


def test_errors_say_what_to_do():
    with pytest.raises(RuntimeError, match=r"observer\.watch\(grad\)"):
        minimize(PROBLEM.grad, PROBLEM.start(), PROBLEM.sample, 3, rng=0, callback=Observer())
    with pytest.raises(ValueError, match="window and every must be at least 1, got 0 and 1"):
        Observer(window=0)
    for method in (Observer().plot, Observer().table):
        with pytest.raises(ValueError, match="has no rows: pass callback=observer"):
            method()
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    for other in (torch.optim.SGD(parameter, lr=1.0), Untuned(parameter)):
        with pytest.raises(TypeError, match=rf"pairs of gradients.*got {type(other).__name__}"):
            Observer().attach(other)


def test_a_table_has_all_digits_in_csv_and_blanks_where_there_is_no_pair():
    observer = observed(11, every=5)
    read = list(csv.DictReader(observer.table("csv").splitlines()))
    assert [float(row["gain"]) for row in read] == column(observer, "gain").tolist()
    assert read[0]["drift_sq"] == ""
    assert "\ngrad\\_norm \\\\\n" in observer.table("latex", ["grad_norm"])
    with pytest.raises(ValueError, match="style must be 'csv', 'markdown' or 'latex', got 'html'"):
        observer.table("html")
    with pytest.raises(ValueError, match=r"columns must be among .*step.*; got \['stp'\]"):
        observer.table(columns=["stp"])


# Torch.


def take(opt, loss):
    opt.step(on(opt, loss))


def torch_run(steps, *observers, **options):
    module, rng = PROBLEM.module(), np.random.default_rng(0)
    optimizer = StormPlus(module.parameters(), **options)
    attachments = [observer.attach(optimizer) for observer in observers]
    for _ in range(steps):
        xi = PROBLEM.sample(rng)
        take(optimizer, lambda: module(xi))
    for attachment in attachments:
        attachment.close()
    return module.x.detach().numpy()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_torch_rows_equal_numpy_rows_and_recording_changes_nothing(decay):
    """With L2 decay the observer sees what the optimizer sees: g + weight_decay x."""
    found, also = Observer(), Observer(every=5)  # two may watch
    expected = observed(25, grad=lambda x, xi: PROBLEM.grad(x, xi) + decay * x)
    watched = torch_run(25, found, also, weight_decay=decay)
    for row, target in zip(found.rows, expected.rows, strict=True):
        assert row == pytest.approx(target, rel=1e-6, abs=1e-12)
    assert also.rows == found.rows[::5]
    np.testing.assert_array_equal(watched, torch_run(25, weight_decay=decay))


def made(**options):
    """Return three parameters and an optimizer; `loss` has no noise: d is the gradient."""
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


def test_torch_no_pair_spans_a_loaded_state():
    """The loss has no noise, but gradients at two points differ as if it had."""
    params, opt = made()
    observer = Observer()
    with observer.attach(opt):
        take(opt, lambda: loss(params))
        saved, points = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
        for _ in range(3):
            take(opt, lambda: loss(params))
        opt.load_state_dict(saved)
        with torch.no_grad():
            for p, point in zip(params, points):
                p.copy_(point)
        for _ in range(2):
            take(opt, lambda: loss(params))
    assert ["drift_sq" in row for row in observer.rows[-2:]] == [False, True]
    assert observer.latest["noise_sq"] < 1e-24


@pytest.mark.parametrize(
    "options",
    [{}, {"maximize": True}, {"decoupled_weight_decay": True}, {"frozen": True}, {"late": True}],
    ids=str,
)
def test_torch_no_noise_shows_where_there_is_none(options):
    """The full gradient has decay and sign; frozen parameters and those that join late are none."""
    frozen, late = options.pop("frozen", False), options.pop("late", False)
    params, opt = made(weight_decay=0.1, **options)
    params[0].requires_grad_(not frozen)

    def objective():
        return loss(params[:2] if late and len(observer.rows) < 3 else params)

    def full_grad():
        free = [p for p in params if p.requires_grad]
        found = dict(zip(free, torch.autograd.grad(loss(params), free)))
        return [found.get(p) for p in params]

    observer = Observer(None if late else full_grad)
    with observer.attach(opt):
        for i in range(9):
            params[1].requires_grad_(not (frozen and 3 <= i < 6))
            take(opt, objective)
    assert len(observer.rows) == 9
    names = ("true_error_sq", "true_noise_sq", "noise_sq")
    names += () if late else ("error_sq", "innovation_sq")
    for row in observer.rows:
        assert all(abs(row.get(name, 0.0)) < 1e-24 for name in names), row
