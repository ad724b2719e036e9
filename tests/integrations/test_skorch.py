"""skorch: what only its nets do. What trainers share is in `test_trainers.py`."""

import copy
import pickle
from functools import partial

import pytest
import torch
from sklearn.base import clone
from skorch import NeuralNet
from skorch.callbacks import Callback, Checkpoint, LoadInitState
from tests.support import trainer_cases
from tests.support.skorch_cases import Net
from tests.support.trainer_cases import (
    BATCHES,
    SAMPLES,
    assert_at_average,
    assert_same_states,
    data,
    network,
    plain_run,
    snapshot,
    untuned_run,
)

from stormplus import SimplifiedStormPlus, StormPlus, Untuned
from stormplus.integrations.skorch import StormPlusNetMixin

fit = partial(trainer_cases.fit, "skorch", None)


def test_the_mixin_sets_the_papers_lr_and_takes_any_of_the_optimizers():
    net = Net(torch.nn.Linear, torch.nn.MSELoss)
    assert (net.optimizer, net.lr) == (StormPlus, 1.0)
    run = fit(epochs=1, kind=SimplifiedStormPlus, lr=0.1, optimizer__weight_decay=0.1)
    group = run.opt.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.1)
    twin = clone(run.trainer.set_params(callbacks=None))
    assert (twin.optimizer, twin.lr) == (SimplifiedStormPlus, 0.1)


def test_a_net_without_the_mixin_warns_once_that_statistics_move_twice():
    net = NeuralNet(torch.nn.Linear, torch.nn.MSELoss, optimizer=StormPlus, lr=1.0, max_epochs=1)
    net.set_params(module__in_features=3, module__out_features=1, train_split=None, verbose=0)
    with pytest.warns(UserWarning, match="StormPlusNetMixin") as caught:
        net.fit(torch.ones(8, 3), torch.ones(8, 1))
    assert len(caught) == 1


def test_checkpoints_and_load_init_state_continue_the_run(tmp_path):
    first, last = (Checkpoint(monitor=None, dirname=tmp_path) for _ in range(2))
    start = fit(("save", first), epochs=1)
    rest = fit(("load", LoadInitState(last)), epochs=1)
    assert len(start.states) == len(rest.states) == BATCHES
    assert rest.opt.grad_evaluations == 2 * SAMPLES - 1


@pytest.mark.parametrize("kind", [StormPlus, Untuned], ids=lambda kind: kind.__name__)
def test_pickled_and_copied_nets_predict_and_continue(kind):
    net, x = fit(kind=kind).trainer, data()[0]
    plain = untuned_run(epochs=4) if kind is Untuned else plain_run(epochs=4)
    expected = network()
    expected.load_state_dict(plain.states[SAMPLES - 1])
    if kind is Untuned:
        expected.load_state_dict(plain.averages[SAMPLES - 1], strict=False)
    with torch.no_grad():
        out = expected.eval()(x)
    for one in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net), net):
        torch.testing.assert_close(torch.from_numpy(one.predict(x)), out, rtol=1e-7, atol=1e-9)
        one.partial_fit(*data())  # from the iterate
        if kind is Untuned:
            assert_at_average(snapshot(one.module_), plain, 2 * SAMPLES)
        else:
            assert_same_states([snapshot(one.module_)], plain.states[-1:])


class StepsWithoutClosure(Net):
    """Accumulation as skorch's own documentation has it."""

    def train_step(self, batch, **fit_params):
        step = self.train_step_single(batch, **fit_params)
        self.optimizer_.step()
        return step


class TwoOptimizers(Net):
    def initialize_optimizer(self, *args, **kwargs):
        super().initialize_optimizer(*args, **kwargs)
        self.second_optimizer_ = StormPlus(self.module_.parameters())
        return self


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"net": StepsWithoutClosure}, "needs a closure"),
        ({"net": TwoOptimizers}, r"optimizers \['optimizer', 'second_optimizer'\]"),
        ({"kind": torch.optim.SGD}, "got SGD"),
        ({"net": NeuralNet, "kind": Untuned}, "lr"),  # skorch passes its lr to every optimizer
    ],
    ids=["no closure", "two optimizers", "another optimizer", "no mixin"],
)
def test_what_would_be_wrong_is_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fit(**options)


def test_untuned_accumulates_as_skorchs_documentation_has_it():
    run = fit(net=StepsWithoutClosure, kind=Untuned)
    assert run.net.evaluations == SAMPLES
    assert run.opt.at_average


def test_accelerate_is_refused():
    accelerate = pytest.importorskip("accelerate")
    from skorch.hf import AccelerateMixin

    class Closures(StormPlusNetMixin, AccelerateMixin, NeuralNet):
        pass

    with pytest.raises(TypeError, match=r"AcceleratedOptimizer.*AccelerateMixin"):
        fit(net=Closures, accelerator=accelerate.Accelerator(cpu=True))


@pytest.mark.parametrize("name", ["lr", "optimizer__lr"])
def test_a_learning_rate_of_untuned_is_ignored_while_it_trains(name):
    run = fit(kind=Untuned, epochs=1)
    with pytest.warns(UserWarning, match=r"lr=0.02 is ignored: Untuned"):
        run.trainer.set_params(**{name: 0.02})
    run.trainer.partial_fit(*data())
    assert_same_states(run.states, plain_run(kind=Untuned).states)


def test_callbacks_see_the_average_after_an_epoch():
    plain, seen = untuned_run(), []

    class Looks(Callback):
        def on_epoch_end(self, net, **_):
            seen.append(snapshot(net.module_))

    fit(("looks", Looks()), kind=Untuned)
    for epoch, state in enumerate(seen, start=1):
        assert_at_average(state, plain, epoch * BATCHES)
