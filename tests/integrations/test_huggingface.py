"""The trainer's run equals the plain loop, step by step, or is refused."""

import pytest
import torch

pytest.importorskip("transformers")

from huggingface_cases import OrderedTrainer, Recorder, arguments, bert, run
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
from trainer_cases import ROWS, assert_same_states, data, network, plain_run, snapshot

from stormplus import StormPlus, same_sample, scaled_step
from stormplus.integrations.huggingface import StormPlusTrainer, unwrapped

BATCHES = 10
TWICE_BUT_ONCE = 2 * BATCHES - 1


def bfloat16_loss(model, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.nn.functional.smooth_l1_loss(model(x), y)


@pytest.mark.parametrize("bf16", [False, True])
def test_equals_the_plain_loop(tmp_path, bf16):
    dtype = torch.float32 if bf16 else torch.float64
    states, trainer, model = run(
        tmp_path, BATCHES, dtype, bf16=bf16, lr_scheduler_type="linear", lr=0.5
    )
    expected, opt, _ = plain_run(
        BATCHES, dtype=dtype, lr=0.5, **({"loss": bfloat16_loss} if bf16 else {}),
        schedule=lambda opt: LambdaLR(opt, lambda step: (BATCHES - step) / BATCHES),
    )  # fmt: skip
    assert_same_states(states, expected)
    assert model.evaluations == TWICE_BUT_ONCE
    assert trainer.state.global_step == BATCHES
    assert int(model.net[1].num_batches_tracked) == BATCHES
    assert unwrapped(trainer.optimizer).diagnostics() == opt.diagnostics()


def test_two_epochs_and_a_second_call_of_train(tmp_path):
    states, trainer, model = run(tmp_path, BATCHES, num_train_epochs=2)
    expected, opt, _ = plain_run(BATCHES)
    assert_same_states(states[:BATCHES], expected)
    assert model.evaluations == 4 * BATCHES - 1
    opt = unwrapped(trainer.optimizer)
    assert not opt._samples
    assert not opt._optimizer_step_pre_hooks
    trainer.train()
    assert model.evaluations == 8 * BATCHES - 1


def test_accumulation_covers_all_micro_batches(tmp_path):
    states, trainer, model = run(tmp_path, BATCHES, gradient_accumulation_steps=4)
    expected, opt, losses = plain_run(BATCHES, accumulate=4)  # 4, 4 and 2 of them
    assert_same_states(states, expected)
    assert model.evaluations == 2 * BATCHES - 4
    assert trainer.state.global_step == 3
    assert opt.diagnostics()["grad_evaluations"] == len(losses) == 5
    assert int(model.net[1].num_batches_tracked) == BATCHES


def test_a_small_transformer(tmp_path):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(17, (BATCHES * ROWS, 12), generator=draw)
    labels = tokens.float().mean(dim=1).sub(7).clamp(0, 2).long()
    rows = [{"input_ids": t, "labels": y} for t, y in TensorDataset(tokens, labels)]
    model, plain = bert(), bert()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(None))
    recorder = Recorder(model)
    trainer = OrderedTrainer(
        model, arguments(tmp_path), train_dataset=rows, callbacks=[recorder],
        optimizers=(StormPlus(model.parameters(), lr=0.3), None),
    )  # fmt: skip
    trainer.train()
    plain.train()
    opt = StormPlus(plain.parameters(), lr=0.3)
    expected = []
    torch.manual_seed(0)
    for i in range(BATCHES):
        batch = slice(i * ROWS, (i + 1) * ROWS)

        def closure():
            opt.zero_grad()
            loss = plain(input_ids=tokens[batch], labels=labels[batch]).loss
            loss.backward()
            return loss

        opt.step(same_sample(opt, plain)(closure))
        expected.append(snapshot(plain))
    assert_same_states(recorder.states, expected)
    assert len(calls) == TWICE_BUT_ONCE
    moved = expected[-1]["classifier.weight"] - expected[0]["classifier.weight"]
    assert moved.norm() > 1e-3


# -- fp16 ----------------------------------------------------------------------------------------


def put_scaler(scale):
    """Accelerate has fp16 for other devices only; a scaler for this one is put in by hand."""

    def setup(trainer):
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.accelerator.native_amp = True
        trainer.accelerator.state._mixed_precision = "fp16"

    return setup


@pytest.mark.parametrize("scale", [2.0**10, 2.0**22], ids=["no overflow", "overflows"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.filterwarnings("ignore:max_grad_norm")
def test_fp16_is_scaled_step(tmp_path, scale, clip):
    states, trainer, model = run(
        tmp_path, BATCHES, torch.float32, setup=put_scaler(scale), max_grad_norm=clip
    )
    x, y = data(BATCHES, torch.float32)
    plain = network(torch.float32)
    opt, expected, calls = StormPlus(plain.parameters()), [], 0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    torch.manual_seed(0)
    for i in range(BATCHES):
        rows = slice(i * ROWS, (i + 1) * ROWS)

        def closure():
            nonlocal calls
            calls += 1
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.nn.functional.smooth_l1_loss(plain(x[rows]), y[rows])
            scaler.scale(loss).backward()
            return loss

        scaled_step(
            opt, scaler, closure, plain,
            process=lambda: clip_grad_norm_(plain.parameters(), clip or torch.inf),
        )  # fmt: skip
        expected.append(snapshot(plain))
    assert_same_states(states, expected)
    assert model.evaluations == calls
    taken = int(opt.diagnostics()["step"])
    assert unwrapped(trainer.optimizer).diagnostics() == opt.diagnostics()
    assert trainer.accelerator.scaler.get_scale() == scaler.get_scale()
    assert int(model.net[1].num_batches_tracked) == taken
    assert taken == BATCHES if scale == 2.0**10 else 1 < taken < BATCHES


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("step", [3, 5, 7])
def test_resume_is_bit_identical(tmp_path, step, accumulate):
    """The trainer's own order and random numbers: shuffled, unseeded."""
    options = {
        "trainer": StormPlusTrainer,
        "num_train_epochs": 2 * accumulate,
        "gradient_accumulation_steps": accumulate,
        "lr_scheduler_type": "linear",
        "lr": 0.5,
    }
    saving = {"save_strategy": "steps", "save_steps": 1}
    states, whole, model = run(tmp_path, 5, **options, **saving)
    torch.manual_seed(99)
    rest, again, resumed = run(tmp_path, 5, resume=str(tmp_path / f"checkpoint-{step}"), **options)
    assert_same_states(rest, states[step:])
    steps = whole.state.global_step
    assert steps == again.state.global_step == len(states)
    numbers = unwrapped(whole.optimizer).diagnostics()
    assert unwrapped(again.optimizer).diagnostics() == numbers
    assert numbers["grad_evaluations"] == 2 * steps - 1
    assert len(rest) == steps - step
