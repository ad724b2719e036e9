"""What the callback leaves alone, and what it tells."""

import importlib
import sys

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.loggers.logger import Logger
from lightning_cases import Module, loader, run, trainer
from pages import run_example, run_page
from torch.utils.data import DataLoader, TensorDataset
from trainer_cases import ROWS, assert_same_states, data, network, plain_run

from stormplus.integrations.lightning import StormPlusCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]

BATCHES = 10
TWICE_BUT_ONCE = 2 * BATCHES - 1


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


def test_what_the_training_step_keeps_it_keeps_of_both_evaluations():
    class Keeps(Module):
        def __init__(self):
            super().__init__()
            self.both, self.counted = [], []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            opt = self.optimizers(use_pl_optimizer=False)
            self.both.append(loss.item())
            if not opt.started or opt.pending:
                self.counted.append(loss.item())
            return loss

    for accumulate in (1, 2):
        module = Keeps()
        _, fit = run(module, loader(4), accumulate_grad_batches=accumulate)
        assert len(module.both) == 8 - accumulate
        assert len(module.counted) == 4
        mean = sum(module.counted) / 4
        assert float(fit.callback_metrics["loss_epoch"]) == pytest.approx(mean, rel=1e-6)


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


# -- the page, the example, the extra --------------------------------------------------------------


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
