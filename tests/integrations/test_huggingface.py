"""Hugging Face: what only the trainer does. What trainers share is in `test_trainers.py`."""

import copy
from functools import partial

import pytest
import torch
from tests.support import trainer_cases
from tests.support.huggingface_cases import Model, arguments, rows
from tests.support.trainer_cases import (
    BATCHES,
    SAMPLES,
    assert_at_average,
    assert_same_states,
    data,
    network,
    plain_run,
    snapshot,
    untuned_run,
)
from transformers import TrainerCallback

from stormplus import StormPlus, Untuned
from stormplus.integrations.huggingface import StormPlusTrainer

fit = partial(trainer_cases.fit, "huggingface")


@pytest.mark.parametrize(("step", "accumulate"), [(3, 1), (7, 2)])
def test_resume_without_seeds(tmp_path, step, accumulate):
    """The trainer's own order and random numbers: shuffled, unseeded."""
    options = {
        "trainer": StormPlusTrainer,
        "batches": 5,
        "epochs": 2 * accumulate,
        "accumulate": accumulate,
        "lr_scheduler_type": "linear",
        "lr": 0.5,
    }
    whole = fit(tmp_path, save_strategy="steps", save_steps=1, **options)
    torch.manual_seed(99)
    rest = fit(tmp_path, resume=str(tmp_path / f"checkpoint-{step}"), **options)
    assert_same_states(rest.states, whole.states[step:])
    assert rest.opt.diagnostics() == whole.opt.diagnostics()


def test_the_log_has_the_first_losses_and_the_diagnostics(tmp_path):
    run = fit(tmp_path, epochs=1, logging_strategy="steps", logging_steps=1)
    logged = [row for row in run.trainer.state.log_history if "loss" in row]
    losses = plain_run(epochs=1).losses
    expected = [losses[0], *losses[1::2]]
    assert [row["loss"] for row in logged] == pytest.approx(expected, abs=1e-4)  # it rounds
    for name, value in run.opt.diagnostics().items():
        assert logged[-1][f"stormplus/{name}"] == value


def trainer_for(folder, **options):
    args = arguments(folder, num_train_epochs=1)
    return StormPlusTrainer(Model(network()), args, train_dataset=rows(*data(3)), **options)


def test_what_is_refused(tmp_path):
    with pytest.raises(TypeError, match="got AdamW"):
        trainer_for(tmp_path).train()
    with pytest.raises(TypeError, match=r"got Untuned: .*transformers.Trainer.*UntunedCallback"):
        fit(tmp_path, kind=Untuned, trainer=StormPlusTrainer)
    trainer = trainer_for(tmp_path, optimizers=(StormPlus(network().parameters()), None))
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="DataParallel has not been verified"):
        trainer.create_optimizer()


def test_by_class_and_options(tmp_path):
    trainer = trainer_for(tmp_path, optimizer_cls_and_kwargs=(StormPlus, {"lr": 0.5}))
    trainer.train()
    assert trainer.optimizer.optimizer.grad_evaluations == 5


@pytest.mark.parametrize("alone", [False, True])
def test_weights_with_and_without_the_optimizers_state(tmp_path, alone):
    run = fit(tmp_path, epochs=1, save_strategy="steps", save_steps=4, save_only_model=alone)
    run.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    more = 2 * (BATCHES - 4) - 1 if alone else 0  # the estimator restarts
    assert run.opt.grad_evaluations == 2 * BATCHES - 1 + more


def test_a_frozen_layer_that_is_written_to_restarts_nothing(tmp_path):
    """The target of BYOL or MoCo: a frozen copy that follows at every step."""

    def add_target(net):
        net.target = copy.deepcopy(net.body[0]).requires_grad_(False)

    @torch.no_grad()
    def follow(net):
        for t, p in zip(net.target.parameters(), net.body[0].parameters()):
            t.lerp_(p, 0.1)

    run = fit(tmp_path, setup=add_target, after=follow)
    assert run.opt.grad_evaluations == 2 * SAMPLES - 1


def test_the_best_model_is_an_average(tmp_path):
    class First(TrainerCallback):  # the first evaluation is the best
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_loss"] = float(state.global_step)

    run = fit(
        tmp_path, First(), kind=Untuned, watch=True, eval_strategy="steps", eval_steps=4,
        save_steps=4, load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    assert run.trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    assert_at_average(snapshot(run.net), untuned_run(), 4)


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_the_default_schedule_warns(tmp_path, warmup_steps):
    schedule = {"lr_scheduler_type": "linear", "warmup_steps": warmup_steps}
    with pytest.warns(UserWarning, match='lr_scheduler_type="constant"'):
        fit(tmp_path, kind=Untuned, **schedule)
