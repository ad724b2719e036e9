"""Lightning: what only its callbacks do. What trainers share is in `test_trainers.py`."""

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.tuner import Tuner
from lightning_cases import (
    SAFELY,
    Manual,
    Module,
    Recorder,
    Validated,
    half_plugin,
    loader,
    run,
    trainer,
    weights_of,
)
from torch.utils.data import DataLoader, TensorDataset
from trainer_cases import (
    BATCHES,
    ROWS,
    assert_at_average,
    assert_same_runs,
    assert_same_states,
    data,
    loss_of,
    plain_run,
    snapshot,
    untuned_run,
)

from stormplus import StormPlus, Untuned, same_sample
from stormplus.integrations.lightning import StormPlusCallback, UntunedCallback

TWICE_BUT_ONCE = 2 * BATCHES - 1

# -- precision and accumulation ------------------------------------------------------------------


def test_fp16_overflow_in_the_second_evaluation():
    class Spoiled(Module):
        spoiled = ()

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.inf if self.net.evaluations in self.spoiled else loss

    module = Spoiled(torch.float32)
    module.spoiled = {5}  # evaluations 1, 2-3, 4-5: the second one of the third sample
    done, _ = run(module, loader(dtype=torch.float32), plugins=[half_plugin(1024.0)])
    assert module.net.evaluations == TWICE_BUT_ONCE + 1  # repeated once, at half the scale
    assert int(module.net.body[1].num_batches_tracked) == BATCHES
    # a power of two only shifts exponents
    expected = plain_run(epochs=1, scale=512.0, half=torch.float16, dtype=torch.float32).states
    for name, value in expected[-1].items():
        torch.testing.assert_close(done.states[-1][name], value, rtol=1e-4, atol=1e-5)

    module = Spoiled(torch.float32)
    module.spoiled = range(5, 100)
    with pytest.raises(FloatingPointError, match="overflowed 20 times"):
        run(module, loader(dtype=torch.float32), plugins=[half_plugin(1024.0)])
    assert "training_step" not in vars(module)


def test_accumulation_in_fp16_and_by_a_scheduler():
    module, options = Module(torch.float32), {"plugins": [half_plugin(1024.0)]}
    done, _ = run(module, loader(dtype=torch.float32), accumulate_grad_batches=3, **options)
    plain = plain_run(epochs=1, accumulate=3, half=torch.float16, dtype=torch.float32)
    assert module.net.evaluations == plain.net.evaluations == 9
    for name, value in plain.states[-1].items():  # without a scale small gradients are lost
        torch.testing.assert_close(done.states[-1][name], value, rtol=1e-2, atol=1e-3)

    module = Module()
    done, _ = run(module, loader(), GradientAccumulationScheduler({0: 1, 1: 3}), epochs=2)
    assert_same_states(done.states[:BATCHES], plain_run(epochs=1).states)
    assert module.net.evaluations == TWICE_BUT_ONCE + 2 * BATCHES


def test_accumulation_without_the_callback_warns():
    with pytest.warns(UserWarning, match=r"accumulate_grad_batches=2 .* StormPlusCallback"):
        trainer(accumulate_grad_batches=2).fit(Module(), loader())


# -- logs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_logs_and_metrics_count_each_sample_once(accumulate):
    class Keeps(Module):
        counted = ()

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            opt = self.optimizers(use_pl_optimizer=False)
            if not opt.started or opt.pending:  # the evaluation that counts
                self.counted = (*self.counted, loss.item())
            return loss

    module = Keeps()
    _, fit = run(module, loader(), accumulate_grad_batches=accumulate)
    assert len(module.counted) == BATCHES < len(module.losses)
    mean = sum(module.counted) / BATCHES
    assert float(fit.callback_metrics["loss_epoch"]) == pytest.approx(mean, rel=1e-6)
    assert float(fit.callback_metrics["mean"]) == pytest.approx(mean, rel=1e-6)


def test_means_of_an_epoch_weigh_each_batch_with_its_own_size():
    class Sizes(Module):
        def training_step(self, batch, batch_idx):
            self.log("size", float(len(batch[0])), on_epoch=True)
            return super().training_step(batch, batch_idx)

    sizes = [ROWS] * 3 + [ROWS // 2]
    rows = TensorDataset(*(part[: sum(sizes)] for part in data(4)))
    _, fit = run(Sizes(), DataLoader(rows, batch_size=ROWS), accumulate_grad_batches=2)
    expected = sum(size * size for size in sizes) / sum(sizes)
    assert float(fit.callback_metrics["size_epoch"]) == pytest.approx(expected, rel=1e-6)


def test_diagnostics_are_logged():
    class Kept(Logger):
        name, version = "kept", 0
        rows = ()

        def log_metrics(self, metrics, step=None):
            self.rows = (*self.rows, (step, metrics))

        def log_hyperparams(self, *_):
            pass

    kept = Kept()
    done, _ = run(Module(), loader(), logger=kept, log_every_n_steps=3)
    rows = [(step, row) for step, row in kept.rows if "stormplus/gain" in row]
    assert [step for step, _ in rows] == [2, 5]
    for name, value in done.opt.diagnostics().items():
        assert rows[-1][1][f"stormplus/{name}"] == pytest.approx(value, rel=1e-6)
    _, fit = run(Module(), loader(), callback=StormPlusCallback(log=False), log_every_n_steps=1)
    assert not any(name.startswith("stormplus/") for name in fit.callback_metrics)


# -- the user's own hooks ------------------------------------------------------------------------


class Drops(Module):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        optimizer.step()


def test_an_optimizer_step_of_the_users():
    done, _ = run(Drops(), loader())
    assert_same_runs(done, plain_run(epochs=1))

    class Never(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step()

    with pytest.raises(RuntimeError, match="no training step has been evaluated"):
        run(Never(), loader())


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_skipped_sample_changes_nothing():
    class Skips(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (0, 4) else loss

    module = Skips()
    done, _ = run(module, loader())
    assert done.opt.diagnostics()["step"] == BATCHES - 2
    assert int(module.net.body[1].num_batches_tracked) == BATCHES - 2
    assert_same_states(done.states[3:4], done.states[4:5])


def with_closure(self, opt, closure):
    opt.step(same_sample(opt.optimizer, self)(closure))


def without_closure(self, opt, closure):
    closure()
    opt.step()


def test_manual_optimization():
    done, fit = run(Manual(with_closure), loader())
    assert_same_runs(done, plain_run(epochs=1))
    assert fit.global_step == BATCHES


@pytest.mark.parametrize("module", [Drops, lambda: Manual(without_closure)], ids=["auto", "manual"])
def test_a_dropped_closure_is_refused_without_the_callback_too(module):
    made = module()
    with pytest.raises(RuntimeError, match="the closure has not computed a gradient"):
        trainer().fit(made, loader())
    assert made.net.evaluations == 2


# -- checkpoints ---------------------------------------------------------------------------------


class StatefulLoader:
    """What Lightning needs to resume in the middle of an epoch."""

    def __init__(self):
        self.x, self.y = data()
        self.next = 0

    def __len__(self):
        return BATCHES

    def __iter__(self):
        torch.rand(3)  # as torch's loader, which draws the seed of its workers
        for i in range(self.next, BATCHES):
            self.next = (i + 1) % BATCHES
            yield self.x[i * ROWS : (i + 1) * ROWS], self.y[i * ROWS : (i + 1) * ROWS]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


BY_EPOCH = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
BY_STEP = {"every_n_train_steps": 1}


def unseeded(folder, train_loader, every, step=None, accumulate=1, generators=()):
    """The random numbers of a batch depend on all that were drawn before."""
    path = None if step is None else folder / f"step={step}.ckpt"
    module = Module(seeded=False, lr=0.5, replay_rng=list(generators) or True)
    torch.manual_seed(7 if path is None else 12345)
    recorder = Recorder()
    saver = ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **every)
    fit = trainer(
        StormPlusCallback(), saver, recorder, epochs=3, enable_checkpointing=True,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    fit.fit(module, train_loader, ckpt_path=path, **SAFELY)
    return recorder.run


@pytest.mark.parametrize(
    ("step", "every", "accumulate"),
    [(BATCHES, BY_EPOCH, 1), (1, BY_STEP, 1), (12, BY_STEP, 1), (4, BY_STEP, 2)],
    ids=["epoch 1", "step 1", "end of epoch 2", "accumulated"],
)
def test_resume_without_seeds(tmp_path, step, every, accumulate):
    def rows():
        return loader(shuffle=True) if every is BY_EPOCH else StatefulLoader()

    whole = unseeded(tmp_path, rows(), every, accumulate=accumulate)
    rest = unseeded(tmp_path, rows(), every, step, accumulate)
    assert_same_states(rest.states, whole.states[step:])
    assert rest.opt.diagnostics() == whole.opt.diagnostics()


def test_a_checkpoint_of_other_devices_is_resumed_with_a_warning(tmp_path):
    """A generator takes part in the random state just as another device does."""
    unseeded(tmp_path, StatefulLoader(), BY_STEP, generators=[torch.Generator()])
    with pytest.warns(UserWarning, match="bytes of random state"):
        rest = unseeded(tmp_path, StatefulLoader(), BY_STEP, 8)
    assert rest.net.evaluations == 2 * (3 * BATCHES - 8)


def test_a_checkpoint_after_validation_has_no_random_state(tmp_path):
    fit = trainer(StormPlusCallback())
    fit.validate(Validated(), loader(), verbose=False)
    fit.save_checkpoint(tmp_path / "validated.ckpt")
    assert "stormplus" not in torch.load(tmp_path / "validated.ckpt", weights_only=True)


# -- refusals ------------------------------------------------------------------------------------


class Adam(Module):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class DrawsItsBatch(Module):
    def training_step(self, dataloader_iter):
        return loss_of(self.net, *next(dataloader_iter)[0])


class OwnStep(Precision):
    def optimizer_step(self, optimizer, model, closure, **kwargs):
        closure()
        return optimizer.step()


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Adam, {}, "got Adam"),
        (DrawsItsBatch, {}, "draws another batch each time it is called"),
        (lambda: Manual(with_closure), {"plugins": [half_plugin(1024.0)]}, "16-mixed"),
        (Module, {"plugins": [OwnStep()]}, "OwnStep does not pass the closure on"),
        (Module, {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging ends"),
    ],
    ids=["another optimizer", "dataloader_iter", "manual fp16", "precision plugin", "SWA"],
)
@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_what_would_be_wrong_is_refused(module, options, message):
    options = dict(options)
    with pytest.raises((TypeError, ValueError), match=message):
        run(module(), loader(), *options.pop("callbacks", ()), **options)


def test_the_trainer_of_the_other_package_is_refused_with_the_import_to_use():
    other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 1, dtype=torch.float64)

        def training_step(self, batch, batch_idx):
            return loss_of(self.net, *batch)

        def configure_optimizers(self):
            return StormPlus(self.parameters())

    run_by_other = other.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[StormPlusCallback()],
    )  # fmt: skip
    with pytest.raises(TypeError, match="import Trainer from lightning"):
        run_by_other.fit(Other(), loader())


# -- Untuned -------------------------------------------------------------------------------------


def test_an_interrupted_run_leaves_the_average():
    module = Module(kind=Untuned)
    module.net.fails_at = 6
    fit = trainer(UntunedCallback(recalibrate_batches=4))
    with pytest.raises(OSError, match="a broken disc"):
        fit.fit(module, loader())
    assert_at_average(snapshot(module.net), untuned_run(epochs=1), 5)
    assert "save_checkpoint" not in vars(fit)


def test_a_checkpoint_in_the_middle_of_a_step_does_not_change_the_run(tmp_path):
    class Saves(Module):
        def on_before_optimizer_step(self, optimizer):
            self.trainer.save_checkpoint(tmp_path / "now.ckpt")

    recorder, plain = Recorder(), untuned_run(epochs=1)
    trainer(UntunedCallback(), recorder).fit(Saves(kind=Untuned), loader())
    assert_same_runs(recorder.run, plain)
    assert_at_average(weights_of(tmp_path / "now.ckpt"), plain, BATCHES - 1)


def test_what_the_callback_of_untuned_refuses():
    swa = StochasticWeightAveraging(1e-2)
    with pytest.raises(ValueError, match="Untuned averages by itself"):
        trainer(UntunedCallback(), swa).fit(Module(kind=Untuned), loader())
    with pytest.raises(ValueError, match="at least 0, got -1"):
        UntunedCallback(recalibrate_batches=-1)
    by_hand = Manual(without_closure, kind=Untuned)
    with pytest.raises(ValueError, match="steps with manual optimization"):
        trainer(UntunedCallback(recalibrate_batches=2)).fit(by_hand, loader())
    trainer(UntunedCallback()).fit(by_hand, loader())
    assert by_hand.net.evaluations == BATCHES


@pytest.mark.parametrize("callbacks", [[UntunedCallback()], []], ids=["with callback", "without"])
def test_the_learning_rate_finder_is_refused(callbacks, tmp_path):
    module = Module(kind=Untuned)
    module.lr = 0.1
    fit = trainer(*callbacks, default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match="no learning rate to find"):
        Tuner(fit).lr_find(module, loader(), num_training=5)


def test_a_backbone_that_is_unfrozen_at_a_fraction_of_the_lr():
    """Lightning adds its group with the lr of the first times a factor."""

    class Finetuned(Module):
        def __init__(self):
            super().__init__(kind=Untuned)
            self.backbone = self.net.body[0]

        def configure_optimizers(self):
            return Untuned(p for p in self.parameters() if p.requires_grad)

    module = Finetuned()
    start = snapshot(module.net)["body.0.weight"]
    unfreezes = BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_ratio_lr=0.1)
    fit = trainer(UntunedCallback(), unfreezes, epochs=2)
    with pytest.warns(UserWarning, match=r"added with lr=0.1"):
        fit.fit(module, loader())
    assert [group["lr"] for group in fit.optimizers[0].param_groups] == [1.0, 0.1]
    assert not torch.equal(snapshot(module.net)["body.0.weight"], start)
