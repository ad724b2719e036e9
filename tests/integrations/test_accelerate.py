"""Accelerate: what only `prepare` does. What trainers share is in `test_trainers.py`."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate_cases import closure_for
from pages import ROOT
from trainer_cases import BATCHES, ROWS, Run, assert_same_runs, data, network, plain_run, snapshot

from stormplus import StormPlus
from stormplus.integrations.accelerate import prepare


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_accumulation_by_accelerate_is_refused():
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4 drops closures"):
        prepare(Accelerator(cpu=True, gradient_accumulation_steps=4))


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
