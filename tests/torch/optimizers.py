"""The contract table: every torch optimizer, how it takes a step, and what it is compared with.

A new optimizer is one more row of `CASES`, and test_contract.py checks every property of it.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from stormplus.rules import (
    AdaStormRule,
    MetaStormNARule,
    MetaStormSGRule,
    NormalizedStormRule,
    Sums,
)
from stormplus.torch import PairedOptimizer
from tests.support.oracle import algorithm_1
from tests.support.problems import Network
from tests.support.untuned_oracle import untuned_run


@dataclass(frozen=True)
class OwnRule:
    """A rule as the documentation says how to write one: a constant gain."""

    gain: float = 0.5
    unit: float = 0.2  # a name that the optimizer uses too

    def __call__(self, sums, g_sq, d_sq, t):
        sum_g_sq = sums.sum_g_sq.plus(g_sq)
        sum_d_sq_over_a = sums.sum_d_sq_over_a.plus(d_sq / self.gain)
        eta = self.unit * (1 + sum_g_sq.total) ** (-1 / 3)
        return Sums(sum_g_sq, sum_d_sq_over_a), self.gain + 0 * g_sq, eta


class Own(PairedOptimizer):
    rule = OwnRule()


class MetaStormSG(PairedOptimizer):
    rule = MetaStormSGRule()


class MetaStormNA(PairedOptimizer):
    rule = MetaStormNARule()


class NormalizedStorm(PairedOptimizer):
    rule = NormalizedStormRule()


class AdaStorm(PairedOptimizer):
    rule = AdaStormRule(200)


def with_rule(params, rule):
    """Return an optimizer of a new class, as a user writes it."""
    return type("Mine", (PairedOptimizer,), {"rule": rule})(params)


def own_formula(sum_g, sum_d, g_sq, d_sq, t):
    return sum_g + g_sq, sum_d + d_sq / 0.5, 0.5, 0.2 / np.cbrt(1 + sum_g + g_sq)


@dataclass(frozen=True)
class Case:
    """An optimizer, and how its passes are run."""

    name: str
    cls: type
    method: Any = None  # what the oracle calls its rule
    path: dict = field(default_factory=dict)
    buffers: tuple = ("estimator",)

    @property
    def paired(self):
        return issubclass(self.cls, PairedOptimizer)

    def __call__(self, params, *, lr=None, **options):
        """Untuned has no lr, but a factor for each group."""
        if self.paired:
            return self.cls(params, **({} if lr is None else {"lr": lr}) | self.path | options)
        groups = list(params)
        if lr is not None and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        if groups and isinstance(groups[0], dict):
            groups = [{"lr": 1.0 if lr is None else lr} | group for group in groups]
            for group in groups:
                group["factor"] = group.pop("lr")
        return self.cls(groups, **options)

    def step(self, opt, evaluate):
        """Take one step; `evaluate` zeroes the gradients, calls backward and returns the loss."""
        if self.paired:
            return opt.step(evaluate)
        loss = evaluate()
        opt.step()
        return loss

    def descend(self, opt, params, rows):
        """Take steps with given gradients (None: missing); both of a pair are the same."""
        for row in rows:

            def evaluate(row=row):
                for p, g in zip(params, row, strict=True):
                    p.grad = None if g is None else g.clone()

            self.step(opt, evaluate)

    def oracle(self, problem, groups, decoupled=False, maximize=False, unit=1.0):
        """Return where the run should end: x, d, gain and step size."""
        if self.paired:
            run = algorithm_1(
                problem.gradient, groups, problem.samples, method=self.method, unit=unit,
                decoupled=decoupled, maximize=maximize,
            )  # fmt: skip
            return run.x[-1], run.d[-1], run.gain[-1], run.step_size[-1]
        of_group = [i for i, group in enumerate(groups) for _ in group.blocks]
        last = untuned_run(
            lambda k, x: problem.gradient(x, problem.samples[k]),
            [block for group in groups for block in group.blocks],
            len(problem.samples),
            lr=[groups[i].lr for i in of_group],
            weight_decay=[groups[i].weight_decay for i in of_group],
            maximize=maximize,
        )[-1]
        z_minus_x = [z - x for z, x in zip(last["z"], last["average"])]
        return last["x"], z_minus_x, None, last["eta"]


PATHS = {
    "plain": {"foreach": False},
    "native": {},  # where the library was built; test_native.py says if it was not
}
CASES = [
    *(Case(f"StormPlus {name}", StormPlus, "storm+", path) for name, path in PATHS.items()),
    Case("SimplifiedStormPlus", SimplifiedStormPlus, "simplified-storm+"),
    Case("Storm", Storm, "storm"),
    Case("MetaStormSG", MetaStormSG, "meta-storm-sg"),
    Case("MetaStormNA", MetaStormNA, "meta-storm-na"),
    Case("NormalizedStorm", NormalizedStorm, "normalized-storm"),
    Case("AdaStorm", AdaStorm, "ada-storm"),
    Case("Own", Own, own_formula),
    Case("Untuned", Untuned, buffers=("z_minus_x", "grad_rms", "initial_sample")),
]
PAIRED = [case for case in CASES if case.paired]
PLAIN, UNTUNED = CASES[0], CASES[-1]

# What all paths and rules share is tested on three of them, and in the long suite on all;
# test_kernels.py compares the paths.
QUICK = ("StormPlus plain", "StormPlus native", "Untuned")


def over(cases):
    params = [
        pytest.param(case, marks=() if case.name in QUICK else pytest.mark.long, id=case.name)
        for case in cases
    ]
    return pytest.mark.parametrize("case", params)


every, every_paired, every_path = over(CASES), over(PAIRED), over(PAIRED[:2])


class Run:
    """An optimizer and a small network that it trains, one sample per step."""

    def __init__(self, case, samples=12, dtype=torch.float64, named=False, **options):
        self.case, self.problem = case, Network(samples=samples)
        self.params = self.problem.parameters(dtype)
        self.opt = case(zip("abc", self.params) if named else self.params, **options)

    def closure(self, sample, calls=None):
        """Return the closure of a sample, which appends to `calls` whenever it is called."""

        def loss():
            if calls is not None:
                calls.append(sample)
            return self.problem.loss(self.params, self.problem.samples[sample])

        return on(self.opt, loss)

    def train(self, start=0, stop=None):
        """Take steps with the samples `start` to `stop`, by default all."""
        for sample in range(len(self.problem.samples))[start:stop]:
            self.case.step(self.opt, self.closure(sample))
        return self

    @torch.no_grad()
    def copy_weights(self, other):
        for p, q in zip(self.params, other.params):
            p.copy_(q)

    def everything(self):
        return everything(self.opt)


def parameter(*numbers, dtype=torch.float64):
    return torch.nn.Parameter(torch.tensor(numbers, dtype=dtype))


def noise(*shape, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=dtype)


def on(opt, loss, set_to_none=True):
    """Return a closure: zero the gradients, compute `loss()`, call backward."""

    def evaluate():
        opt.zero_grad(set_to_none=set_to_none)
        value = loss()
        value.backward()
        return value

    return evaluate


def halves(opt, evaluate):
    """Take a step in a loop that calls `evaluate` itself."""
    if opt.started:
        evaluate()
        opt.move()
    evaluate()
    opt.estimate()


def values(params):
    return [p.detach().clone() for p in params]


def shared_numbers(opt):
    """Return the numbers that all parameters share, from a checkpoint."""
    entries = opt.state_dict()["state"].values()
    return next(entry["scalars"] for entry in entries if "scalars" in entry)


def per_tensor(opt, name):
    """Return a number of each parameter of Untuned, from a checkpoint."""
    state = opt.state_dict()["state"]
    return torch.stack([state[i][name] for i in range(len(opt.parameters()))])


def step_sizes(opt):
    """Return the step size of each parameter, or the one that all share."""
    if isinstance(opt, PairedOptimizer):
        return shared_numbers(opt)["step_size"]
    return per_tensor(opt, "step_size")


def everything(opt):
    """Return copies of the parameters and the state."""
    return copy.deepcopy((values(opt.parameters()), opt.state_dict()["state"]))


def state_tensors(opt):
    """Return every tensor of the state, by parameter number and name."""
    entries = [opt.state[p] for p in opt.parameters()]
    return {
        (i, name): tensor
        for i, entry in enumerate(entries)
        for name, tensor in (entry | entry.get("scalars", {})).items()
        if isinstance(tensor, torch.Tensor)
    }


def assert_same(a, b, where="state"):
    """Compare nested values to the last bit."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    else:
        assert a == b, where
