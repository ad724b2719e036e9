"""Lightning: what only its callbacks do. What trainers share is in `test_trainers.py`."""

import operator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.tuner import Tuner
from tests.support import trainer_cases
from tests.support.lightning_cases import (
    QUIET,
    Manual,
    Module,
    Validated,
    half_plugin,
    loader,
    weights_of,
)
from tests.support.trainer_cases import (
    BATCHES,
    ROWS,
    Run,
    Settings,
    assert_at_average,
    assert_same_runs,
    assert_same_states,
    data,
    loss_of,
    plain_run,
    snapshot,
    untuned_run,
)
from torch.utils.data import DataLoader, TensorDataset

from stormplus import Untuned
from stormplus.integrations.lightning import StormPlusCallback, UntunedCallback

fit = partial(trainer_cases.fit, "lightning")
TWICE_BUT_ONCE = 2 * BATCHES - 1


class Spoiled(Module):
    """Its loss overflows in evaluation 5, the second one of the third sample."""

    spoiled = (5,)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.net.evaluations in self.spoiled else loss


def test_fp16_overflow_in_the_second_evaluation_is_repeated_at_half_the_scale():
    half = {"half": torch.float16, "dtype": torch.float32, "epochs": 1}
    run = fit(module=Spoiled, scale=1024.0, **half)
    assert run.net.evaluations == TWICE_BUT_ONCE + 1
    assert run.net.body[1].num_batches_tracked == BATCHES
    # a power of two only shifts exponents
    for name, value in plain_run(scale=512.0, **half).states[-1].items():
        torch.testing.assert_close(run.states[-1][name], value, rtol=1e-4, atol=1e-5)


def test_fp16_overflow_in_every_second_evaluation_raises():
    class Lost(Spoiled):
        spoiled = range(5, 100)

    run = Run()
    with pytest.raises(FloatingPointError, match="overflowed 20 times"):
        fit(module=Lost, scale=1024.0, dtype=torch.float32, run=run)
    assert "training_step" not in vars(run.module)


def test_accumulation_without_the_callback_warns():
    with pytest.warns(UserWarning, match=r"accumulate_grad_batches=2 .* StormPlusCallback"):
        fit(accumulate=2, tool=False)


# -- logs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_logs_and_metrics_count_each_sample_once_with_its_own_size(accumulate):
    logged = []

    class Keeps(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if not self.optimizers().pending:  # the first evaluation
                logged.append((loss.item(), len(batch[0])))
            return loss

        def on_before_optimizer_step(self, optimizer):  # for the gradients of both evaluations
            self.log("steps", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    short = TensorDataset(*(part[: -ROWS // 2] for part in data()))
    rows = DataLoader(short, batch_size=ROWS)
    run = fit(module=Keeps, accumulate=accumulate, epochs=1, loader=rows)
    losses, sizes = zip(*logged)
    assert len(losses) == BATCHES < run.net.evaluations
    weighted = sum(map(operator.mul, losses, sizes)) / sum(sizes)
    expected = {
        "loss_epoch": weighted,
        "mean": sum(losses) / BATCHES,
        "steps": BATCHES / accumulate,
    }
    for name, value in expected.items():
        assert float(run.trainer.callback_metrics[name]) == pytest.approx(value, rel=1e-6)


def test_diagnostics_are_logged():
    run = fit(epochs=1, log_every_n_steps=3)
    for name, value in run.opt.diagnostics().items():
        logged = float(run.trainer.callback_metrics[f"stormplus/{name}"])
        assert logged == pytest.approx(value, rel=1e-6)
    run = fit(epochs=1, own=StormPlusCallback(log=False), log_every_n_steps=1)
    assert not any(name.startswith("stormplus/") for name in run.trainer.callback_metrics)


# -- the user's own hooks ------------------------------------------------------------------------


def test_an_optimizer_step_that_drops_the_closure():
    class Drops(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()
            optimizer.step()

    class DropsToo(Precision):
        def optimizer_step(self, optimizer, model, closure, **kwargs):
            closure()
            return optimizer.step()

    assert_same_runs(fit(module=Drops), plain_run())
    assert_same_runs(fit(plugins=[DropsToo()]), plain_run())

    class Never(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step()

    with pytest.raises(RuntimeError, match="no training step has been evaluated"):
        fit(module=Never)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_skipped_sample_changes_nothing():
    class Skips(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (0, 4) else loss

    run = fit(module=Skips, epochs=1)
    assert run.opt.diagnostics()["step"] == BATCHES - 2
    assert run.net.body[1].num_batches_tracked == BATCHES - 2
    assert_same_states(run.states[3:4], run.states[4:5])


def test_manual_optimization():
    run = fit(module=Manual)
    assert_same_runs(run, plain_run())
    assert run.trainer.global_step == 2 * BATCHES


# -- checkpoints ---------------------------------------------------------------------------------


class StatefulLoader:
    """What Lightning needs to resume in the middle of an epoch."""

    def __init__(self):
        self.batches = list(zip(*(part.split(ROWS) for part in data())))
        self.next = 0

    def __len__(self):
        return BATCHES

    def __iter__(self):
        torch.rand(3)  # as torch's loader, which draws the seed of its workers
        for i in range(self.next, BATCHES):
            self.next = (i + 1) % BATCHES
            yield self.batches[i]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def unseeded(folder, rows, step=None, accumulate=1, generators=()):
    """The random numbers of a batch depend on all that were drawn before."""

    class Unseeded(Module):
        seeded, optimizer_options = False, {"replay_rng": list(generators) or True}

    by_epoch = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    when = {"every_n_train_steps": 1} if isinstance(rows, StatefulLoader) else by_epoch
    saver = ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **when)
    path = None if step is None else folder / f"step={step}.ckpt"
    return fit(
        folder, saver, module=Unseeded, loader=rows, path=path, accumulate=accumulate, epochs=3,
        enable_checkpointing=True, setup=lambda _: torch.manual_seed(7 if step is None else 12345),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("step", "rows", "accumulate"),
    [
        (BATCHES, partial(loader, Settings(), shuffle=True), 1),
        (1, StatefulLoader, 1),
        (12, StatefulLoader, 1),
        (4, StatefulLoader, 2),
    ],
    ids=["epoch 1", "step 1", "end of epoch 2", "accumulated"],
)
def test_resume_without_seeds(tmp_path, step, rows, accumulate):
    whole = unseeded(tmp_path, rows(), accumulate=accumulate)
    rest = unseeded(tmp_path, rows(), step, accumulate)
    assert_same_states(rest.states, whole.states[step:])
    assert rest.opt.diagnostics() == whole.opt.diagnostics()


def test_a_checkpoint_of_other_devices_is_resumed_with_a_warning(tmp_path):
    """A generator takes part in the random state just as another device does."""
    unseeded(tmp_path, StatefulLoader(), generators=[torch.Generator()])
    with pytest.warns(UserWarning, match="other random numbers"):
        rest = unseeded(tmp_path, StatefulLoader(), 8)
    assert rest.net.evaluations == 2 * (3 * BATCHES - 8)


def test_a_checkpoint_of_one_process_leaves_each_of_two_its_own_random_numbers():
    callback = StormPlusCallback()
    callback.on_load_checkpoint(SimpleNamespace(world_size=2), None, {"stormplus": {"rng": 1}})
    callback.on_fit_start(None, None)  # does not rewind


def test_a_checkpoint_after_validation_has_no_random_state(tmp_path):
    trainer, s = Trainer(callbacks=[StormPlusCallback()], **QUIET), Settings()
    trainer.validate(Validated(s), loader(s), verbose=False)
    trainer.save_checkpoint(tmp_path / "validated.ckpt")
    assert "stormplus" not in torch.load(tmp_path / "validated.ckpt", weights_only=True)


# -- refusals ------------------------------------------------------------------------------------


class Adam(Module):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class DrawsItsBatch(Module):
    def training_step(self, dataloader_iter):
        return loss_of(self.net, *next(dataloader_iter)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": Adam}, "got Adam"),
        ({"module": DrawsItsBatch}, "draws another batch each time it is called"),
        ({"module": Manual, "plugins": [half_plugin(1024.0)]}, "16-mixed"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "average with EMA"),
        (
            {"callbacks": [StochasticWeightAveraging(0.1)], "kind": Untuned},
            "Untuned averages by itself",
        ),
        (
            {"module": Manual, "kind": Untuned, "recalibrate_batches": 2},
            "steps with manual optimization",
        ),
        ({"recalibrate_batches": -1}, "at least 0, got -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_what_would_be_wrong_is_refused(options, message):
    options = dict(options)
    with pytest.raises((TypeError, ValueError), match=message):
        fit(None, *options.pop("callbacks", ()), **options)


def test_the_trainer_of_the_other_package_is_refused_with_the_import_to_use():
    other = pytest.importorskip("pytorch_lightning").Trainer(max_epochs=1, **QUIET)
    with pytest.raises(TypeError, match="import Trainer from lightning"):
        StormPlusCallback().on_train_start(other, None)


# -- Untuned -------------------------------------------------------------------------------------


def test_an_interrupted_run_leaves_the_average():
    run = Run()
    with pytest.raises(OSError, match="a broken disc"):
        fit(kind=Untuned, recalibrate_batches=4, fails_at=6, run=run)
    assert_at_average(snapshot(run.net), untuned_run(epochs=1), 5)
    assert "save_checkpoint" not in vars(run.trainer)


def test_a_checkpoint_in_the_middle_of_a_step_does_not_change_the_run(tmp_path):
    class Saves(Module):
        def on_before_optimizer_step(self, optimizer):
            self.trainer.save_checkpoint(tmp_path / "now.ckpt")

    plain = untuned_run(epochs=1)
    assert_same_runs(fit(module=Saves, kind=Untuned, epochs=1), plain)
    assert_at_average(weights_of(tmp_path / "now.ckpt"), plain, BATCHES - 1)


@pytest.mark.parametrize("callbacks", [[UntunedCallback()], []], ids=["with callback", "without"])
def test_the_learning_rate_finder_is_refused(callbacks, tmp_path):
    s = Settings(kind=Untuned)
    module = Module(s)
    module.lr = 0.1
    trainer = Trainer(callbacks=callbacks, default_root_dir=tmp_path, max_epochs=1, **QUIET)
    with pytest.raises(RuntimeError, match="no learning rate to find"):
        Tuner(trainer).lr_find(module, loader(s), num_training=5)
