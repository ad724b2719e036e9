"""skorch: what only its nets do. What trainers share is in `test_trainers.py`."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("skorch")

from sklearn.base import clone
from skorch import NeuralNet
from skorch.callbacks import Callback
from skorch_cases import Net, Watch, fit, made
from torch.utils.data import DataLoader, TensorDataset
from trainer_cases import (
    BATCHES,
    EPOCHS,
    ROWS,
    SAMPLES,
    assert_at_average,
    assert_same_states,
    data,
    loss_of,
    network,
    plain_run,
    snapshot,
    untuned_run,
)

from stormplus import SimplifiedStormPlus, StormPlus, Untuned, same_sample
from stormplus.integrations.skorch import StormMixin


def test_dropout_and_order_without_seeds_of_our_own():
    net, _ = made(iterator_train__shuffle=True)
    net.set_params(callbacks=None).fit(*data())
    model = network()
    opt = StormPlus(model.parameters())
    loader = DataLoader(TensorDataset(*data()), batch_size=ROWS, shuffle=True)
    for x, y in (batch for _ in range(EPOCHS) for batch in loader):

        def closure():
            opt.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        opt.step(same_sample(opt, model)(closure))
    assert_same_states([snapshot(net.module_)], [snapshot(model)])


def test_the_mixin_brings_the_papers_lr_and_any_of_the_optimizers():
    net, run = made(epochs=1)
    net.fit(*data())
    assert type(run.opt) is StormPlus
    assert run.opt.param_groups[0]["lr"] == 1.0
    run = fit(None, epochs=1, kind=SimplifiedStormPlus, lr=0.1, optimizer__norm="mean")
    assert type(run.opt) is SimplifiedStormPlus
    assert run.opt.param_groups[0]["lr"] == 0.1
    copy = clone(run.trainer.set_params(callbacks=None))
    assert copy.get_params()["lr"] == 0.1
    assert copy.get_params()["optimizer"] is SimplifiedStormPlus


class StepsWithoutClosure(Net):
    """Accumulation as skorch's own documentation has it."""

    def train_step(self, batch, **fit_params):
        step = self.train_step_single(batch, **fit_params)
        self.optimizer_.step()
        return step


def test_accumulation_over_batches_is_refused():
    with pytest.raises(TypeError, match="needs a closure"):
        fit(None, net=StepsWithoutClosure)


def test_a_net_that_goes_back_to_its_checkpoint_does_not_restart(tmp_path):
    files = {"f_params": tmp_path / "p.pt", "f_optimizer": tmp_path / "o.pt"}
    whole, watch = plain_run().states, Watch()
    net, run = made(watch=watch, epochs=1)
    net.fit(*data())
    net.save_params(**files)
    for _ in range(2):
        net.partial_fit(*data())
        assert_same_states(run.states[-BATCHES:], whole[BATCHES:])
        net.load_params(**files)
        watch.count = BATCHES


class Clip(Callback):
    def on_batch_end(self, net, training=False, **_):
        with torch.no_grad():
            for p in net.module_.parameters():
                p.clamp_(-0.5, 0.5)


def test_writing_to_the_weights_at_every_batch_is_refused():
    with pytest.raises(RuntimeError, match=r"writes to the parameters at every batch.*Remove"):
        fit(None, callbacks=[("clip", Clip())])


def test_fitting_anew_is_no_writing():
    x, y = data()
    net, run = made(epochs=1)
    for _ in range(3):  # one batch each, with a module and an optimizer of its own
        net.fit(x[:ROWS], y[:ROWS])
    assert run.opt.diagnostics()["step"] == 1


def test_accelerate_is_refused():
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from skorch.hf import AccelerateMixin

    class Closures(StormMixin, AccelerateMixin, NeuralNet):
        pass

    class NoClosures(AccelerateMixin, NeuralNet):
        pass

    with pytest.raises(TypeError, match=r"AcceleratedOptimizer.*AccelerateMixin"):
        fit(None, net=Closures, accelerator=Accelerator(cpu=True))
    with pytest.raises(TypeError, match="needs a closure"):
        fit(None, net=NoClosures, accelerator=Accelerator(cpu=True))


class TwoOptimizers(Net):
    def initialize_optimizer(self, *args, **kwargs):
        super().initialize_optimizer(*args, **kwargs)
        self.second_optimizer_ = StormPlus(self.module_.parameters())
        return self


def test_several_optimizers_and_foreign_ones_are_refused():
    with pytest.raises(ValueError, match=r"optimizers \['optimizer', 'second_optimizer'\]"):
        fit(None, net=TwoOptimizers)
    with pytest.raises(TypeError, match="got SGD"):
        fit(None, tool=True, kind=torch.optim.SGD)


def test_a_step_without_a_closure_is_refused():
    net, _ = made()
    net.initialize()
    with pytest.raises(TypeError, match="got no closure"):
        net._step_optimizer(None)


# -- Untuned: the average, and no learning rate --------------------------------------------------


def test_without_the_mixin_untuned_cannot_be_made():
    """skorch passes its lr to every optimizer: nothing goes wrong quietly."""
    with pytest.raises(TypeError, match="lr"):
        fit(None, net=NeuralNet, kind=Untuned)


@pytest.mark.parametrize("where", ["lr", "optimizer__lr"])
def test_a_learning_rate_is_ignored_with_a_warning(where):
    net, run = made(epochs=1, optimizer=Untuned, **{where: 0.01})
    with pytest.warns(UserWarning, match=r"lr=0.01 is ignored: Untuned .*pass 1.0") as told:
        net.fit(*data())
    assert len([w for w in told if "is ignored" in str(w.message)]) == 1
    assert_same_states(run.states, untuned_run(epochs=1).states)


@pytest.mark.parametrize("where", ["lr", "optimizer__lr"])
def test_a_learning_rate_that_is_set_later_is_ignored_too(where):
    net, run = made(epochs=1, optimizer=Untuned)
    net.fit(*data())
    with pytest.warns(UserWarning, match=r"lr=0.01 is ignored: Untuned"):
        net.set_params(**{where: 0.01})
    net.partial_fit(*data())
    assert run.opt.param_groups[0]["lr"] == 1.0
    assert_same_states(run.states, untuned_run(epochs=2).states)


class Keeps(Callback):
    """What a callback finds at the end of an epoch."""

    def on_train_begin(self, net, **_):
        self.found = []

    def on_epoch_end(self, net, **_):
        self.found.append(snapshot(net.module_))


def test_what_callbacks_keep_of_an_epoch_without_validation_is_the_average():
    net, _ = made(optimizer=Untuned, epochs=2, train_split=None, callbacks=[("keeps", Keeps())])
    net.fit(*data())
    plain = untuned_run(epochs=2)
    for epoch, state in enumerate(dict(net.callbacks_)["keeps"].found, start=1):
        last = epoch * BATCHES - 1
        assert_at_average(state, plain.averages[last], plain.states[last])


def test_predictions_and_copies_are_at_the_average():
    net, run = made(optimizer=Untuned)
    x, y = data()
    net.fit(x, y)
    plain, more = untuned_run(), untuned_run(epochs=2 * EPOCHS)
    assert_same_states(run.states, plain.states)
    expected = network()
    expected.load_state_dict(plain.states[-1] | plain.averages[-1])
    with torch.no_grad():
        out = expected.eval()(x)
    for one in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net), net):
        torch.testing.assert_close(torch.from_numpy(one.predict(x)), out, rtol=1e-7, atol=1e-9)
        one.partial_fit(x, y)  # from the iterate
        assert_at_average(snapshot(one.module_), more.averages[-1], more.states[-1])


class Predicts(Callback):
    """Asks for a prediction in the middle of an epoch."""

    def on_batch_end(self, net, training=False, **_):
        if training:
            net.predict(data(1)[0])


def test_a_prediction_in_the_middle_of_an_epoch_disturbs_nothing():
    run = fit(None, kind=Untuned, tool=True, callbacks=[("predicts", Predicts())])
    plain = untuned_run()
    for step, state in enumerate(run.states):
        if step:  # at first the two are one
            assert_at_average(state, plain.averages[step], plain.states[step])
    assert run.net.evaluations == SAMPLES


def test_weights_that_are_loaded_alone_are_begun_from_anew(tmp_path):
    net, run = made(optimizer=Untuned, epochs=1)
    net.fit(*data())
    net.save_params(f_params=tmp_path / "1.pt")
    net.partial_fit(*data())
    net.load_params(f_params=tmp_path / "1.pt")
    plain, begun = untuned_run(), []
    run.opt.register_step_pre_hook(lambda *_: begun.append(snapshot(run.net)))
    with pytest.warns(UserWarning, match="without the state of Untuned: it begins anew"):
        net.partial_fit(*data())
    assert_at_average(begun[0], plain.averages[BATCHES - 1], plain.states[BATCHES - 1])
    assert run.opt.diagnostics()["step"] == BATCHES
