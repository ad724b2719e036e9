"""The harness of all trainers: a network, its data, and the plain loop to compare them with.

Each `<trainer>_cases.py` has one function, `train(s)`, which trains this network on this data with
one trainer, as the `Settings` say, and fills `s.run`. `fit(name, folder, **settings)` calls it.
"""

import importlib
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stormplus import StormPlus, Untuned, same_sample, scaled_step
from stormplus.torch import BaseOptimizer, PairedOptimizer
from stormplus.untuned_rule import INTERPOLATION, average_weight

ROWS = 8  # of a batch
BATCHES, EPOCHS = 6, 2
SAMPLES = BATCHES * EPOCHS
FLOAT32_ONLY = ("fastai", "keras")


def data(batches=BATCHES, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batches * ROWS, 6, generator=draw, dtype=torch.float64)
    noise = torch.randn(batches * ROWS, 1, generator=draw, dtype=torch.float64)
    return x.to(dtype), (torch.sin(x.sum(dim=1, keepdim=True)) + 0.1 * noise).to(dtype)


class Network(nn.Module):
    """Counts its evaluations in train mode, and fails in one of them if asked to."""

    def __init__(self, dtype=torch.float64, dropout=0.3):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
        ).to(dtype)  # fmt: skip
        self.evaluations, self.fails_at = 0, None

    def forward(self, x):
        self.evaluations += self.training
        if self.training and self.evaluations == self.fails_at:
            raise OSError("a broken disc")
        return self.body(x)


def network(dtype=torch.float64, dropout=0.3, seed=0):
    torch.manual_seed(seed)
    return Network(dtype, dropout)


def distance(out, y):
    return F.smooth_l1_loss(out.to(y.dtype), y)  # autocast answers in half precision


def loss_of(model, x, y, half=None):
    with nullcontext() if half is None else torch.autocast("cpu", dtype=half):
        out = model(x)
    return distance(out, y)


def snapshot(model):
    """Parameters and buffers, without `state_dict`, which may swap an average in."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: value.detach().clone() for name, value in tensors}


class Run(SimpleNamespace):
    """What a run leaves: the states after every step, the optimizer, the network."""

    def __init__(self):
        super().__init__(states=[], opt=None, net=None, validated={}, saved={}, losses=[])


def nothing(*_):
    pass


@dataclass
class Settings:
    """How to train; what only one trainer knows is in `options`."""

    folder: Path | None = None
    callbacks: tuple[Any, ...] = ()
    kind: type = StormPlus
    lr: float = 1.0
    dtype: torch.dtype = torch.float64
    batches: int = BATCHES
    epochs: int = EPOCHS
    dropout: float = 0.3
    half: torch.dtype | None = None
    scale: float | None = None
    clip: float | None = None
    accumulate: int = 1
    schedule: Any = None
    tool: bool = True  # False leaves our callback, mixin or subclass out
    setup: Any = nothing  # called with the network before the run
    fails_at: int | None = None  # the evaluation that raises an OSError
    after: Any = nothing  # called with the network after every step
    watch: bool = False  # validate and save after every epoch
    resume: Any = False  # go on from what a watched run saved after its first epoch
    recalibrate_batches: int = 0
    run: Run = field(default_factory=Run)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def pairs(self):
        return issubclass(self.kind, PairedOptimizer)

    def data(self):
        return data(self.batches, self.dtype)

    def network(self):
        return self.prepared(network(self.dtype, self.dropout))

    def prepared(self, net):
        self.run.net, net.fails_at = net, self.fails_at
        self.setup(net)
        return net

    def optimizer(self, params, **options):
        rate = {} if self.kind is Untuned else {"lr": self.lr}
        self.run.opt = self.kind(params, **rate, **options)
        return self.run.opt

    def record(self):
        """Call this after every step."""
        self.run.states.append(snapshot(self.run.net))
        self.after(self.run.net)


def adapter(name):
    return importlib.import_module(f"tests.support.{name}_cases")


def fit(name, folder=None, *callbacks, **settings):
    if name in FLOAT32_ONLY:
        settings.setdefault("dtype", torch.float32)
    known = {f.name for f in fields(Settings)}
    options = {key: settings.pop(key) for key in settings.keys() - known}
    s = Settings(folder, callbacks, options=options, **settings)
    adapter(name).train(s)
    return s.run


def plain_run(*, divisor=None, before=nothing, process=nothing, make=None, **settings):
    """The loop that the README shows; the number of a sample's first batch is its seed.

    Args:
        divisor: Of the losses of micro-batches, if it is not their number.
        before: Called before each step.
        process: Called with the network after each backward pass, to change the gradients.
        make: Makes the optimizer, or a wrapper around it, from the network.
        settings: Those of `Settings`.
    """
    s = Settings(**settings)
    x, y = s.data()
    run, net = s.run, s.network()
    opt = outer = make(net) if make else s.optimizer(net.parameters())
    while not isinstance(opt, BaseOptimizer):  # inside Lookahead or OrthoGrad
        opt = getattr(opt, "optimizer", None) or opt._base_optimizer
    run.opt = opt
    scaler = torch.amp.GradScaler("cpu", init_scale=s.scale or 1.0, enabled=bool(s.scale))
    run.scaler = scaler

    def clip():
        if s.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), s.clip)
        process(net)

    starts = range(0, s.batches, s.accumulate)
    for step, (epoch, start) in enumerate((e, start) for e in range(s.epochs) for start in starts):
        window = range(start, min(start + s.accumulate, s.batches))

        def closure():
            opt.zero_grad()
            total = 0.0
            for i in window:
                rows = slice(i * ROWS, (i + 1) * ROWS)
                part = loss_of(net, x[rows], y[rows], s.half) / (divisor or len(window))
                scaler.scale(part).backward()
                total += part.detach()
            if not s.scale:
                clip()
            run.losses.append(float(total))
            return total

        opt.param_groups[0]["lr"] = s.lr * (1.0 if s.schedule is None else s.schedule(step))
        before(step, opt, net)
        torch.manual_seed(epoch * s.batches + start)
        if s.scale:
            scaled_step(opt, scaler, closure, net, process=clip)
        else:
            outer.step(same_sample(opt, net)(closure) if s.pairs else closure)
        s.record()
    return run


def untuned_run(**options):
    """The plain loop with `Untuned`, and the average after every step, from the iterates alone.

    With y = (1 - b) z + b x and x <- x + c (z - x), a new y and the previous x determine z.
    """
    run = plain_run(kind=Untuned, **options)
    first = network(options.get("dtype", torch.float64)).state_dict()
    x = {name: first[name] for name, _ in run.net.named_parameters()}
    run.averages, b = [], INTERPOLATION
    for t, state in enumerate(run.states, 1):
        c = float(average_weight(t))
        z = {k: (state[k] - b * (1 - c) * x[k]) / (1 - b + b * c) for k in x}
        x = {k: x[k] + c * (z[k] - x[k]) for k in x}
        run.averages.append(x)
    return run


# -- comparisons -----------------------------------------------------------------------------------


def assert_at_average(state, plain, step):
    """All weights are those of the average after a step of `untuned_run`, not of the iterate."""
    average, iterate = plain.averages[step - 1], plain.states[step - 1]
    close = 1e-9 if average["body.0.weight"].dtype == torch.float64 else 1e-6
    for name, value in average.items():
        torch.testing.assert_close(state[name], value, rtol=close, atol=close)
    apart = (average["body.0.weight"] - iterate["body.0.weight"]).abs().max()
    assert apart > 20 * close


def assert_same_states(states, expected):
    assert len(states) == len(expected) > 0
    for step, (ours, theirs) in enumerate(zip(states, expected)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert torch.equal(ours[name], theirs[name]), f"{name} differs after step {step + 1}"


def assert_same_runs(run, plain):
    assert_same_states(run.states, plain.states)
    assert any(not torch.equal(plain.states[0][k], v) for k, v in plain.states[-1].items())
    assert run.net.evaluations == plain.net.evaluations
    assert run.opt.diagnostics() == plain.opt.diagnostics()


def hooks_left(opt):
    return [*opt._pass_hooks.values(), *opt._optimizer_step_pre_hooks.values()]


def warnings_with(recwarn, text):
    return [str(w.message) for w in recwarn if text in str(w.message)]
