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

    def oracle(self, problem, groups, decoupled=False, maximize=False, unit=1.0):
        """Where the run should end: x, d, gains and step sizes; `groups` as `oracle.Group`."""
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
    "foreach": {"foreach": True},
    "native": {},  # where the library was built; test_native.py says if it was not
}
CASES = [
    *(Case(f"StormPlus {name}", StormPlus, "storm+", path) for name, path in PATHS.items()),
    Case("SimplifiedStormPlus", SimplifiedStormPlus, "simplified-storm+"),
    Case("Storm", Storm, "storm"),
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


every, every_paired, every_path = over(CASES), over(PAIRED), over(PAIRED[:3])


def made(case, samples=12, dtype=torch.float64, named=False, **options):
    problem = Network(samples=samples)
    params = problem.parameters(dtype)
    return problem, params, case(zip("abc", params) if named else params, **options)


def parameter(*numbers, dtype=torch.float64):
    return torch.nn.Parameter(torch.tensor(numbers, dtype=dtype))


def noise(*shape, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=dtype)


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


def shared_numbers(opt):
    """What all parameters share, as a checkpoint has it."""
    entries = opt.state_dict()["state"].values()
    return next(entry["scalars"] for entry in entries if "scalars" in entry)


def per_tensor(opt, name):
    """A number of each parameter of Untuned, as a checkpoint has it."""
    state = opt.state_dict()["state"]
    return torch.stack([state[i][name] for i in range(len(opt.parameters()))])


def step_sizes(opt):
    """The step size of each parameter, or the one that all share."""
    if isinstance(opt, PairedOptimizer):
        return shared_numbers(opt)["step_size"]
    return per_tensor(opt, "step_size")


def everything(opt):
    """Parameters and state, copied."""
    return copy.deepcopy((values(opt.parameters()), opt.state_dict()["state"]))


def state_tensors(opt):
    """Every tensor of the state, by the parameter's number and its own name."""
    entries = [opt.state[p] for p in opt.parameters()]
    return {
        (i, name): tensor
        for i, entry in enumerate(entries)
        for name, tensor in (entry | entry.get("scalars", {})).items()
        if isinstance(tensor, torch.Tensor)
    }


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
