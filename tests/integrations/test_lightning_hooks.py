"""What the callback leaves alone, what it tells and what it refuses."""

import importlib
import sys

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning_cases import Manual, Module, loader, run, trainer
from pages import run_example, run_page
from trainer_cases import assert_same_states, network, plain_run

from stormplus import same_sample
from stormplus.integrations.lightning import StormPlusCallback
from stormplus.integrations.lightning_refusals import check

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]

BATCHES = 10
TWICE_BUT_ONCE = 2 * BATCHES - 1


def half(scale):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


# -- logs ----------------------------------------------------------------------------------------


class Memory(Logger):
    name, version = "memory", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, *_):
        pass


@pytest.mark.parametrize("accumulate", [1, 5])
def test_logs_and_metrics_count_each_sample_once(accumulate):
    module = Module()
    _, fit = run(module, loader(BATCHES), accumulate_grad_batches=accumulate)
    # The first window is evaluated once, each later one twice; the last evaluation counts.
    kept = module.losses[:accumulate]
    for start in range(accumulate, len(module.losses), 2 * accumulate):
        kept += module.losses[start + accumulate : start + 2 * accumulate]
    assert len(kept) == BATCHES
    mean = sum(kept) / BATCHES
    assert float(fit.callback_metrics["loss_epoch"]) == pytest.approx(mean, rel=1e-6)
    assert float(fit.callback_metrics["mean"]) == pytest.approx(mean, rel=1e-6)


def test_diagnostics_are_logged():
    memory = Memory()
    _, fit = run(Module(), loader(BATCHES), logger=memory, log_every_n_steps=5)
    rows = [(step, row) for step, row in memory.rows if "stormplus/gain" in row]
    assert [step for step, _ in rows] == [4, 9]
    for name, value in fit.optimizers[0].diagnostics().items():
        assert rows[-1][1][f"stormplus/{name}"] == pytest.approx(value, rel=1e-6)
    _, fit = run(
        Module(), loader(BATCHES), callback=StormPlusCallback(log=False), log_every_n_steps=1
    )
    assert not any(name.startswith("stormplus/") for name in fit.callback_metrics)


# -- the user's own hooks ------------------------------------------------------------------------


def test_an_optimizer_step_of_the_users_own():
    class Own(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()  # harmless with most optimizers, and drops the closure
            optimizer.step()

    module = Own()
    states, _ = run(module, loader(BATCHES))
    assert_same_states(states, plain_run(BATCHES)[0])
    assert module.evaluations == TWICE_BUT_ONCE

    class Never(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step()

    with pytest.raises(RuntimeError, match="no training step has been evaluated"):
        run(Never(), loader(BATCHES))


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_skipped_sample_leaves_no_trace():
    class Skips(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (0, 6) else loss

    module = Skips()
    states, fit = run(module, loader(BATCHES))
    assert fit.optimizers[0].diagnostics()["step"] == BATCHES - 2
    assert module.evaluations == 2 + 2 * (BATCHES - 2) - 1
    assert int(module.net[1].num_batches_tracked) == BATCHES - 2
    for name, value in states[5].items():
        assert torch.equal(states[6][name], value)


def test_a_failed_evaluation_leaves_the_module_as_it_was():
    class Fails(Module):
        def training_step(self, batch, batch_idx):
            if self.evaluations == 6:
                raise OSError("a broken disc")
            return super().training_step(batch, batch_idx)

    module = Fails()
    fit = trainer(StormPlusCallback())
    with pytest.raises(OSError, match="a broken disc"):
        fit.fit(module, loader(BATCHES))
    opt = fit.optimizers[0]
    assert opt.pending
    assert not opt._samples
    assert not opt._optimizer_step_pre_hooks
    assert not {"training_step", "optimizer_step", "log"} & set(vars(module))
    # evaluations 1, 2-3, 4-5, 6-(7): three samples are complete
    assert int(module.net[1].num_batches_tracked) == 3


# -- manual optimization -------------------------------------------------------------------------


def test_manual_optimization():
    module = Manual(lambda self, opt, closure: opt.step(same_sample(opt.optimizer, self)(closure)))
    states, fit = run(module, loader(BATCHES))
    assert_same_states(states, plain_run(BATCHES)[0])
    assert (module.evaluations, fit.global_step) == (TWICE_BUT_ONCE, BATCHES)
    assert "stormplus/gain" not in fit.callback_metrics  # log_every_n_steps is 50


def test_manual_optimization_without_a_closure_is_refused():
    def step(self, opt, closure):
        closure()
        opt.step()

    with pytest.raises(TypeError, match="without a closure"):
        run(Manual(step), loader(BATCHES))
    with pytest.raises(ValueError, match="16-mixed"):
        run(Manual(step), loader(BATCHES), plugins=[half(1024.0)])


# -- refusals ------------------------------------------------------------------------------------


def test_what_is_not_verified_is_refused():
    class Adam(Module):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    with pytest.raises(TypeError, match="got Adam"):
        run(Adam(), loader(BATCHES))

    class OwnStep(Precision):
        def optimizer_step(self, optimizer, model, closure, **kwargs):
            closure()
            return optimizer.step()

    with pytest.raises(TypeError, match="OwnStep steps in its own way"):
        run(Module(), loader(BATCHES), plugins=[OwnStep()])
    with pytest.raises(ValueError, match="StochasticWeightAveraging"):
        run(Module(), loader(BATCHES), StochasticWeightAveraging(swa_lrs=0.1), epochs=3)


def test_an_unverified_strategy_is_refused():
    class Strange:
        pass

    class Fake:  # the real ones need other hardware
        precision_plugin = Precision()
        strategy = Strange()

    with pytest.raises(TypeError, match="Strange has not been verified"):
        check(Fake(), None)


def test_the_network_is_not_linear():
    model, x = network().eval(), torch.ones(1, 6, dtype=torch.float64)
    assert not torch.allclose(model(2 * x) + model(0 * x), 2 * model(x))


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_page("integrations/lightning.md")["trainer"].global_step == 4


@pytest.mark.long
def test_the_example_counts_each_micro_batch_once():
    out = run_example("lightning_classifier.py", "--epochs", 2, "--accumulate", 2)
    # 44 batches of 32 rows: 88 micro-batches, the first two of them evaluated once
    assert "88 micro-batches in 44 steps, 174 evaluations" in out
    assert "running statistics moved 88 times" in out


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "stormplus.integrations.lightning")
    with pytest.raises(ModuleNotFoundError, match=r"stormplus\[lightning\]"):
        importlib.import_module("stormplus.integrations.lightning")
