"""Lightning: what only its callback does. What trainers share is in `test_trainers.py`."""

import re
import sys
from importlib.metadata import EntryPoint

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
from lightning_cases import (
    SAFELY,
    Manual,
    Module,
    Recorder,
    half_plugin,
    loader,
    run,
    trainer,
    untuned,
    weights_of,
)
from pages import ROOT
from torch.utils.data import DataLoader, TensorDataset
from trainer_cases import (
    BATCHES,
    ROWS,
    SAMPLES,
    assert_at_average,
    assert_same_runs,
    assert_same_states,
    data,
    loss_of,
    network,
    plain_run,
    snapshot,
    untuned_run,
)

from stormplus import StormPlus, Untuned, recalibrate, same_sample
from stormplus.integrations import lightning_callbacks
from stormplus.integrations.lightning import (
    StormPlusCallback,
    UntunedCallback,
    UntunedWatch,
    check,
)

TWICE_BUT_ONCE = 2 * BATCHES - 1


def test_double_precision():
    done, fit = run(Module(), loader(), precision="64-true")
    assert_same_runs(done, plain_run(epochs=1))
    assert fit.global_step == BATCHES


# -- fp16 and accumulation -----------------------------------------------------------------------


class Spoiled(Module):
    spoiled = ()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.net.evaluations in self.spoiled else loss


def test_fp16_overflow_in_the_second_evaluation():
    module = Spoiled(torch.float32)
    module.spoiled = {5}  # evaluations 1, 2-3, 4-5: the second one of the third sample
    done, _ = run(module, loader(dtype=torch.float32), plugins=[half_plugin(1024.0)])
    assert module.net.evaluations == TWICE_BUT_ONCE + 1  # repeated once, at half the scale
    assert done.opt.diagnostics()["step"] == BATCHES
    assert int(module.net.body[1].num_batches_tracked) == BATCHES
    # a power of two only shifts exponents
    expected = plain_run(epochs=1, scale=512.0, half=torch.float16, dtype=torch.float32).states
    for ours, theirs in zip(done.states, expected, strict=True):
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)

    module = Spoiled(torch.float32)
    module.spoiled = range(5, 100)
    with pytest.raises(FloatingPointError, match="overflowed 20 times"):
        run(module, loader(dtype=torch.float32), plugins=[half_plugin(1024.0)])
    assert "training_step" not in vars(module)


def test_fp16_without_the_callback_is_refused():
    with pytest.raises(TypeError, match="needs a closure"):
        trainer(plugins=[half_plugin(1024.0)]).fit(
            Module(torch.float32), loader(dtype=torch.float32)
        )


def test_accumulation_without_the_callback_is_another_run():
    module = Module()
    with pytest.warns(RuntimeWarning, match="does not zero the gradients"):
        trainer(accumulate_grad_batches=2).fit(module, loader())
    assert module.net.evaluations == BATCHES + 2  # only the last micro-batch is seen twice
    expected = plain_run(epochs=1, accumulate=2).states[-1]
    assert not torch.allclose(module.net.body[0].weight, expected["body.0.weight"], rtol=1e-3)


def test_accumulation_in_fp16_and_by_a_scheduler():
    module = Module(torch.float32)
    done, _ = run(
        module, loader(dtype=torch.float32), plugins=[half_plugin(1024.0)],
        accumulate_grad_batches=3,
    )  # fmt: skip
    plain = plain_run(epochs=1, accumulate=3, half=torch.float16, dtype=torch.float32)
    assert module.net.evaluations == plain.net.evaluations == 9
    for name, value in plain.states[-1].items():  # without a scale small gradients are lost
        torch.testing.assert_close(done.states[-1][name], value, rtol=1e-2, atol=1e-3)

    module = Module()
    done, _ = run(module, loader(), GradientAccumulationScheduler({0: 1, 1: 3}), epochs=2)
    assert_same_states(done.states[:BATCHES], plain_run(epochs=1).states)
    assert module.net.evaluations == TWICE_BUT_ONCE + 2 * BATCHES


# -- logs ----------------------------------------------------------------------------------------


class Kept(Logger):
    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, *_):
        pass


@pytest.mark.parametrize("accumulate", [1, 3])
def test_logs_and_metrics_count_each_sample_once(accumulate):
    module = Module()
    _, fit = run(module, loader(), accumulate_grad_batches=accumulate)
    # The first window is evaluated once, each later one twice; the last evaluation counts.
    kept = module.losses[:accumulate]
    for start in range(accumulate, len(module.losses), 2 * accumulate):
        kept += module.losses[start + accumulate : start + 2 * accumulate]
    assert len(kept) == BATCHES
    mean = sum(kept) / BATCHES
    assert float(fit.callback_metrics["loss_epoch"]) == pytest.approx(mean, rel=1e-6)
    assert float(fit.callback_metrics["mean"]) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_means_of_an_epoch_weigh_each_batch_with_its_own_size(accumulate):
    class Sizes(Module):
        def training_step(self, batch, batch_idx):
            self.log("size", float(len(batch[0])), on_epoch=True)
            return super().training_step(batch, batch_idx)

    sizes = [ROWS] * 3 + [ROWS // 2]
    rows = TensorDataset(*(part[: sum(sizes)] for part in data(4)))
    _, fit = run(Sizes(), DataLoader(rows, batch_size=ROWS), accumulate_grad_batches=accumulate)
    expected = sum(size * size for size in sizes) / sum(sizes)
    assert float(fit.callback_metrics["size_epoch"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_the_training_step_keeps_it_keeps_of_both_evaluations(accumulate):
    class Keeps(Module):
        def __init__(self):
            super().__init__()
            self.counted = []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            opt = self.optimizers(use_pl_optimizer=False)
            if not opt.started or opt.pending:
                self.counted.append(loss.item())
            return loss

    module = Keeps()
    _, fit = run(module, loader(4), accumulate_grad_batches=accumulate)
    assert (len(module.losses), len(module.counted)) == (8 - accumulate, 4)
    mean = sum(module.counted) / 4
    assert float(fit.callback_metrics["loss_epoch"]) == pytest.approx(mean, rel=1e-6)


def test_diagnostics_are_logged():
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
        optimizer_closure()  # harmless with most optimizers, and drops the closure
        optimizer.step()


def test_an_optimizer_step_of_the_users_own():
    done, _ = run(Drops(), loader())
    assert_same_runs(done, plain_run(epochs=1))

    class Never(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step()

    with pytest.raises(RuntimeError, match="no training step has been evaluated"):
        run(Never(), loader())


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_skipped_sample_leaves_no_trace():
    class Skips(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (0, 4) else loss

    module = Skips()
    done, _ = run(module, loader())
    assert done.opt.diagnostics()["step"] == BATCHES - 2
    assert module.net.evaluations == 2 + 2 * (BATCHES - 2) - 1
    assert int(module.net.body[1].num_batches_tracked) == BATCHES - 2
    for name, value in done.states[3].items():
        assert torch.equal(done.states[4][name], value)


def test_a_failed_evaluation_leaves_the_module_as_it_was():
    module = Module()
    module.net.fails_at = 7
    with pytest.raises(OSError, match="a broken disc"):
        run(module, loader())
    assert not {"training_step", "optimizer_step", "log"} & set(vars(module))


# -- checkpoints ---------------------------------------------------------------------------------

EPOCHS = 3


class StatefulLoader:
    """What Lightning asks for to resume in the middle of an epoch."""

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


def shuffled():
    return loader(shuffle=True)


BY_EPOCH = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
BY_STEP = {"every_n_train_steps": 1}


def unseeded(folder, make_loader, every, step=None, accumulate=1, generators=()):
    """The random numbers of a batch depend on all that were drawn before."""
    path = None if step is None else folder / f"step={step}.ckpt"
    seed = 7 if path is None else 12345
    module = Module(seeded=False, lr=0.5, replay_rng=list(generators) or True)
    torch.manual_seed(seed)
    recorder = Recorder()
    saver = ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **every)
    fit = trainer(
        StormPlusCallback(), saver, recorder, epochs=EPOCHS, enable_checkpointing=True,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    fit.fit(module, make_loader(), ckpt_path=path, **SAFELY)
    assert fit.global_step == EPOCHS * BATCHES // accumulate
    return recorder.run


@pytest.mark.parametrize(
    ("step", "make_loader", "every", "accumulate"),
    [
        (BATCHES, shuffled, BY_EPOCH, 1),
        (2 * BATCHES, shuffled, BY_EPOCH, 1),
        (1, StatefulLoader, BY_STEP, 1),
        (8, StatefulLoader, BY_STEP, 1),
        (12, StatefulLoader, BY_STEP, 1),
        (15, StatefulLoader, BY_STEP, 1),
        (4, StatefulLoader, BY_STEP, 2),
    ],
    ids=["epoch 1", "epoch 2", "step 1", "step 8", "step 12", "step 15", "accumulated"],
)
def test_resume_without_seeds(tmp_path, step, make_loader, every, accumulate):
    whole = unseeded(tmp_path, make_loader, every, accumulate=accumulate)
    rest = unseeded(tmp_path, make_loader, every, step, accumulate)
    assert_same_states(rest.states, whole.states[step:])
    assert rest.opt.diagnostics() == whole.opt.diagnostics()
    assert rest.net.evaluations == 2 * accumulate * (len(whole.states) - step)


def test_without_the_random_state_the_masks_would_differ(tmp_path):
    whole = unseeded(tmp_path, StatefulLoader, BY_STEP)
    checkpoint = torch.load(tmp_path / "step=8.ckpt", weights_only=True)
    del checkpoint["stormplus"]
    torch.save(checkpoint, tmp_path / "step=8.ckpt")
    rest = unseeded(tmp_path, StatefulLoader, BY_STEP, 8)
    assert not torch.equal(rest.states[-1]["body.0.weight"], whole.states[-1]["body.0.weight"])


def test_a_checkpoint_of_other_devices_is_resumed_with_a_warning(tmp_path):
    """A generator of one's own takes part in the random state just as another device does."""
    unseeded(tmp_path, StatefulLoader, BY_STEP, generators=[torch.Generator()])
    with pytest.warns(UserWarning, match=r"bytes of random state.*other devices") as told:
        rest = unseeded(tmp_path, StatefulLoader, BY_STEP, 8)
    assert len([w for w in told if "random state" in str(w.message)]) == 1
    assert rest.net.evaluations == 2 * (EPOCHS * BATCHES - 8)


def test_the_best_point_by_a_diagnostic(tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="stormplus/estimator_norm", filename="{step}")
    fit = trainer(
        StormPlusCallback(), best, epochs=2, enable_checkpointing=True, log_every_n_steps=1
    )
    fit.fit(Module(), loader())
    assert best.best_model_path
    saved = torch.load(best.best_model_path, weights_only=True)
    copy = Module.load_from_checkpoint(best.best_model_path)
    assert torch.equal(copy.net.body[0].weight, saved["state_dict"]["net.body.0.weight"])


def test_a_checkpoint_after_validation_has_no_random_state(tmp_path):
    class Validated(Module):
        def validation_step(self, batch, batch_idx):
            self.losses.append(0.0)

    module, fit = Validated(), trainer(StormPlusCallback())
    fit.validate(module, loader(), verbose=False)
    assert len(module.losses) == BATCHES
    fit.save_checkpoint(tmp_path / "validated.ckpt")
    saved = torch.load(tmp_path / "validated.ckpt", weights_only=True)
    assert "stormplus" not in saved
    assert torch.equal(saved["state_dict"]["net.body.0.weight"], module.net.body[0].weight)


# -- manual optimization -------------------------------------------------------------------------


def with_closure(self, opt, closure):
    opt.step(same_sample(opt.optimizer, self)(closure))


def without_closure(self, opt, closure):
    closure()
    opt.step()


def test_manual_optimization():
    done, fit = run(Manual(with_closure), loader())
    assert_same_runs(done, plain_run(epochs=1))
    assert fit.global_step == BATCHES
    assert "stormplus/gain" not in fit.callback_metrics  # log_every_n_steps is 50


def test_manual_optimization_without_a_closure_is_refused():
    with pytest.raises(TypeError, match="without a closure"):
        run(Manual(without_closure), loader())
    with pytest.raises(ValueError, match="16-mixed"):
        run(Manual(without_closure), loader(), plugins=[half_plugin(1024.0)])


@pytest.mark.parametrize("module", [Drops, lambda: Manual(without_closure)], ids=["auto", "manual"])
def test_a_dropped_closure_is_refused_without_the_callback_too(module):
    """By the optimizer itself: Lightning puts an empty closure where there is none."""
    made = module()
    with pytest.raises(RuntimeError, match=re.escape("the closure has not computed a gradient")):
        trainer().fit(made, loader())
    assert made.net.evaluations == 2


# -- refusals ------------------------------------------------------------------------------------


def test_what_is_not_verified_is_refused():
    class Adam(Module):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    with pytest.raises(TypeError, match="got Adam"):
        run(Adam(), loader())

    class OwnStep(Precision):
        def optimizer_step(self, optimizer, model, closure, **kwargs):
            closure()
            return optimizer.step()

    with pytest.raises(TypeError, match=r"OwnStep steps in its own way.*use precision="):
        run(Module(), loader(), plugins=[OwnStep()])
    with pytest.raises(ValueError, match="StochasticWeightAveraging"):
        run(Module(), loader(), StochasticWeightAveraging(swa_lrs=0.1), epochs=3)

    class Strange:
        pass

    class Fake:  # the real ones need other hardware
        precision_plugin = Precision()
        strategy = Strange()

    with pytest.raises(TypeError, match="Strange has not been verified"):
        check(Fake(), None)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_a_training_step_that_draws_its_batch_is_refused():
    class Draws(Module):
        def training_step(self, dataloader_iter):
            return loss_of(self.net, *next(dataloader_iter)[0])

    with pytest.raises(TypeError, match="draws another batch each time it is called"):
        run(Draws(), loader())

    class DrawsOnce(Manual):
        def training_step(self, dataloader_iter):
            super().training_step(next(dataloader_iter)[0], 0)

    module = DrawsOnce(with_closure, seeded=False, dropout=0.0)
    done, _ = run(module, loader())
    assert (module.net.evaluations, len(done.states)) == (TWICE_BUT_ONCE, BATCHES)


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
    with pytest.raises(TypeError, match=r"pytorch_lightning\.Trainer.*from lightning\.pytorch,"):
        run_by_other.fit(Other(), loader())


# -- Untuned: the average ------------------------------------------------------------------------


@pytest.mark.parametrize("watched", [False, True], ids=["bare", "watched"])
def test_without_its_callback_the_iterate_is_saved_and_one_warning_says_so(
    tmp_path, watched, recwarn
):
    """What the callback is for. The package's entry point brings a watch to every trainer."""
    done = untuned(tmp_path, *[UntunedWatch()] * watched, callback=[])
    told = [str(w.message) for w in recwarn if "holds the iterate of Untuned" in str(w.message)]
    assert len(told) == 1
    assert all("callbacks=[UntunedCallback()]" in text for text in told)
    for step, state in (*done.saved.items(), *done.validated.items()):
        assert torch.equal(state["body.0.weight"], done.states[step - 1]["body.0.weight"])


def test_lightning_adds_the_watch_by_itself(monkeypatch, tmp_path, recwarn):
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def entry_points(group):  # as they are once the package is installed
        found = project["entry-points"].get(group, {})
        return [EntryPoint(name, value, group) for name, value in found.items()]

    monkeypatch.setattr("lightning.fabric.utilities.registry.entry_points", entry_points)
    untuned(tmp_path / "with")
    assert not [w for w in recwarn if "holds the iterate" in str(w.message)]
    with pytest.warns(UserWarning, match="holds the iterate of Untuned"):
        untuned(tmp_path / "without", callback=[])
    monkeypatch.delitem(sys.modules, "stormplus.torch")
    assert lightning_callbacks() == []


def test_running_statistics_are_taken_anew_over_the_last_batches(tmp_path):
    done = untuned(tmp_path, callback=[UntunedCallback(recalibrate_batches=4)])
    plain, (x, _) = untuned_run(), data()
    names = set(plain.averages[0])
    ours = [{k: v for k, v in state.items() if k in names} for state in done.states]
    theirs = [{k: v for k, v in state.items() if k in names} for state in plain.states]
    assert_same_states(ours, theirs)  # no random number was drawn, no weight moved
    for step, states in ((SAMPLES, [snapshot(done.net), done.validated[SAMPLES]]), (4, [])):
        net = network()
        net.load_state_dict(plain.states[step - 1])
        net.load_state_dict(done.saved[step], strict=False)
        recalibrate(net, x.split(ROWS)[2:] if step == SAMPLES else x.split(ROWS)[:4])
        for state in (*states, done.saved[step]):
            for name in ("body.1.running_mean", "body.1.running_var"):
                torch.testing.assert_close(state[name], net.state_dict()[name], rtol=1e-9, atol=0)
    came_in = {4, 8, SAMPLES} | {BATCHES}  # saved, and validated
    assert len(done.module.losses) == SAMPLES + 4 * len(came_in)


def test_an_interrupted_run_leaves_the_average():
    module = Module(kind=Untuned)
    module.net.fails_at = 6
    fit = trainer(UntunedCallback(recalibrate_batches=4))  # not on one process, after a failure
    with pytest.raises(OSError, match="a broken disc"):
        fit.fit(module, loader())
    plain = untuned_run(epochs=1)
    assert_at_average(snapshot(module.net), plain.averages[4], plain.states[4])
    assert "save_checkpoint" not in vars(fit)


def test_a_checkpoint_in_the_middle_of_a_step_disturbs_nothing(tmp_path):
    class Saves(Module):
        def on_before_optimizer_step(self, optimizer):
            self.trainer.save_checkpoint(tmp_path / "now.ckpt")

    recorder, plain = Recorder(), untuned_run(epochs=1)
    trainer(UntunedCallback(), recorder).fit(Saves(kind=Untuned), loader())
    assert_same_runs(recorder.run, plain)
    assert_at_average(weights_of(tmp_path / "now.ckpt"), plain.averages[-2], plain.states[-2])


def test_what_the_callback_of_untuned_refuses():
    with pytest.raises(TypeError, match=r"is for Untuned, got StormPlus: return Untuned"):
        trainer(UntunedCallback()).fit(Module(), loader())
    with pytest.raises(ValueError, match="Untuned averages by itself: leave it out"):
        trainer(UntunedCallback(), StochasticWeightAveraging(1e-2)).fit(
            Module(kind=Untuned), loader()
        )
    with pytest.raises(ValueError, match=r"at least 0, got -1: 20 is"):
        UntunedCallback(recalibrate_batches=-1)
    by_hand = Manual(without_closure, kind=Untuned)
    with pytest.raises(ValueError, match=r"manual optimization: leave it out, and call stormplus"):
        trainer(UntunedCallback(recalibrate_batches=2)).fit(by_hand, loader())
    trainer(UntunedCallback()).fit(by_hand, loader())
    assert by_hand.net.evaluations == BATCHES


def test_a_backbone_that_is_unfrozen_at_a_part_of_the_lr():
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
    with pytest.warns(UserWarning, match=r"added with lr=0.1, which is no rate there"):
        fit.fit(module, loader())
    assert [group["lr"] for group in fit.optimizers[0].param_groups] == [1.0, 0.1]
    assert not torch.equal(snapshot(module.net)["body.0.weight"], start)
