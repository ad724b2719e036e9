"""Untuned in each trainer's plain way: the plain loop's run, one evaluation a step."""

import pytest
import torch
import trainer_cases
from plain_loop import BATCH, Network, assert_same_runs, batches, data, network, snapshot
from torch import nn
from torch.nn import functional as F
from trainer_cases import ROWS, assert_same_states
from untuned_loop import untuned_loop

from stormplus import Untuned
from stormplus.torch.optimizer import takes_pairs

# Lightning's own, as in test_lightning.py
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]

BATCHES, EPOCHS = 8, 2


def expected_of_cases(window=1):
    """For the trainers whose network is that of `trainer_cases`, seeded once."""
    x, y = trainer_cases.data(BATCHES)
    samples = zip(x.split(ROWS), y.split(ROWS))
    return untuned_loop(
        trainer_cases.network(), samples, trainer_cases.loss_of, trainer_cases.snapshot,
        each=lambda i: torch.manual_seed(0) if i == 0 else None, window=window,
    )  # fmt: skip


def expected_of_loop(model, **options):
    """For the trainers whose network is that of `plain_loop`, seeded at every batch."""

    def loss_of(model, x, y):
        return F.cross_entropy(model(x), y)

    return untuned_loop(model, batches(EPOCHS), loss_of, snapshot, each=torch.manual_seed, **options)


def check_loop(run, model, opt, **options):
    other = network()
    plain, plain_opt = expected_of_loop(other, **options)
    assert_same_runs(run, plain)
    assert model.evaluations == other.evaluations == len(batches(EPOCHS))
    assert opt.diagnostics() == plain_opt.diagnostics()
    assert run[-1]["body.1.num_batches_tracked"] == len(batches(EPOCHS))


def test_lightning():
    pytest.importorskip("lightning")
    from lightning_cases import Module, Recorder, loader, trainer

    from stormplus.integrations.lightning import StormPlusCallback

    class Plain(Module):
        def configure_optimizers(self):
            return Untuned(self.parameters())

    recorder, module = Recorder(), Plain()
    fit = trainer(recorder)
    fit.fit(module, loader(BATCHES))
    states, opt = expected_of_cases()
    assert_same_states(recorder.states, states)
    assert module.evaluations == BATCHES
    assert fit.optimizers[0].diagnostics() == opt.diagnostics()
    with pytest.raises(TypeError, match=r"got Untuned: .*leave the callback out"):
        trainer(StormPlusCallback()).fit(Plain(), loader(2))


def test_lightning_with_a_correction_and_the_callback():
    pytest.importorskip("lightning")
    from lightning_cases import Module, loader, run

    class Corrected(Module):
        def configure_optimizers(self):
            return Untuned(self.parameters(), correction=True, distance=1, gradient=1)

    module = Corrected()
    states, _ = run(module, loader(BATCHES))
    assert_same_states(states, trainer_cases.plain_run(BATCHES)[0])  # it is StormPlus
    assert module.evaluations == 2 * BATCHES - 1


def test_huggingface(tmp_path):
    pytest.importorskip("transformers")
    from huggingface_cases import InOrder, Model, OrderedTrainer, Recorder, Rows, arguments
    from transformers import Trainer

    class Plain(InOrder, Trainer):
        pass

    def made(kind):
        model = Model()
        recorder = Recorder(model.net)
        opt = Untuned(model.parameters())
        trainer = kind(
            model, arguments(tmp_path), train_dataset=Rows(BATCHES), optimizers=(opt, None),
            callbacks=[recorder],
        )  # fmt: skip
        return trainer, model, recorder, opt

    trainer, model, recorder, opt = made(Plain)
    trainer.train()
    states, plain_opt = expected_of_cases()
    assert_same_states(recorder.states, states)
    assert model.evaluations == BATCHES
    assert opt.diagnostics() == plain_opt.diagnostics()
    with pytest.raises(TypeError, match=r"got Untuned: .*transformers.Trainer"):
        made(OrderedTrainer)[0].train()


@pytest.mark.parametrize("ours", [False, True], ids=["accelerator.prepare", "prepare"])
@pytest.mark.parametrize("window", [1, 2])
def test_accelerate(ours, window):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState, GradientState
    from torch.utils.data import DataLoader, TensorDataset

    from stormplus.integrations.accelerate import prepare

    if ours and window > 1:
        pytest.skip("prepare is for accelerators that do not accumulate")
    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        model = trainer_cases.network()
        parts = (
            model,
            Untuned(model.parameters()),
            DataLoader(TensorDataset(*trainer_cases.data(BATCHES)), batch_size=ROWS),
        )
        prepared = prepare(accelerator, *parts) if ours else accelerator.prepare(*parts)
        model, opt, loader = prepared
        assert type(opt) is AcceleratedOptimizer
        run, evaluations = [], 0
        for i, (x, y) in enumerate(loader):
            if i == 0:
                torch.manual_seed(0)  # torch's loader has drawn a seed for its workers
            with accelerator.accumulate(model):
                evaluations += 1
                accelerator.backward(trainer_cases.loss_of(model, x, y))
                opt.step()
                opt.zero_grad()
            if accelerator.sync_gradients:
                run.append(trainer_cases.snapshot(model))
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    states, plain_opt = expected_of_cases(window)
    assert_same_states(run, states)
    assert evaluations == BATCHES
    assert opt.optimizer.diagnostics() == plain_opt.diagnostics()
    assert plain_opt.diagnostics()["grad_evaluations"] == BATCHES / window


@pytest.mark.parametrize("mixin", [False, True])
def test_skorch(mixin):
    skorch = pytest.importorskip("skorch")

    from stormplus.integrations.skorch import StormMixin

    class WithMixin(StormMixin, skorch.NeuralNetClassifier):
        pass

    class Seed(skorch.callbacks.Callback):
        def __init__(self):
            self.count, self.snapshots = 0, []

        def on_batch_begin(self, net, **_):
            torch.manual_seed(self.count)

        def on_batch_end(self, net, **_):
            self.count += 1
            self.snapshots.append(snapshot(net.module_))

    seed, kind = Seed(), WithMixin if mixin else skorch.NeuralNetClassifier
    torch.manual_seed(0)
    net = kind(
        Network, criterion=nn.CrossEntropyLoss, optimizer=Untuned, lr=1.0, verbose=0,
        batch_size=BATCH, max_epochs=EPOCHS, train_split=None, callbacks=[("seed", seed)],
    )  # fmt: skip
    net.fit(*data())
    check_loop(seed.snapshots, net.module_, net.optimizer_)


def test_fastai(tmp_path):
    fastai_runs = pytest.importorskip("fastai_runs")
    storm, StormCallback = fastai_runs.storm, fastai_runs.StormCallback
    learn, watch = fastai_runs.learner(tmp_path, opt_func=storm(Untuned))
    with pytest.raises(TypeError, match=r"Untuned takes one gradient a step.*leave"):
        learn.fit(EPOCHS)
    learn, watch = fastai_runs.learner(tmp_path, opt_func=storm(Untuned))
    learn.remove_cb(StormCallback)
    learn.fit(EPOCHS)
    # fastai's wrapper has weight decay of its own: the default of Learner is none
    check_loop(watch.snapshots, learn.model, learn.opt.opt)
    learn.opt.clear_state()  # as freezing a part does
    assert learn.opt.opt.diagnostics()["step"] == 0
    learn.fit(1)


# Keras's own: it asks torch for a tensor's array in the way of NumPy 1
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras():
    runs = pytest.importorskip("keras_runs")
    model = runs.TorchInside()
    run = runs.fitted(model, lambda: snapshot(model.inside.module), method="Untuned")
    check_loop(run, model.inside.module, model.optimizer.torch_optimizer)


@pytest.mark.parametrize("lookahead", [False, True])
def test_by_name_from_pytorch_optimizer(lookahead):
    factory = pytest.importorskip("pytorch_optimizer")
    from pytorch_optimizer.optimizer import OPTIMIZERS as registry

    from stormplus.integrations.factories import register_pytorch_optimizer

    before = dict(registry)
    try:
        register_pytorch_optimizer()
        model, run = network(), []
        opt = factory.create_optimizer(
            model, "Untuned", lr=1.0, weight_decay=0.0, use_lookahead=lookahead
        )
        inner = opt.optimizer if lookahead else opt
        assert isinstance(inner, Untuned)
        assert not takes_pairs(inner)
        for i, (x, y) in enumerate(batches(EPOCHS)):
            torch.manual_seed(i)
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            run.append(snapshot(model))
    finally:
        registry.clear()
        registry.update(before)
    if not lookahead:
        check_loop(run, model, inner)
    assert model.evaluations == inner.diagnostics()["step"] == len(run)
