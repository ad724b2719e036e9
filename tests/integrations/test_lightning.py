"""Lightning's run equals the plain loop, step by step, in every mode that is not refused."""

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_cases import Module, autocast_loss, loader, run, trainer
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR
from trainer_cases import ROWS, assert_same_states, data, network, plain_run, snapshot

from stormplus import StormPlus, scaled_step

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]

BATCHES = 10
TWICE_BUT_ONCE = 2 * BATCHES - 1


def decay(opt):
    return ExponentialLR(opt, 0.9)


@pytest.mark.parametrize(
    ("precision", "dtype", "loss"),
    [
        ("32-true", torch.float32, {}),
        ("64-true", torch.float64, {}),
        ("bf16-mixed", torch.float32, {"loss": autocast_loss(torch.bfloat16)}),
    ],
)
def test_equals_the_plain_loop(precision, dtype, loss):
    module = Module(dtype, decay, lr=0.5)
    states, fit = run(module, loader(BATCHES, dtype), precision=precision)
    expected, opt, losses = plain_run(BATCHES, dtype=dtype, lr=0.5, schedule=decay, **loss)
    assert_same_states(states, expected)
    assert module.evaluations == TWICE_BUT_ONCE == len(losses)
    assert fit.global_step == BATCHES
    assert int(module.net[1].num_batches_tracked) == BATCHES
    assert fit.optimizers[0].diagnostics() == opt.diagnostics()


def test_two_epochs():
    module = Module()
    states, fit = run(module, loader(BATCHES), epochs=2)
    assert_same_states(states, plain_run(BATCHES, epochs=2)[0])
    assert (module.evaluations, fit.global_step) == (4 * BATCHES - 1, 2 * BATCHES)


def test_without_the_callback_statistics_move_twice():
    module = Module()
    trainer().fit(module, loader(BATCHES))
    assert int(module.net[1].num_batches_tracked) == TWICE_BUT_ONCE


# -- fp16 ----------------------------------------------------------------------------------------


def half(scale):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


def plain_half(scale, process=None):
    x, y = data(BATCHES, torch.float32)
    model = network(torch.float32)
    opt = StormPlus(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    states, evaluations = [], 0
    torch.manual_seed(0)
    for i in range(BATCHES):
        rows = slice(i * ROWS, (i + 1) * ROWS)

        def closure():
            nonlocal evaluations
            evaluations += 1
            opt.zero_grad()
            loss = autocast_loss(torch.float16)(model, x[rows], y[rows])
            scaler.scale(loss).backward()
            return loss

        scaled_step(
            opt, scaler, closure, model, process=process and (lambda: process(model.parameters()))
        )
        states.append(snapshot(model))
    return states, opt, evaluations, scaler


@pytest.mark.parametrize("scale", [2.0**10, 2.0**22], ids=["no overflow", "overflows"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.filterwarnings("ignore:gradient clipping")
def test_fp16_is_scaled_step(scale, clip):
    module, plugin = Module(torch.float32), half(scale)
    states, fit = run(
        module, loader(BATCHES, torch.float32), plugins=[plugin], gradient_clip_val=clip
    )
    expected, opt, evaluations, scaler = plain_half(
        scale, clip and (lambda parameters: clip_grad_norm_(parameters, clip))
    )
    assert_same_states(states, expected)
    assert module.evaluations == evaluations
    assert plugin.scaler.get_scale() == scaler.get_scale()
    assert fit.optimizers[0].diagnostics() == opt.diagnostics()
    taken = int(opt.diagnostics()["step"])
    assert int(module.net[1].num_batches_tracked) == taken
    assert taken == BATCHES if scale == 2.0**10 else 1 < taken < BATCHES


def test_fp16_overflow_in_the_second_evaluation():
    def spoiled(module, calls):
        class Spoiled(type(module)):
            def training_step(self, batch, batch_idx):
                loss = super().training_step(batch, batch_idx)
                # evaluations 1, 2-3, 4-5: the fifth is the second one of the third sample
                return loss * torch.inf if self.evaluations in calls else loss

        module.__class__ = Spoiled
        return module

    module = spoiled(Module(torch.float32), {5})
    states, fit = run(module, loader(BATCHES, torch.float32), plugins=[half(1024.0)])
    assert module.evaluations == TWICE_BUT_ONCE + 1  # repeated once, at half the scale
    assert fit.optimizers[0].diagnostics()["step"] == BATCHES
    assert int(module.net[1].num_batches_tracked) == BATCHES
    expected = plain_half(512.0)[0]  # a power of two only shifts exponents
    for ours, theirs in zip(states, expected):
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)

    module = spoiled(Module(torch.float32), range(5, 100))
    with pytest.raises(FloatingPointError, match="overflowed 20 times"):
        run(module, loader(BATCHES, torch.float32), plugins=[half(1024.0)])
    assert "training_step" not in vars(module)


def test_fp16_without_the_callback_is_refused():
    with pytest.raises(TypeError, match="needs a closure"):
        trainer(plugins=[half(1024.0)]).fit(Module(torch.float32), loader(BATCHES, torch.float32))


# -- accumulation --------------------------------------------------------------------------------


def test_accumulation_covers_all_micro_batches():
    module = Module()
    states, fit = run(module, loader(BATCHES), accumulate_grad_batches=4)
    expected, opt, losses = plain_run(BATCHES, accumulate=4, divisor=4)  # 4, 4 and 2 of them
    assert_same_states(states, expected)
    assert module.evaluations == 2 * BATCHES - 4
    assert fit.global_step == 3
    assert opt.diagnostics()["grad_evaluations"] == len(losses) == 5
    assert int(module.net[1].num_batches_tracked) == BATCHES


def test_accumulation_without_the_callback_is_another_run():
    module = Module()
    fit = trainer(accumulate_grad_batches=4)
    fit.fit(module, loader(BATCHES))
    assert module.evaluations == BATCHES + 2  # only the last micro-batch is seen twice
    expected = plain_run(BATCHES, accumulate=4, divisor=4)[0][-1]
    assert not torch.allclose(module.net[0].weight, expected["0.weight"], rtol=1e-3)


def test_accumulation_in_fp16_and_by_a_scheduler():
    module = Module(torch.float32)
    states, _ = run(
        module, loader(BATCHES, torch.float32), plugins=[half(1024.0)], accumulate_grad_batches=5
    )
    expected, _, _ = plain_run(
        BATCHES, accumulate=5, dtype=torch.float32, loss=autocast_loss(torch.float16)
    )
    assert module.evaluations == 15
    for name, value in expected[-1].items():  # without a scale small gradients are lost
        torch.testing.assert_close(states[-1][name], value, rtol=1e-2, atol=1e-3)

    module = Module()
    scheduled = GradientAccumulationScheduler({0: 1, 1: 5})
    states, _ = run(module, loader(BATCHES), scheduled, epochs=2)
    assert_same_states(states[:BATCHES], plain_run(BATCHES)[0])
    assert module.evaluations == TWICE_BUT_ONCE + 2 * BATCHES


# -- clipping ------------------------------------------------------------------------------------


def test_clipping_is_told_once_and_applies_to_both_gradients():
    with pytest.warns(UserWarning, match="two gradients of a sample separately") as told:
        states, _ = run(Module(), loader(BATCHES), gradient_clip_val=0.05)
    assert len([w for w in told if "separately" in str(w.message)]) == 1
    expected, opt, _ = plain_run(
        BATCHES, process=lambda model: clip_grad_norm_(model.parameters(), 0.05)
    )
    assert_same_states(states, expected)
    assert opt.diagnostics()["grad_norm"] == pytest.approx(0.05, rel=1e-4)
