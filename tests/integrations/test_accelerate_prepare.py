"""What `prepare` needs and refuses; the example, in one process and in two."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from pages import ROOT, run_example
from trainer_cases import ROWS, assert_same_states, data, loss_of, network, plain_run, snapshot

from stormplus import StormPlus
from stormplus.integrations.accelerate import prepare

BATCHES = 4


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.parametrize("by_ours", [True, False])
def test_model_and_optimizer_in_two_calls(by_ours):
    accelerator, model = Accelerator(cpu=True), network()
    opt = StormPlus(model.parameters())
    model = prepare(accelerator, model) if by_ours else accelerator.prepare(model)
    opt = prepare(accelerator, opt)
    x, y = data(BATCHES)
    states, calls = [], []
    torch.manual_seed(0)
    for u, v in zip(x.split(ROWS), y.split(ROWS)):

        def closure():
            calls.append(None)
            opt.zero_grad()
            loss = loss_of(model, u, v)
            accelerator.backward(loss)
            return loss

        opt.step(closure)
        states.append(snapshot(model))
    assert int(model[1].num_batches_tracked) == BATCHES
    assert len(calls) == 2 * BATCHES - 1
    assert_same_states(states, plain_run(BATCHES)[0])


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


@pytest.mark.long
def test_the_example_counts_each_micro_batch_once():
    out = run_example("accelerate_loop.py", "--epochs", 2)
    # 22 batches of 64 rows in 2 halves
    assert f"44 samples, {2 * (2 * 44 - 1)} evaluations" in out
    assert "running statistics moved 88 times" in out


@pytest.mark.long
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


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "stormplus.integrations.accelerate")
    with pytest.raises(ModuleNotFoundError, match=r"stormplus\[accelerate\]"):
        importlib.import_module("stormplus.integrations.accelerate")
