"""Accelerate: what only `prepare` does. What trainers share is in `test_trainers.py`."""

import copy
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate_cases import closure_for, untuned
from pages import ROOT
from trainer_cases import (
    BATCHES,
    ROWS,
    SAMPLES,
    Run,
    assert_at_average,
    assert_same_runs,
    data,
    network,
    plain_run,
    snapshot,
    untuned_run,
)

from stormplus import StormPlus, Untuned, recalibrate
from stormplus.integrations.accelerate import prepare


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_accumulation_by_accelerate_is_refused():
    net = network()
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4 drops closures"):
        prepare(
            Accelerator(cpu=True, gradient_accumulation_steps=4), net, StormPlus(net.parameters())
        )


def test_a_closure_that_would_be_dropped_is_refused():
    accelerator, net = Accelerator(cpu=True), network()
    model, opt = prepare(accelerator, net, StormPlus(net.parameters()))
    closure = closure_for(accelerator, model, opt, *data(1))
    accelerator.gradient_state._set_sync_gradients(False)  # as accelerator.accumulate does
    with pytest.raises(RuntimeError, match="drop this closure"):
        opt.step(closure)
    accelerator.gradient_state._set_sync_gradients(True)
    with pytest.raises(TypeError, match="step\\(\\) needs a closure"):
        opt.step()
    opt.step(closure)
    assert net.evaluations == 1


def test_without_prepare_the_closure_is_dropped_silently():
    """What `prepare` is for."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, opt = accelerator.prepare(model, StormPlus(model.parameters()))
    calls = []
    with accelerator.accumulate(model):
        opt.step(lambda: calls.append(None))
    assert not calls


@pytest.mark.parametrize("by_ours", [True, False])
def test_model_and_optimizer_in_two_calls(by_ours):
    accelerator, run = Accelerator(cpu=True), Run()
    run.net = network()
    run.opt = StormPlus(run.net.parameters())
    model = prepare(accelerator, run.net) if by_ours else accelerator.prepare(run.net)
    opt = prepare(accelerator, run.opt)
    for i, (x, y) in enumerate(zip(*(part.split(ROWS) for part in data()))):
        torch.manual_seed(i)
        opt.step(closure_for(accelerator, model, opt, x, y))
        run.states.append(snapshot(run.net))
    assert_same_runs(run, plain_run(epochs=1))
    assert int(run.net.body[1].num_batches_tracked) == BATCHES


def test_an_optimizer_whose_model_is_unknown_is_refused():
    accelerator, model = Accelerator(cpu=True), network()
    opt = StormPlus(model.parameters())
    with pytest.raises(ValueError, match="prepare the model before the optimizer"):
        prepare(accelerator, opt)
    prepare(accelerator, network())  # another one
    with pytest.raises(ValueError, match="no prepared model has a parameter of this StormPlus"):
        prepare(accelerator, opt)
    with pytest.raises(ValueError, match="this Untuned, so its average would be neither eval"):
        prepare(accelerator, Untuned(model.parameters()))
    assert not accelerator._optimizers
    prepare(accelerator, opt, model)


def test_an_unverified_setting_is_refused():
    class Elsewhere:
        gradient_accumulation_steps = 1

        class distributed_type:
            value = "DEEPSPEED"

    with pytest.raises(ValueError, match="DEEPSPEED has not been verified"):
        prepare(Elsewhere())


def test_other_optimizers_stay_as_they_are():
    model = network()
    _, opt = prepare(Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(opt.optimizer, torch.optim.SGD)
    opt.step()  # without a closure, as ever


def test_without_prepare_the_iterate_is_evaluated_and_saved(tmp_path):
    """What `prepare` is for; nothing of ours is there that could warn."""
    run = untuned(tmp_path, prepared=Accelerator.prepare)
    for state in (run.saved[SAMPLES], run.validated[SAMPLES]):
        assert torch.equal(state["body.0.weight"], run.states[-1]["body.0.weight"])


def test_untuned_accumulates_and_is_evaluated_at_the_average(tmp_path):
    run, plain = untuned(tmp_path, steps=2), untuned_run(accumulate=2)
    assert_same_runs(run, plain)
    assert run.opt.grad_evaluations == SAMPLES // 2
    for step, state in (*run.saved.items(), *run.validated.items()):
        assert_at_average(state, plain.averages[step - 1], plain.states[step - 1])


def test_running_statistics_are_taken_anew_over_the_last_batches(tmp_path):
    run = untuned(tmp_path, recalibrate_batches=4)
    net = network()
    net.load_state_dict(run.saved[SAMPLES])
    recalibrate(net, data()[0].split(ROWS)[2:])
    for state in (run.validated[SAMPLES], run.saved[SAMPLES]):
        for name in ("body.1.running_mean", "body.1.running_var"):
            torch.testing.assert_close(state[name], net.state_dict()[name], rtol=1e-9, atol=0)
    assert run.net.evaluations == SAMPLES


def test_a_copy_of_the_model_is_on_its_own(tmp_path):
    """An average of one's own, say, which is evaluated while the model trains."""
    run = untuned(tmp_path, epochs=1)
    run.opt.train()
    twin = copy.deepcopy(run.net)
    with torch.no_grad():
        for p in twin.parameters():
            p.fill_(0.5)
        twin.eval()(data(1)[0])
        twin.train()(data(1)[0])
    twin.state_dict()
    assert all(bool((p == 0.5).all()) for p in twin.parameters())
    assert not run.opt.at_average


def test_the_example_runs_under_torchrun_in_two_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    out = subprocess.run(
        [*command, str(ROOT / "examples" / "accelerate_loop.py"), "--epochs", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True, timeout=600,
    ).stdout  # fmt: skip
    # each rank has 11 of the 22 batches; rank 0 alone prints
    assert out.count(f"22 samples, {2 * (2 * 22 - 1)} evaluations") == 1
    assert "running statistics moved 44 times" in out


def test_a_closure_after_a_validation_trains_the_iterate():
    """The model says what is wanted when it is called, and a closure calls it in the step."""
    accelerator, run = Accelerator(cpu=True), Run()
    net = run.net = network()
    run.opt = Untuned(net.parameters())
    model, opt = prepare(accelerator, net, run.opt)
    for i, (x, y) in enumerate(zip(*(part.split(ROWS) for part in data()))):
        torch.manual_seed(i)
        opt.step(closure_for(accelerator, model, opt, x, y))
        run.states.append(snapshot(net))
        model.eval()
        with torch.no_grad():
            model(x)
        assert run.opt.at_average
        model.train()
    assert_same_runs(run, untuned_run(epochs=1))
    assert net.evaluations == BATCHES  # in train mode
    model.eval()
    with pytest.raises(RuntimeError, match="hold the average"):  # it trains in eval mode
        opt.step(closure_for(accelerator, model, opt, x, y))
    closure_for(accelerator, model, opt, x, y)()
    for step in (opt.step, run.opt.step):  # and the gradient was taken there
        with pytest.raises(RuntimeError, match="hold the average"):
            step()


@pytest.mark.parametrize("inner", [True, False])
def test_a_compiled_model_is_saved_at_the_average(inner):
    accelerator, net = Accelerator(cpu=True), torch.nn.Linear(6, 1)
    model, opt = prepare(
        accelerator, torch.compile(net, backend="eager"), Untuned(net.parameters())
    )
    for x in torch.randn(3, ROWS, 6):
        opt.zero_grad()
        accelerator.backward(model(x).square().mean())
        opt.step()
    assert not opt.optimizer.at_average
    (model._orig_mod if inner else model).state_dict()
    assert opt.optimizer.at_average
