"""Accelerate's run equals the plain loop, step by step, or is refused."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset
from trainer_cases import ROWS, assert_same_states, data, loss_of, network, plain_run, snapshot

from stormplus import StormPlus, scaled_step
from stormplus.integrations.accelerate import prepare

BATCHES = 10
TWICE_BUT_ONCE = 2 * BATCHES - 1


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def accelerated(accelerator, dtype=torch.float64, loss=loss_of, micro=1, schedule=None, **options):
    model = network(dtype)
    opt = StormPlus(model.parameters())
    batches = DataLoader(TensorDataset(*data(BATCHES, dtype)), batch_size=ROWS * micro)
    scheduler = schedule(opt) if schedule else ExponentialLR(opt, 1.0)
    model, opt, batches, scheduler = prepare(accelerator, model, opt, batches, scheduler)
    states, evaluations = [], 0
    for i, (x, y) in enumerate(batches):
        if i == 0:
            torch.manual_seed(0)  # torch's loader has drawn a seed for its workers

        def closure():
            nonlocal evaluations
            opt.zero_grad()
            total = 0.0
            for j, (u, v) in enumerate(zip(x.split(ROWS), y.split(ROWS))):
                evaluations += 1
                with nullcontext() if j == micro - 1 else accelerator.no_sync(model):
                    part = loss(model, u, v) / micro
                    accelerator.backward(part)
                total += part.detach()
            return total

        opt.step(closure, **options)
        scheduler.step()
        states.append(snapshot(model))
    return states, opt, evaluations


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_equals_the_plain_loop(precision):
    dtype = {"no": torch.float64, "bf16": torch.float32}[precision]
    accelerator = Accelerator(cpu=True, mixed_precision=precision)

    def loss(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            output = model(x)
        return loss_of(lambda _: output.to(dtype), x, y)  # Accelerate's models answer in float32

    states, opt, evaluations = accelerated(
        accelerator, dtype, schedule=lambda opt: ExponentialLR(opt, 0.9)
    )
    expected, plain, _ = plain_run(
        BATCHES, dtype=dtype, loss=loss, schedule=lambda opt: ExponentialLR(opt, 0.9)
    )
    assert_same_states(states, expected)
    assert evaluations == TWICE_BUT_ONCE
    assert opt.optimizer.diagnostics() == plain.diagnostics()
    assert int(states[-1]["1.num_batches_tracked"]) == BATCHES


def test_accumulation_inside_the_closure():
    states, opt, evaluations = accelerated(Accelerator(cpu=True), micro=2)
    assert_same_states(states, plain_run(BATCHES, accumulate=2)[0])
    assert evaluations == 2 * (BATCHES - 1)
    assert opt.optimizer.diagnostics()["grad_evaluations"] == BATCHES - 1


def test_accumulation_by_accelerate_is_refused():
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4 drops closures"):
        accelerated(Accelerator(cpu=True, gradient_accumulation_steps=4))


def test_a_closure_that_would_be_dropped_is_refused():
    accelerator = Accelerator(cpu=True)
    model = network()
    model, opt = prepare(accelerator, model, StormPlus(model.parameters()))
    x, y = data(1)
    calls = []

    def closure():
        calls.append(None)
        opt.zero_grad()
        loss = loss_of(model, x, y)
        accelerator.backward(loss)
        return loss

    accelerator.gradient_state._set_sync_gradients(False)  # as accelerator.accumulate does
    with pytest.raises(RuntimeError, match="drop this closure"):
        opt.step(closure)
    accelerator.gradient_state._set_sync_gradients(True)
    with pytest.raises(TypeError, match="step\\(\\) needs a closure"):
        opt.step()
    opt.step(closure)
    assert len(calls) == 1


def test_without_prepare_the_closure_is_dropped_silently():
    """What `prepare` is for."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, opt = accelerator.prepare(model, StormPlus(model.parameters()))
    calls = []
    with accelerator.accumulate(model):
        opt.step(lambda: calls.append(None))
    assert not calls


@pytest.mark.parametrize("scale", [2.0**10, 2.0**22], ids=["no overflow", "overflows"])
def test_fp16_is_scaled_step(scale):
    # Accelerate has fp16 for other devices only; a scaler for this one is put in by hand.
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def loss(model, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            return loss_of(model, x, y)

    steps = []

    class Counts(ExponentialLR):
        def step(self, *args):
            steps.append(None)
            return super().step(*args)

    states, opt, evaluations = accelerated(
        accelerator, torch.float32, loss, schedule=lambda opt: Counts(opt, 1.0)
    )
    x, y = data(BATCHES, torch.float32)
    model = network(torch.float32)
    plain, expected, calls = StormPlus(model.parameters()), [], 0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    torch.manual_seed(0)
    for i in range(BATCHES):
        rows = slice(i * ROWS, (i + 1) * ROWS)

        def closure():
            nonlocal calls
            calls += 1
            plain.zero_grad()
            value = loss(model, x[rows], y[rows])
            scaler.scale(value).backward()
            return value

        scaled_step(plain, scaler, closure, model)
        expected.append(snapshot(model))
    assert_same_states(states, expected)
    assert evaluations == calls
    taken = int(plain.diagnostics()["step"])
    assert opt.optimizer.diagnostics() == plain.diagnostics()
    assert taken == BATCHES if scale == 2.0**10 else 1 < taken < BATCHES
    assert len(steps) == 1 + taken  # a scheduler steps at its construction, too


def test_clipping_is_told_once():
    with pytest.warns(UserWarning, match="two gradients of a sample separately") as told:
        states, opt, _ = accelerated(Accelerator(cpu=True), max_grad_norm=0.05)
    assert len(told) == 1
    expected, _, _ = plain_run(
        BATCHES, process=lambda model: clip_grad_norm_(model.parameters(), 0.05)
    )
    assert_same_states(states, expected)


def test_save_state_and_load_state(tmp_path):
    def parts():
        accelerator = Accelerator(cpu=True)
        model = network()
        return accelerator, *prepare(accelerator, model, StormPlus(model.parameters(), lr=0.5))

    def train(accelerator, model, opt, batches):
        x, y = data(BATCHES)
        for i in batches:
            rows = slice(i * ROWS, (i + 1) * ROWS)

            def closure():
                opt.zero_grad()
                loss = loss_of(model, x[rows], y[rows])
                accelerator.backward(loss)
                return loss

            opt.step(closure)
        return snapshot(model), opt.optimizer.diagnostics()

    torch.manual_seed(3)
    run = parts()
    train(*run, range(4))
    run[0].save_state(str(tmp_path))  # torch's random state included
    expected, numbers = train(*run, range(4, BATCHES))
    torch.manual_seed(99)
    run = parts()
    run[0].load_state(str(tmp_path))
    resumed, again = train(*run, range(4, BATCHES))
    assert_same_states([resumed], [expected])
    assert again == numbers
    assert again["grad_evaluations"] == TWICE_BUT_ONCE
