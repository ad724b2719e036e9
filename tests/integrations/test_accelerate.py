"""Accelerate: what only `prepare` does. What trainers share is in `test_trainers.py`."""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from tests.support.accelerate_cases import closure_for
from tests.support.trainer_cases import (
    ROWS,
    Run,
    assert_same_runs,
    data,
    fit,
    loss_of,
    network,
    plain_run,
    snapshot,
    warnings_with,
)

from stormplus import StormPlus, Untuned
from stormplus.integrations.accelerate import prepare


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


def test_steps_with_a_closure_between_validations():
    accelerator, run = Accelerator(cpu=True), Run()
    run.net = network()
    run.opt = Untuned(run.net.parameters())
    model, opt = prepare(accelerator, run.net, run.opt)
    for i, (x, y) in enumerate(zip(*(part.split(ROWS) for part in data()))):
        torch.manual_seed(i)
        opt.step(closure_for(accelerator, model, opt, x, y))
        run.states.append(snapshot(run.net))
        with torch.no_grad():
            model.eval()(x)
        assert run.opt.at_average
        model.train()
    assert_same_runs(run, plain_run(kind=Untuned, epochs=1))


def test_what_is_refused():
    model = network()
    opt = StormPlus(model.parameters())
    several = SimpleNamespace(gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4 drops closures"):
        prepare(several, model, opt)
    elsewhere = SimpleNamespace(value="DEEPSPEED")
    with pytest.raises(ValueError, match="DEEPSPEED has not been verified"):
        prepare(SimpleNamespace(gradient_accumulation_steps=1, distributed_type=elsewhere))
    accelerator = Accelerator(cpu=True)
    prepare(accelerator, network())  # another model
    for one in (opt, Untuned(model.parameters())):
        with pytest.raises(ValueError, match="prepare the model before the optimizer"):
            prepare(accelerator, one)


def test_other_optimizers_stay_as_they_are():
    model = network()
    _, opt = prepare(Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), lr=0.1))
    opt.step()  # without a closure, as ever


def test_a_wrapper_that_passes_eval_on_saves_the_average_without_a_warning(recwarn):
    net = network()
    inner = Untuned(net.parameters())
    _, opt = Accelerator(cpu=True).prepare(net, inner)
    loss_of(net, *data(1)).backward()
    opt.step()
    opt.eval()
    opt.state_dict()
    assert inner.at_average
    assert not warnings_with(recwarn, "the iterate of Untuned is saved")


def test_a_copy_of_the_model_does_not_swap():
    """An average of the user's, say, which is evaluated while the model trains."""
    run = fit("accelerate", kind=Untuned, epochs=1)
    twin = copy.deepcopy(run.net)
    with torch.no_grad():
        for p in twin.parameters():
            p.fill_(0.5)
        twin.eval()(data(1)[0])
        twin.train()(data(1)[0])
    twin.state_dict()
    assert all(bool((p == 0.5).all()) for p in twin.parameters())
    assert not run.opt.at_average


@pytest.mark.parametrize("inner", [True, False])
def test_a_compiled_model_is_saved_at_the_average(inner):
    accelerator, net = Accelerator(cpu=True), torch.nn.Linear(6, 1)
    compiled = torch.compile(net, backend="eager")
    model, opt = prepare(accelerator, compiled, Untuned(net.parameters()))
    for x in torch.randn(3, ROWS, 6):
        opt.zero_grad()
        accelerator.backward(model(x).square().mean())
        opt.step()
    assert not opt.optimizer.at_average
    (model._orig_mod if inner else model).state_dict()
    assert opt.optimizer.at_average
