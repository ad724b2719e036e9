"""skorch: the net's run is the plain loop's, step by step."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain_loop import BATCH, Network, assert_same_runs, batches, data, network, plain_run, snapshot
from sklearn.base import clone
from torch import nn
from torch.nn import functional as F

from stormplus import SimplifiedStormPlus, StormPlus, same_sample

skorch = pytest.importorskip("skorch")
from skorch.callbacks import (  # noqa: E402
    Callback,
    Checkpoint,
    GradientNormClipping,
    LoadInitState,
    LRScheduler,
)

from stormplus.integrations.skorch import StormMixin  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS = 2
SAMPLES = len(batches(EPOCHS))


class Net(StormMixin, skorch.NeuralNetClassifier):
    pass


class Seed(Callback):
    """One seed a sample, as the plain loop has it; notes where the net is afterwards."""

    def __init__(self, first=0):
        self.count = first
        self.snapshots = []

    def on_batch_begin(self, net, training=False, **_):
        if training:
            torch.manual_seed(self.count)

    def on_batch_end(self, net, training=False, **_):
        if training:
            self.count += 1
            self.snapshots.append(snapshot(net.module_))


def made(kind=Net, first=0, callbacks=(), epochs=EPOCHS, **options):
    seed = Seed(first)
    torch.manual_seed(0)
    net = kind(
        Network, criterion=nn.CrossEntropyLoss, batch_size=BATCH, max_epochs=epochs,
        train_split=None, verbose=0, callbacks=[*callbacks, ("seed", seed)], **options,
    )  # fmt: skip
    return net, seed


def fitted(*args, **options):
    net, seed = made(*args, **options)
    net.fit(*data())
    return net, seed.snapshots


def seeded(i, opt):
    torch.manual_seed(i)


def test_the_run_is_the_plain_loops():
    net, run = fitted(lr=0.5)
    model = network()
    plain, opt = plain_run(model, batches(EPOCHS), each=seeded, lr=0.5)
    assert_same_runs(run, plain)
    assert net.module_.evaluations == model.evaluations == 2 * SAMPLES - 1
    assert net.optimizer_.diagnostics() == opt.diagnostics()
    assert run[-1]["body.1.num_batches_tracked"] == SAMPLES


def test_dropout_and_order_without_seeds_of_our_own():
    torch.manual_seed(0)
    net = Net(Network, criterion=nn.CrossEntropyLoss, batch_size=BATCH, max_epochs=EPOCHS,
              train_split=None, verbose=0, iterator_train__shuffle=True)  # fmt: skip
    net.fit(*data())
    model = network()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*data()), batch_size=BATCH, shuffle=True
    )
    plain_samples = (batch for _ in range(EPOCHS) for batch in loader)
    plain, _ = plain_run(model, plain_samples)
    assert_same_runs([plain[0], snapshot(net.module_)], [plain[0], plain[-1]])


def test_the_mixin_brings_the_papers_lr_and_any_of_the_optimizers():
    net, _ = fitted(epochs=1)
    assert type(net.optimizer_) is StormPlus
    assert net.optimizer_.param_groups[0]["lr"] == 1.0
    net, _ = fitted(epochs=1, optimizer=SimplifiedStormPlus, optimizer__norm="mean", lr=0.1)
    assert type(net.optimizer_) is SimplifiedStormPlus
    assert net.optimizer_.param_groups[0]["lr"] == 0.1


def test_without_the_mixin_statistics_move_twice():
    net, _ = fitted(skorch.NeuralNetClassifier, optimizer=StormPlus, lr=1.0)
    assert net.module_.body[1].num_batches_tracked == 2 * SAMPLES - 1


def test_clipping_sees_both_gradients():
    _, run = fitted(callbacks=[("clip", GradientNormClipping(0.1))])
    plain, _ = plain_run(network(), batches(EPOCHS), each=seeded, clip=0.1)
    assert_same_runs(run, plain)


def test_schedules():
    schedule = LRScheduler(torch.optim.lr_scheduler.StepLR, step_size=2, step_every="batch")
    _, run = fitted(callbacks=[("schedule", schedule)])

    def each(i, opt):
        torch.manual_seed(i)
        opt.param_groups[0]["lr"] = 0.1 ** (i // 2)

    plain, _ = plain_run(network(), batches(EPOCHS), each=each)
    for mine, theirs in zip(run, plain):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name])


class Bf16(Net):
    def infer(self, x, **fit_params):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().infer(x, **fit_params).float()


def test_bf16_autocast_in_infer():
    _, run = fitted(Bf16)
    plain, _ = plain_run(network(), batches(EPOCHS), each=seeded, autocast=torch.bfloat16)
    assert_same_runs(run, plain)
    full, _ = plain_run(network(), batches(EPOCHS), each=seeded)
    assert not torch.equal(run[-1]["body.0.weight"], full[-1]["body.0.weight"])


class Accumulating(Net):
    """Micro-batches inside the closure: the way that works."""

    def train_step_single(self, batch, **fit_params):
        parts = zip(*(part.chunk(2) for part in batch))
        steps = [super(Accumulating, self).train_step_single(part) for part in parts]
        for p in self.module_.parameters():
            p.grad /= 2
        return {
            "loss": torch.stack([step["loss"].detach() for step in steps]).mean(),
            "y_pred": torch.cat([step["y_pred"] for step in steps]),
        }


def test_accumulation_inside_the_closure():
    net, run = fitted(Accumulating)
    model = network()
    opt = StormPlus(model.parameters())
    plain = []
    for i, (x, y) in enumerate(batches(EPOCHS)):
        torch.manual_seed(i)

        def closure():
            opt.zero_grad()
            for part_x, part_y in zip(x.chunk(2), y.chunk(2)):
                F.cross_entropy(model(part_x), part_y).backward()
            for p in model.parameters():
                p.grad /= 2

        opt.step(same_sample(opt, model)(closure))
        plain.append(snapshot(model))
    assert_same_runs(run, plain)
    assert net.module_.evaluations == 2 * (2 * SAMPLES - 1)


class StepsWithoutClosure(Net):
    """Accumulation as skorch's own documentation has it."""

    def train_step(self, batch, **fit_params):
        step = self.train_step_single(batch, **fit_params)
        self.optimizer_.step()
        return step


def test_accumulation_over_batches_is_refused():
    with pytest.raises(TypeError, match="needs a closure"):
        fitted(StepsWithoutClosure)


def test_save_params_and_load_params_go_on_bit_by_bit(tmp_path):
    files = {"f_params": tmp_path / "p.pt", "f_optimizer": tmp_path / "o.pt"}
    _, whole = fitted()
    first, start = made(epochs=1)
    first.fit(*data())
    first.save_params(**files)
    second, rest = made(first=len(start.snapshots), epochs=1)
    second.initialize()
    second.load_params(**files)
    second.partial_fit(*data())
    assert_same_runs(start.snapshots + rest.snapshots, whole)
    assert second.optimizer_.diagnostics()["grad_evaluations"] == 2 * SAMPLES - 1


def test_a_net_that_goes_back_to_its_checkpoint_does_not_restart(tmp_path):
    files = {"f_params": tmp_path / "p.pt", "f_optimizer": tmp_path / "o.pt"}
    _, whole = fitted()
    net, seed = made(epochs=1)
    net.fit(*data())
    net.save_params(**files)
    for _ in range(2):
        net.partial_fit(*data())
        half = len(seed.snapshots) - SAMPLES // EPOCHS
        assert_same_runs(seed.snapshots[half:], whole[SAMPLES // EPOCHS :])
        net.load_params(**files)
        seed.count = SAMPLES // EPOCHS


def test_checkpoint_callbacks_go_on_bit_by_bit(tmp_path):
    def checkpoint():
        return Checkpoint(monitor=None, dirname=tmp_path)

    _, whole = fitted()
    _, start = fitted(callbacks=[("save", checkpoint())], epochs=1)
    _, rest = fitted(first=len(start), callbacks=[("load", LoadInitState(checkpoint()))], epochs=1)
    assert_same_runs(start + rest, whole)


def test_pickle_and_clone():
    net, _ = fitted(lr=0.5)
    again = pickle.loads(pickle.dumps(net))
    assert again.optimizer_.diagnostics() == net.optimizer_.diagnostics()
    copy = clone(net.set_params(callbacks=None))
    assert copy.get_params()["lr"] == 0.5
    assert copy.get_params()["optimizer"] is StormPlus


def test_a_pickled_net_goes_on_bit_by_bit():
    _, whole = fitted()
    net, start = made(epochs=1)
    net.fit(*data())
    again = pickle.loads(pickle.dumps(net))
    again.partial_fit(*data())
    rest = dict(again.callbacks_)["seed"].snapshots  # its copy goes on from where it was
    assert_same_runs(rest, whole)


def test_loaded_weights_restart_the_estimator(tmp_path):
    torch.save(network(seed=1).state_dict(), tmp_path / "p.pt")
    net, seed = made(epochs=1)
    net.fit(*data())
    net.load_params(f_params=tmp_path / "p.pt")  # the optimizer's state is not loaded
    net.partial_fit(*data())
    model = network()

    def each(i, opt):
        torch.manual_seed(i)
        if i == SAMPLES // EPOCHS:
            model.load_state_dict(network(seed=1).state_dict())
            opt.restart()
            torch.manual_seed(i)

    plain, opt = plain_run(model, batches(EPOCHS), each=each)
    assert_same_runs(seed.snapshots, plain)
    assert net.optimizer_.diagnostics() == opt.diagnostics()
    assert opt.diagnostics()["grad_evaluations"] == 2 * SAMPLES - 2


class Clip(Callback):
    def on_batch_end(self, net, training=False, **_):
        with torch.no_grad():
            for p in net.module_.parameters():
                p.clamp_(-0.5, 0.5)


def test_writing_to_the_weights_at_every_batch_is_refused():
    with pytest.raises(RuntimeError, match=r"writes to the parameters at every batch.*Remove"):
        fitted(callbacks=[("clip", Clip())])


def test_fitting_anew_is_no_writing():
    x, y = data()
    net, _ = made(epochs=1)
    for _ in range(3):  # one batch each, with a module and an optimizer of its own
        net.fit(x[:BATCH], y[:BATCH])
    assert net.optimizer_.diagnostics()["step"] == 1


def test_accelerate_is_refused():
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from skorch.hf import AccelerateMixin

    class Closures(StormMixin, AccelerateMixin, skorch.NeuralNetClassifier):
        pass

    class NoClosures(AccelerateMixin, skorch.NeuralNetClassifier):
        pass

    with pytest.raises(TypeError, match=r"AcceleratedOptimizer.*AccelerateMixin"):
        fitted(Closures, accelerator=Accelerator(cpu=True))
    with pytest.raises(TypeError, match="needs a closure"):
        fitted(NoClosures, accelerator=Accelerator(cpu=True), optimizer=StormPlus)


class TwoOptimizers(Net):
    def initialize_optimizer(self, *args, **kwargs):
        super().initialize_optimizer(*args, **kwargs)
        self.second_optimizer_ = StormPlus(self.module_.parameters())
        return self


def test_several_optimizers_and_foreign_ones_are_refused():
    with pytest.raises(ValueError, match=r"optimizers \['optimizer', 'second_optimizer'\]"):
        fitted(TwoOptimizers)
    with pytest.raises(TypeError, match="got SGD"):
        fitted(optimizer=torch.optim.SGD)


@pytest.mark.long  # a process of its own imports everything anew
def test_the_example_runs():
    out = subprocess.run(
        [sys.executable, str(EXAMPLES / "skorch_classifier.py"), "--epochs", "2"],
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip
    assert "58 batches, 115 evaluations, running statistics moved 58 times" in out
