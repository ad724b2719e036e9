"""What the trainer tells, what it refuses, and what a failure leaves behind."""

import importlib
import sys

import pytest

pytest.importorskip("transformers")

from huggingface_cases import InOrder, Model, Rows, arguments, run
from pages import run_example, run_page
from torch.nn.utils import clip_grad_norm_
from trainer_cases import assert_same_states, plain_run
from transformers import Trainer

from stormplus import StormPlus
from stormplus.integrations.huggingface import StormPlusTrainer, unwrapped

BATCHES = 10


# -- what is said and what is refused ------------------------------------------------------------


def test_clipping_is_told_once_and_applies_to_both_gradients(tmp_path):
    with pytest.warns(UserWarning, match="max_grad_norm=0.05 clips the two gradients") as told:
        states, _, _ = run(tmp_path, BATCHES, max_grad_norm=0.05)
    assert len(told) == 1
    expected, opt, _ = plain_run(
        BATCHES, process=lambda model: clip_grad_norm_(model.parameters(), 0.05)
    )
    assert_same_states(states, expected)
    assert opt.diagnostics()["grad_norm"] == pytest.approx(0.05, rel=1e-4)


def test_the_default_of_max_grad_norm_is_told(tmp_path):
    model = Model()
    trainer = StormPlusTrainer(
        model, arguments(tmp_path, max_grad_norm=1.0),
        optimizers=(StormPlus(model.parameters()), None),
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"the default is 1.0"):
        trainer.create_optimizer()


def test_the_log_has_the_loss_and_the_diagnostics(tmp_path):
    _, trainer, _ = run(tmp_path, BATCHES, logging_strategy="steps", logging_steps=5)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [5, 10]
    for name, value in unwrapped(trainer.optimizer).diagnostics().items():
        assert rows[-1][f"stormplus/{name}"] == value
    # the loss of a step is that of its first evaluation
    losses = plain_run(BATCHES)[2]
    assert rows[0]["loss"] == pytest.approx((losses[0] + sum(losses[1:9:2])) / 5, rel=1e-3)


def test_the_plain_trainer_is_refused_by_the_optimizer(tmp_path):
    class Plain(InOrder, Trainer):
        pass

    with pytest.raises(TypeError, match="step\\(\\) needs a closure"):
        run(tmp_path, BATCHES, trainer=Plain)


def test_another_optimizer_is_refused(tmp_path):
    trainer = StormPlusTrainer(Model(), arguments(tmp_path), train_dataset=Rows(2))
    with pytest.raises(TypeError, match="got AdamW"):
        trainer.train()


def test_an_unverified_setting_is_refused(tmp_path):
    model = Model()
    trainer = StormPlusTrainer(
        model, arguments(tmp_path), optimizers=(StormPlus(model.parameters()), None)
    )
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="DataParallel has not been verified"):
        trainer.create_optimizer()


def test_by_class_and_options(tmp_path):
    trainer = StormPlusTrainer(
        Model(), arguments(tmp_path), train_dataset=Rows(3),
        optimizer_cls_and_kwargs=(StormPlus, {"lr": 0.5}),
    )  # fmt: skip
    trainer.train()
    assert unwrapped(trainer.optimizer).diagnostics()["grad_evaluations"] == 5


def test_a_failed_evaluation_leaves_nothing_behind(tmp_path):
    class Fails(Model):
        def forward(self, x, labels):
            if self.evaluations == 6:
                raise OSError("a broken disc")
            return super().forward(x, labels)

    model, opts = Fails(), []
    with pytest.raises(OSError, match="a broken disc"):
        run(
            tmp_path, BATCHES, model=model,
            setup=lambda trainer: opts.append(unwrapped(trainer.optimizer)),
        )  # fmt: skip
    assert opts[0].pending
    assert not opts[0]._samples
    assert not opts[0]._optimizer_step_pre_hooks
    assert int(model.net[1].num_batches_tracked) == 3  # evaluations 1, 2-3, 4-5, 6-(7)


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = run_page("integrations/huggingface.md")
    assert page["opt"].optimizer.diagnostics()["grad_evaluations"] == 2 * 5 - 1


@pytest.mark.long
def test_the_example_counts_its_evaluations(tmp_path):
    out = run_example("huggingface_trainer.py", "--epochs", 2, "--out", tmp_path)
    # 44 batches of 32 rows an epoch
    assert f"44 steps of 2 micro-batches, {2 * (2 * 44 - 1)} evaluations" in out
    assert "running statistics moved 88 times" in out


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "stormplus.integrations.huggingface")
    with pytest.raises(ModuleNotFoundError, match=r"stormplus\[huggingface\]"):
        importlib.import_module("stormplus.integrations.huggingface")
