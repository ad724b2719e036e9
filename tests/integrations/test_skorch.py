"""skorch: what only its nets do. What trainers share is in `test_trainers.py`."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("skorch")

from sklearn.base import clone
from skorch import NeuralNet
from skorch.callbacks import Callback, Checkpoint, LoadInitState
from skorch_cases import Net, fit, made
from trainer_cases import (
    BATCHES,
    EPOCHS,
    ROWS,
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


def test_the_mixin_sets_the_papers_lr_and_takes_any_of_the_optimizers():
    net, run = made(epochs=1)
    net.fit(*data())
    assert type(run.opt) is StormPlus
    assert run.opt.param_groups[0]["lr"] == 1.0
    run = fit(None, epochs=1, kind=SimplifiedStormPlus, lr=0.1, optimizer__weight_decay=0.1)
    group = run.opt.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.1)
    copy = clone(run.trainer.set_params(callbacks=None))
    assert copy.get_params()["lr"] == 0.1
    assert copy.get_params()["optimizer"] is SimplifiedStormPlus


def test_checkpoints_and_load_init_state_continue_the_run(tmp_path):
    first, last = (Checkpoint(monitor=None, dirname=tmp_path) for _ in range(2))
    start = fit(None, ("save", first), epochs=1)
    rest = fit(None, ("load", LoadInitState(last)), epochs=1)
    assert len(start.states) == len(rest.states) == BATCHES
    assert rest.opt.grad_evaluations == 2 * SAMPLES - 1


@pytest.mark.parametrize("kind", [StormPlus, Untuned], ids=lambda kind: kind.__name__)
def test_pickled_and_copied_nets_predict_and_continue(kind):
    net, _ = made(optimizer=kind)
    x, y = data()
    net.fit(x, y)
    plain, more = (plain_run(kind=kind, epochs=n * EPOCHS) for n in (1, 2))
    expected = network()
    expected.load_state_dict(plain.states[-1])
    if kind is Untuned:
        averages = untuned_run(epochs=2 * EPOCHS)
        expected.load_state_dict(averages.averages[SAMPLES - 1], strict=False)
    with torch.no_grad():
        out = expected.eval()(x)
    for one in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net), net):
        torch.testing.assert_close(torch.from_numpy(one.predict(x)), out, rtol=1e-7, atol=1e-9)
        one.partial_fit(x, y)  # from the iterate
        if kind is Untuned:
            assert_at_average(snapshot(one.module_), averages, 2 * SAMPLES)
        else:
            assert_same_states([snapshot(one.module_)], more.states[-1:])


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
        fit(None, **options)


def test_accelerate_is_refused():
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from skorch.hf import AccelerateMixin

    class Closures(StormPlusNetMixin, AccelerateMixin, NeuralNet):
        pass

    with pytest.raises(TypeError, match=r"AcceleratedOptimizer.*AccelerateMixin"):
        fit(None, net=Closures, accelerator=Accelerator(cpu=True))


def test_fitting_again_is_no_writing():
    x, y = data()
    net, run = made(epochs=1)
    for _ in range(3):  # one batch each, with a new module and optimizer
        net.fit(x[:ROWS], y[:ROWS])
    assert run.opt.diagnostics()["step"] == 1


# -- Untuned -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lr", "optimizer__lr"])
def test_a_learning_rate_is_ignored_with_a_warning(name):
    net, run = made(epochs=1, optimizer=Untuned, **{name: 0.01})
    with pytest.warns(UserWarning, match=r"lr=0.01 is ignored: Untuned"):
        net.fit(*data())
    with pytest.warns(UserWarning, match=r"lr=0.02 is ignored: Untuned"):
        net.set_params(**{name: 0.02})  # while it trains
    net.partial_fit(*data())
    assert run.opt.param_groups[0]["lr"] == 1.0
    assert_same_states(run.states, plain_run(kind=Untuned, epochs=2).states)


def test_callbacks_see_the_average_after_an_epoch_without_validation():
    class Keeps(Callback):
        def on_train_begin(self, net, **_):
            self.found = []

        def on_epoch_end(self, net, **_):
            self.found.append(snapshot(net.module_))

    net, _ = made(optimizer=Untuned, callbacks=[("keeps", Keeps())])
    net.fit(*data())
    plain = untuned_run()
    for epoch, state in enumerate(dict(net.callbacks_)["keeps"].found, start=1):
        assert_at_average(state, plain, epoch * BATCHES)


def test_a_prediction_in_the_middle_of_an_epoch_changes_nothing():
    class Predicts(Callback):
        def on_batch_end(self, net, training=False, **_):
            if training:
                net.predict(data(1)[0])

    run, plain = fit(None, ("predicts", Predicts()), kind=Untuned), untuned_run()
    for step, state in enumerate(run.states[1:], start=2):  # after one step the two are the same
        assert_at_average(state, plain, step)
    assert run.net.evaluations == SAMPLES
