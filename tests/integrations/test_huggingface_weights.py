"""Weights that are replaced without the optimizer's state start the estimator anew."""

import pytest
import torch

pytest.importorskip("transformers")

from huggingface_cases import Rows, run
from trainer_cases import plain_run
from transformers import TrainerCallback

from stormplus.integrations.huggingface import unwrapped

BATCHES = 10
TWICE_BUT_ONCE = 2 * BATCHES - 1


def test_the_best_model_and_a_second_call_of_train(tmp_path):
    _, trainer, _ = run(
        tmp_path, BATCHES, eval_dataset=Rows(1),
        save_strategy="steps", eval_strategy="steps", save_steps=5, eval_steps=5,
        load_best_model_at_end=True, label_names=["labels"], metric_for_best_model="loss",
    )  # fmt: skip
    assert trainer.state.best_model_checkpoint
    opt = unwrapped(trainer.optimizer)
    assert opt.diagnostics()["grad_evaluations"] == TWICE_BUT_ONCE
    trainer.train()
    # One gradient for the first sample, at the weights that were loaded.
    assert opt.diagnostics()["grad_evaluations"] == 2 * TWICE_BUT_ONCE


def test_the_first_sample_after_a_change_takes_its_gradient_for_the_estimator(tmp_path):
    _, trainer, model = run(tmp_path, BATCHES)
    model.net.load_state_dict(plain_run(BATCHES)[0][0])
    opt = unwrapped(trainer.optimizer)
    norms = []
    opt.register_step_post_hook(lambda opt, *_: norms.append(opt.diagnostics()))
    trainer.train()
    assert norms[0]["estimator_norm"] == norms[0]["grad_norm"]
    assert norms[1]["estimator_norm"] != norms[1]["grad_norm"]
    assert norms[-1]["grad_evaluations"] == 2 * TWICE_BUT_ONCE


def test_weights_that_come_with_the_optimizer_state_go_on(tmp_path):
    _, trainer, _ = run(tmp_path, BATCHES, save_strategy="steps", save_steps=4)
    opt = unwrapped(trainer.optimizer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert opt.diagnostics()["grad_evaluations"] == TWICE_BUT_ONCE


def test_weights_alone_start_anew(tmp_path):
    _, trainer, _ = run(
        tmp_path, BATCHES, save_strategy="steps", save_steps=4, save_only_model=True
    )
    opt = unwrapped(trainer.optimizer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert opt.diagnostics()["grad_evaluations"] == TWICE_BUT_ONCE + 2 * (BATCHES - 4) - 1


def test_a_callback_that_writes_at_every_step_is_refused(tmp_path):
    class Clips(TrainerCallback):
        def on_step_end(self, *args, model, **kwargs):
            with torch.no_grad():
                model.net[0].weight.clamp_(-1, 1)

    with pytest.raises(RuntimeError, match="writes to the parameters at every batch"):
        run(tmp_path, BATCHES, setup=lambda trainer: trainer.add_callback(Clips()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_starts_anew_without_a_change(tmp_path, accumulate):
    _, trainer, model = run(tmp_path, BATCHES, gradient_accumulation_steps=accumulate)
    with torch.no_grad():
        model.net(torch.ones(2, 6, dtype=torch.float64))
    trainer.train()
    steps = 2 * BATCHES // accumulate
    assert unwrapped(trainer.optimizer).diagnostics()["grad_evaluations"] == 2 * steps - 1
