"""What the callback refuses, and what happens without it."""

import re

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning_cases import Manual, Module, loader, run, trainer
from trainer_cases import assert_same_states, loss_of, plain_run

from stormplus import StormPlus, same_sample
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

    with pytest.raises(TypeError, match=r"OwnStep steps in its own way.*use precision="):
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


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_a_training_step_that_draws_its_batch_is_refused():
    class Draws(Module):
        def training_step(self, dataloader_iter):
            return loss_of(self.net, *next(dataloader_iter)[0])

    with pytest.raises(TypeError, match="draws another batch each time it is called"):
        run(Draws(), loader(BATCHES))

    class DrawsOnce(Manual):
        def training_step(self, dataloader_iter):
            super().training_step(next(dataloader_iter)[0], 0)

    def step(self, opt, closure):
        opt.step(same_sample(opt.optimizer, self)(closure))

    module = DrawsOnce(step, seeded=False, dropout=0.0)
    states, _ = run(module, loader(BATCHES))
    assert module.evaluations == TWICE_BUT_ONCE
    assert len(states) == BATCHES


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
        run_by_other.fit(Other(), loader(BATCHES))


# -- without the callback ------------------------------------------------------------------------


def test_a_dropped_closure_is_refused_without_the_callback_too():
    """By the optimizer itself: Lightning puts an empty closure where there is none."""
    unwritten = re.escape("the closure has not computed a gradient")

    class Drops(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()
            optimizer.step()

    module = Drops()
    with pytest.raises(RuntimeError, match=unwritten):
        trainer().fit(module, loader(BATCHES))
    assert module.evaluations == 2

    def step(self, opt, closure):
        closure()
        opt.step()

    module = Manual(step)
    with pytest.raises(RuntimeError, match=unwritten):
        trainer().fit(module, loader(BATCHES))
    assert module.evaluations == 2
