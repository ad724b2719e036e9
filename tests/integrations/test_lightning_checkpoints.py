"""A Lightning run that is resumed ends where the whole run ends, bit by bit."""

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_cases import Module, Recorder, loader, trainer
from trainer_cases import ROWS, assert_same_states, data

from stormplus.integrations.lightning import StormPlusCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
]

BATCHES, EPOCHS = 6, 3
long = pytest.mark.long


class StatefulLoader:
    """What Lightning asks for to resume in the middle of an epoch."""

    def __init__(self):
        self.x, self.y = data(BATCHES)
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


def fit(folder, make_loader, every, ckpt_path=None, accumulate=1, generators=(), **options):
    """Unseeded: the random numbers of a batch depend on all that were drawn before."""
    torch.manual_seed(7 if ckpt_path is None else 12345)
    module = Module(seeded=False, lr=0.5, replay_rng=list(generators) or True)
    torch.manual_seed(7 if ckpt_path is None else 12345)
    recorder = Recorder()
    saver = ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **every)
    run = trainer(
        StormPlusCallback(), saver, recorder, epochs=EPOCHS, enable_checkpointing=True,
        accumulate_grad_batches=accumulate, **options,
    )  # fmt: skip
    recorder.states = [] if ckpt_path is None else [None] * first_step(ckpt_path)
    run.fit(module, make_loader(), ckpt_path=ckpt_path, weights_only=True)
    return module, run, recorder.states


def first_step(path):
    return int(path.stem.split("=")[1])


@pytest.mark.parametrize("step", [BATCHES, 2 * BATCHES])
def test_resume_at_the_end_of_an_epoch(tmp_path, step):
    def shuffled():
        return loader(BATCHES, shuffle=True)

    every = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    whole, run, states = fit(tmp_path / "a", shuffled, every)
    path = tmp_path / "a" / f"step={step}.ckpt"
    resumed, again, rest = fit(tmp_path / "a", shuffled, every, path)
    assert_same_states(rest[step:], states[step:])
    assert again.global_step == run.global_step == len(states) == EPOCHS * BATCHES
    assert again.optimizers[0].diagnostics() == run.optimizers[0].diagnostics()
    assert resumed.evaluations == 2 * (EPOCHS * BATCHES - step)
    assert whole.evaluations == 2 * EPOCHS * BATCHES - 1


@pytest.mark.parametrize(
    "step",
    [1, 8, pytest.param(12, marks=pytest.mark.long), pytest.param(15, marks=pytest.mark.long)],
)
def test_resume_in_the_middle_of_an_epoch(tmp_path, step):
    every = {"every_n_train_steps": 1}
    _, run, states = fit(tmp_path / "a", StatefulLoader, every)
    path = tmp_path / "a" / f"step={step}.ckpt"
    resumed, again, rest = fit(tmp_path / "a", StatefulLoader, every, path)
    assert_same_states(rest[step:], states[step:])
    assert again.optimizers[0].diagnostics() == run.optimizers[0].diagnostics()
    assert resumed.evaluations == 2 * (EPOCHS * BATCHES - step)


@long
def test_resume_with_accumulation(tmp_path):
    every = {"every_n_train_steps": 1}
    _, _, states = fit(tmp_path / "a", StatefulLoader, every, accumulate=2)
    path = tmp_path / "a" / "step=4.ckpt"
    _, _, rest = fit(tmp_path / "a", StatefulLoader, every, path, accumulate=2)
    assert_same_states(rest[4:], states[4:])
    assert len(states) == EPOCHS * BATCHES // 2


def test_the_best_point_by_a_metric_and_by_a_diagnostic(tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="stormplus/estimator_norm", filename="{step}")
    run = trainer(
        StormPlusCallback(), best, epochs=2, enable_checkpointing=True, log_every_n_steps=1
    )
    run.fit(Module(), loader(BATCHES))
    assert best.best_model_path
    saved = torch.load(best.best_model_path, weights_only=True)
    copy = Module.load_from_checkpoint(best.best_model_path)
    assert torch.equal(copy.net[0].weight, saved["state_dict"]["net.0.weight"])


def test_without_the_random_state_the_masks_would_differ(tmp_path):
    every = {"every_n_train_steps": 1}
    _, _, states = fit(tmp_path / "a", StatefulLoader, every)
    path = tmp_path / "a" / "step=8.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["stormplus"]
    torch.save(checkpoint, path)
    _, _, rest = fit(tmp_path / "a", StatefulLoader, every, path)
    assert not torch.equal(rest[-1]["0.weight"], states[-1]["0.weight"])


def test_a_checkpoint_of_other_devices_is_resumed_with_a_warning(tmp_path):
    """A generator of one's own takes part in the random state just as another device does."""
    every = {"every_n_train_steps": 1}
    fit(tmp_path / "a", StatefulLoader, every, generators=[torch.Generator()])
    path = tmp_path / "a" / "step=8.ckpt"
    with pytest.warns(UserWarning, match=r"bytes of random state.*other devices") as told:
        resumed, run, _ = fit(tmp_path / "a", StatefulLoader, every, path)
    assert len([w for w in told if "random state" in str(w.message)]) == 1
    assert run.global_step == EPOCHS * BATCHES
    assert resumed.evaluations == 2 * (EPOCHS * BATCHES - 8)


def test_a_checkpoint_after_validation_has_no_random_state(tmp_path):
    class Validated(Module):
        def validation_step(self, batch, batch_idx):
            self.evaluations += 1

    module, run = Validated(), trainer(StormPlusCallback())
    run.validate(module, loader(BATCHES), verbose=False)
    assert module.evaluations == BATCHES
    run.save_checkpoint(tmp_path / "validated.ckpt")
    saved = torch.load(tmp_path / "validated.ckpt", weights_only=True)
    assert "stormplus" not in saved
    assert torch.equal(saved["state_dict"]["net.0.weight"], module.net[0].weight)
