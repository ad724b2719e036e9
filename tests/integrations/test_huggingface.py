"""Hugging Face: what only the trainer does. What trainers share is in `test_trainers.py`."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from huggingface_cases import (
    Model,
    OrderedPlainTrainer,
    OrderedTrainer,
    Recorder,
    Rows,
    arguments,
    fit,
    untuned,
)
from torch.utils.data import TensorDataset
from trainer_cases import (
    BATCHES,
    ROWS,
    SAMPLES,
    Run,
    assert_at_average,
    assert_same_states,
    data,
    hooks_left,
    network,
    plain_run,
    snapshot,
    untuned_run,
)
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

from stormplus import StormPlus, Untuned, recalibrate, same_sample
from stormplus.integrations.huggingface import StormPlusTrainer, UntunedCallback

ONE_EPOCH = 2 * BATCHES - 1


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=17, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16, num_labels=3,
            hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
            attn_implementation="eager",
        )
    )  # fmt: skip


def test_a_small_transformer(tmp_path):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(17, (BATCHES * ROWS, 12), generator=draw)
    labels = tokens.float().mean(dim=1).sub(7).clamp(0, 2).long()
    rows = [{"input_ids": t, "labels": y} for t, y in TensorDataset(tokens, labels)]
    run, plain, calls = Run(), bert(), []
    run.net = bert()
    run.net.register_forward_hook(lambda *_: calls.append(None))
    trainer = OrderedTrainer(
        run.net, arguments(tmp_path, num_train_epochs=1), train_dataset=rows,
        callbacks=[Recorder(run)], optimizers=(StormPlus(run.net.parameters(), lr=0.3), None),
    )  # fmt: skip
    trainer.train()
    plain.train()
    opt = StormPlus(plain.parameters(), lr=0.3)
    expected = []
    for i in range(BATCHES):
        torch.manual_seed(i)
        batch = slice(i * ROWS, (i + 1) * ROWS)

        def closure():
            opt.zero_grad()
            loss = plain(input_ids=tokens[batch], labels=labels[batch]).loss
            loss.backward()
            return loss

        opt.step(same_sample(opt, plain)(closure))
        expected.append(snapshot(plain))
    assert_same_states(run.states, expected)
    assert len(calls) == ONE_EPOCH
    moved = expected[-1]["classifier.weight"] - expected[0]["classifier.weight"]
    assert moved.norm() > 1e-3


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("step", [3, 5, 7])
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
    steps = whole.trainer.state.global_step
    assert steps == rest.trainer.state.global_step == len(whole.states)
    assert rest.opt.diagnostics() == whole.opt.diagnostics()
    assert whole.opt.grad_evaluations == 2 * steps - 1


# -- what is said and what is refused ------------------------------------------------------------


def made(folder, **options):
    model = Model()
    opt = StormPlus(model.parameters())
    return StormPlusTrainer(model, arguments(folder, **options), optimizers=(opt, None))


def test_the_default_of_max_grad_norm_is_told(tmp_path):
    with pytest.warns(UserWarning, match=r"max_grad_norm=1 clips the two .*the default is 1.0"):
        made(tmp_path, max_grad_norm=1.0).create_optimizer()


def test_the_log_has_the_loss_and_the_diagnostics(tmp_path):
    run = fit(tmp_path, epochs=1, logging_strategy="steps", logging_steps=3)
    rows = [row for row in run.trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [3, 6]
    for name, value in run.opt.diagnostics().items():
        assert rows[-1][f"stormplus/{name}"] == value
    # the loss of a step is that of its first evaluation
    losses = plain_run(epochs=1).losses
    assert rows[0]["loss"] == pytest.approx((losses[0] + sum(losses[1:5:2])) / 3, rel=1e-3)


def test_another_optimizer_is_refused(tmp_path):
    with pytest.raises(TypeError, match="got AdamW"):
        StormPlusTrainer(Model(), arguments(tmp_path), train_dataset=Rows(2)).train()


def test_an_unverified_setting_is_refused(tmp_path):
    trainer = made(tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="DataParallel has not been verified"):
        trainer.create_optimizer()


def test_by_class_and_options(tmp_path):
    trainer = StormPlusTrainer(
        Model(), arguments(tmp_path, num_train_epochs=1), train_dataset=Rows(3),
        optimizer_cls_and_kwargs=(StormPlus, {"lr": 0.5}),
    )  # fmt: skip
    trainer.train()
    assert trainer.optimizer.optimizer.grad_evaluations == 5


# -- weights that are replaced without the optimizer's state -------------------------------------


def test_the_best_model_and_a_second_call_of_train(tmp_path):
    run = fit(
        tmp_path, epochs=1, eval_dataset=Rows(1),
        save_strategy="steps", eval_strategy="steps", save_steps=3, eval_steps=3,
        load_best_model_at_end=True, label_names=["labels"], metric_for_best_model="loss",
    )  # fmt: skip
    assert run.trainer.state.best_model_checkpoint
    assert run.opt.grad_evaluations == ONE_EPOCH
    numbers = []
    run.opt.register_step_post_hook(lambda opt, *_: numbers.append(opt.diagnostics()))
    run.trainer.train()
    # One gradient for the first sample, at the weights that were loaded.
    assert run.opt.grad_evaluations == 2 * ONE_EPOCH
    assert numbers[0]["estimator_norm"] == numbers[0]["grad_norm"]
    assert numbers[1]["estimator_norm"] != numbers[1]["grad_norm"]


@pytest.mark.parametrize("alone", [False, True])
def test_weights_with_and_without_the_optimizers_state(tmp_path, alone):
    run = fit(tmp_path, epochs=1, save_strategy="steps", save_steps=4, save_only_model=alone)
    run.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    more = 2 * (BATCHES - 4) - 1 if alone else 0
    assert run.opt.grad_evaluations == ONE_EPOCH + more


class Clips(TrainerCallback):
    def on_step_end(self, *args, model, **kwargs):
        with torch.no_grad():
            model.net.body[0].weight.clamp_(-1, 1)


def test_a_callback_that_writes_at_every_step_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="writes to the parameters at every batch"):
        fit(tmp_path, callbacks=[Clips()])


def test_a_second_call_of_train_with_accumulation(tmp_path):
    run = fit(tmp_path, accumulate=2)
    assert not hooks_left(run.opt)
    run.trainer.train()
    assert run.opt.grad_evaluations == 2 * SAMPLES - 1


# -- Untuned: the average ------------------------------------------------------------------------


def test_without_its_callback_what_is_saved_depends_on_what_was_evaluated(tmp_path):
    """What the callback is for."""
    plain = untuned_run()
    run = untuned(tmp_path, callback=[], save_steps=3)
    for step in (3, 9):  # nothing was evaluated there
        assert torch.equal(
            run.saved[step]["body.0.weight"], plain.states[step - 1]["body.0.weight"]
        )
    assert_at_average(
        run.validated[BATCHES], plain.averages[BATCHES - 1], plain.states[BATCHES - 1]
    )


@pytest.mark.parametrize("options", [
    {"eval_strategy": "no"},
    {"eval_strategy": "steps", "eval_steps": 5, "accumulate": 1},
    {"save_strategy": "best", "metric_for_best_model": "loss"},
], ids=["no evaluation", "other steps", "best"])  # fmt: skip
def test_every_checkpoint_is_an_average(tmp_path, options):
    run, plain = untuned(tmp_path, **options), untuned_run()
    assert_same_states(run.states, plain.states)
    assert len(run.saved) > 1
    for step, state in (*run.saved.items(), *run.validated.items()):
        assert_at_average(state, plain.averages[step - 1], plain.states[step - 1])


def test_the_best_model_is_an_average_and_a_second_call_of_train_begins_at_it(tmp_path):
    class First(TrainerCallback):  # the first evaluation is the best
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_loss"] = float(state.global_step)

    settings = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_steps": 4}
    run = untuned(
        tmp_path, callback=[First(), UntunedCallback()], eval_strategy="steps", eval_steps=4,
        **settings,
    )  # fmt: skip
    assert run.trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    plain = untuned_run()
    assert_at_average(snapshot(run.net), plain.averages[3], plain.states[3])
    begun = []
    run.opt.register_step_pre_hook(lambda *_: begun.append(snapshot(run.net)))
    with pytest.warns(UserWarning, match=r"without the state of Untuned: it begins anew") as told:
        run.trainer.train()
    assert len([w for w in told if "begins anew" in str(w.message)]) == 1
    assert_at_average(begun[0], plain.averages[3], plain.states[3])
    assert run.opt.diagnostics()["step"] == SAMPLES


def test_a_second_call_of_train_goes_on_from_the_iterate(tmp_path):
    run = untuned(tmp_path)
    run.trainer.train()
    assert_same_states(run.states, untuned_run(epochs=4).states)


def test_running_statistics_are_taken_anew_over_the_last_batches(tmp_path):
    run = untuned(tmp_path, callback=[UntunedCallback(recalibrate_batches=4)])
    plain, (x, _) = untuned_run(), data()
    assert torch.equal(run.states[-1]["body.0.weight"], plain.states[-1]["body.0.weight"])
    net = network()
    net.load_state_dict(run.saved[SAMPLES])
    recalibrate(net, x.split(ROWS)[2:])
    for state in (snapshot(run.net), run.validated[SAMPLES], run.saved[SAMPLES]):
        for name in ("body.1.running_mean", "body.1.running_var"):
            torch.testing.assert_close(state[name], net.state_dict()[name], rtol=1e-9, atol=0)
    assert run.net.evaluations == SAMPLES


def test_the_callback_of_untuned_refuses_others(tmp_path):
    with pytest.raises(TypeError, match=r"is for Untuned, got StormPlus: pass optimizers="):
        fit(tmp_path, callbacks=[UntunedCallback()])


def test_weights_that_are_loaded_after_a_first_evaluation_stay(tmp_path):
    """`Trainer.evaluate` puts the average in by itself, before any callback has been asked."""
    model, begun = Model(), []
    opt = Untuned(model.parameters())
    trainer = OrderedPlainTrainer(
        model, arguments(tmp_path, label_names=["labels"], per_device_eval_batch_size=ROWS),
        train_dataset=Rows(2), eval_dataset=Rows(1), optimizers=(opt, None),
        callbacks=[UntunedCallback()],
    )  # fmt: skip
    trainer.evaluate()
    assert opt.at_average
    other = network(seed=1).state_dict()
    model.net.load_state_dict(other)
    opt.register_step_pre_hook(lambda *_: begun.append(snapshot(model.net)))
    trainer.train()
    assert torch.equal(begun[0]["body.0.weight"], other["body.0.weight"])


class Follows(TrainerCallback):
    """The target of BYOL or MoCo: a frozen copy that follows at every step."""

    @torch.no_grad()
    def on_step_end(self, args, state, control, model, **kwargs):
        for t, p in zip(model.net.target.parameters(), model.net.body[0].parameters()):
            t.lerp_(p, 0.1)


def test_a_frozen_layer_that_somebody_writes_to_restarts_nothing(tmp_path):
    def add_target(net):
        net.target = copy.deepcopy(net.body[0]).requires_grad_(False)
        net.target.bias.fill_(1)

    run = fit(tmp_path, setup=add_target, callbacks=[Follows()])
    assert run.opt.grad_evaluations == 2 * SAMPLES - 1
    assert not (run.net.target.bias == 1).any()
