"""The table of the contract: every torch optimizer, how it takes a step, what it is compared with.

A new optimizer is one more row of `CASES`, and test_contract.py runs every property on it.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from oracle import algorithm_1
from problems_for_tests import Network
from untuned_oracle import untuned_run

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from stormplus.rules import Sums
from stormplus.torch import PairedOptimizer


@dataclass(frozen=True)
class OwnRule:
    """A rule as the documentation says how to write one: a constant gain."""

    gain: float = 0.5
    size: float = 0.2

    def __call__(self, sums, g_sq, d_sq, t):
        sum_g_sq = sums.sum_g_sq.plus(g_sq)
        sum_d_sq_over_a = sums.sum_d_sq_over_a.plus(d_sq / self.gain)
        eta = self.size * (1 + sum_g_sq.total) ** (-1 / 3)
        return Sums(sum_g_sq, sum_d_sq_over_a), self.gain + 0 * g_sq, eta


class Own(PairedOptimizer):
    rule = OwnRule()


def own_formula(sum_g, sum_d, g_sq, d_sq, t):
    return sum_g + g_sq, sum_d + d_sq / 0.5, 0.5, 0.2 / np.cbrt(1 + sum_g + g_sq)


PAIRS_ONLY = ("scope", "decoupled_weight_decay")


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
        """Untuned has no lr, but a factor for each group, and its only scope is a tensor."""
        if self.paired:
            return self.cls(params, **({} if lr is None else {"lr": lr}) | self.path | options)
        options = {k: v for k, v in options.items() if k not in PAIRS_ONLY}
        groups = list(params)
        if lr is not None or (groups and isinstance(groups[0], dict)):
            groups = groups if isinstance(groups[0], dict) else [{"params": groups}]
            groups = [{"lr": 1.0 if lr is None else lr} | group for group in groups]
            groups = [{"factor" if k == "lr" else k: v for k, v in g.items()} for g in groups]
        return self.cls(groups, **self.path, **options)

    def step(self, opt, evaluate):
        """As its user writes it; `evaluate` zeroes gradients, calls backward, returns the loss."""
        if self.paired:
            return opt.step(evaluate)
        loss = evaluate()
        opt.step()
        return loss

    def train(self, problem, opt, params, samples=None):
        for xi in problem.samples if samples is None else samples:
            self.step(opt, problem.closure(opt, params, xi))

    def descend(self, opt, params, rows):
        """Steps with given gradients, None for a missing one; both of a pair are the same."""
        for row in rows:

            def evaluate(row=row):
                for p, g in zip(params, row, strict=True):
                    p.grad = None if g is None else g.clone()

            self.step(opt, evaluate)

    def oracle(self, problem, groups, scope="global", decoupled=False, maximize=False, norm="raw"):
        """Where the run should end: x, d, gains and step sizes; `groups` as `oracle.Group`."""
        if self.paired:
            run = algorithm_1(
                problem.gradient, groups, problem.samples, method=self.method, norm=norm,
                scope=scope, decoupled=decoupled, maximize=maximize,
            )  # fmt: skip
            return (
                run.x[-1],
                run.d[-1],
                list(run.gain[-1].values()),
                list(run.step_size[-1].values()),
            )
        of_group = [i for i, group in enumerate(groups) for _ in group.blocks]
        last = untuned_run(
            lambda k, x: problem.gradient(x, problem.samples[k]),
            [block for group in groups for block in group.blocks],
            len(problem.samples),
            lr=[groups[i].lr for i in of_group],
            weight_decay=[groups[i].weight_decay for i in of_group],
            maximize=maximize,
        )[-1]
        lead = [z - x for z, x in zip(last["z"], last["average"])]
        return last["x"], lead, [], last["eta"]


PATHS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "native": {},  # where the library was built; test_native.py says if it was not
}
CASES = [
    *(Case(f"StormPlus {name}", StormPlus, "storm+", path) for name, path in PATHS.items()),
    Case("SimplifiedStormPlus", SimplifiedStormPlus, "simplified-storm+"),
    Case("Storm", Storm, "storm"),
    Case("Own", Own, own_formula),
    Case("Untuned", Untuned, buffers=("lead", "unit", "origin")),
]
PAIRED = [case for case in CASES if case.paired]

# What all paths share is tested on two of them; test_kernels.py compares all four.
every = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=[pytest.mark.long] * (case.name in ("StormPlus foreach", "StormPlus fused"))
        )
        for case in CASES
    ],
    ids=lambda case: case.name,
)
every_paired = pytest.mark.parametrize("case", PAIRED, ids=lambda case: case.name)
every_path = pytest.mark.parametrize("case", PAIRED[:3], ids=lambda case: case.name)


def made(case, samples=12, dtype=torch.float64, named=False, **options):
    problem = Network(samples=samples)
    params = problem.parameters(dtype)
    return problem, params, case(zip("abc", params) if named else params, **options)


def on(opt, loss, set_to_none=True):
    """A closure: zero the gradients, compute `loss()`, call backward."""

    def evaluate():
        opt.zero_grad(set_to_none=set_to_none)
        value = loss()
        value.backward()
        return value

    return evaluate


def halves(opt, evaluate):
    """A step by a loop that owns its backward passes."""
    if opt.started:
        evaluate()
        opt.move()
    evaluate()
    opt.estimate()


def values(params):
    return [p.detach().clone() for p in params]


def run_of(opt):
    """The numbers of the run, as a checkpoint has them."""
    return next(entry["run"] for entry in opt.state_dict()["state"].values() if "run" in entry)


def everything(opt):
    """Parameters and state, copied."""
    return copy.deepcopy((values(opt.parameters()), opt.state_dict()["state"]))


def assert_same(a, b, where="state"):
    """Equal to the last bit, whatever it is."""
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
