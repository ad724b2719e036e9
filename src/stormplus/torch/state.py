"""What an optimizer remembers, in a form that survives a checkpoint (see loading.py).

Each parameter has an `estimator` (d) and a flag `joined`. The numbers of the rule are
vectors with one entry a bucket (the parameters that share their sums) and live, with the
phase, in the state of the first trainable parameter, the one place that `state_dict`,
`load_state_dict` and torch's distributed checkpoint all carry.

Everything exists from construction: the distributed checkpoint loads only keys that are
already there, and calls `step()` on an optimizer that has no state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stormplus.rules import (
    CorrectedUnitsRule,
    Rule,
    SimplifiedStormPlusRule,
    StormPlusRule,
    StormRule,
    Sum,
    Sums,
    UnitsRule,
)
from stormplus.torch.norms import accumulator_dtype

FORMAT = 1

# One entry a bucket, in the accumulator's dtype.
SCALARS = (
    "step",
    "sum_g_sq",
    "sum_g_sq_lost",
    "sum_d_sq_over_a",
    "sum_d_sq_over_a_lost",
    "gain",
    "step_size",
    "grad_norm_sq",
    "estimator_norm_sq",
)

# What `Untuned` has beside them.
UNIT_SCALARS = ("distance", "gradient_scale")
# Of a parameter's size: as precise as the estimator, or as the parameter.
WIDE_BUFFERS = ("estimator", "gradient_unit", "average")
PLAIN_BUFFERS = ("origin", "point")

RULES: tuple[type, ...] = (
    StormPlusRule,
    SimplifiedStormPlusRule,
    StormRule,
    CorrectedUnitsRule,
    UnitsRule,
)

OWN_RULE = "a rule of your own"

# Words become numbers in the state, for torch's loader takes a string apart. A word keeps its
# place, for saved states have the number: new ones come last.
CODES: dict[str, tuple[str, ...]] = {
    "rule": (
        "StormPlusRule",
        "SimplifiedStormPlusRule",
        "StormRule",
        OWN_RULE,
        "CorrectedUnitsRule",
        "UnitsRule",
    ),
    "norm": ("raw", "mean"),
    "scope": ("global", "group", "tensor"),
}

_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}


def estimator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32 for half precision: in bf16 the factor 1 - 1e-3 is 1, and d never decays."""
    return _WIDE.get(dtype, dtype)


def new_scalars(device: torch.device, buckets: int, extra: tuple[str, ...]) -> dict[str, Tensor]:
    zeros = torch.zeros(buckets, dtype=accumulator_dtype(device), device=device)
    return {name: zeros.clone() for name in (*SCALARS, *extra)} | {"gain": zeros + 1}  # a_1 = 1


def settle_buffer(p: Tensor, state: dict[str, Any], name: str) -> Tensor:
    """A buffer of p, made or brought to where p is now (unfrozen, or moved by `.to()`)."""
    dtype = p.dtype if name in PLAIN_BUFFERS else estimator_dtype(p.dtype)
    if name not in state:
        state[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
    elif state[name].device != p.device or state[name].dtype != dtype:
        state[name] = state[name].to(p.device, dtype)
    buffer: Tensor = state[name]
    return buffer


def drop_buffers(state: dict[str, Any]) -> None:
    for name in (*WIDE_BUFFERS, *PLAIN_BUFFERS):
        state.pop(name, None)


def settle_scalars(home: dict[str, Any], device: torch.device) -> None:
    """Bring the rule's numbers to where the first parameter is now."""
    if home["step"].device != device:
        numbers = home.keys() & {*SCALARS, *UNIT_SCALARS}
        home |= {name: home[name].to(device, accumulator_dtype(device)) for name in numbers}


def new_header(rule: Rule, options: Any) -> dict[str, Any]:
    """What the state says of the run, in plain integers."""
    return {
        "format": FORMAT,
        "phase": 0,
        "grad_evaluations": 0,
        "rule": CODES["rule"].index(type(rule).__name__ if type(rule) in RULES else OWN_RULE),
        "norm": CODES["norm"].index(options.norm),
        "scope": CODES["scope"].index(options.scope),
    } | _constants(rule)


def _constants(rule: Rule) -> dict[str, float]:
    """STORM's constants; the other rules have none."""
    return dict(vars(rule)) if isinstance(rule, StormRule) else {}


def move_header(states: list[dict[str, Any]], home: dict[str, Any]) -> None:
    """Bring what belongs to the whole run from where it is to `home`."""
    for state in states:
        if state is not home and "format" in state:
            for key in state.keys() - {"joined", *WIDE_BUFFERS, *PLAIN_BUFFERS}:
                home[key] = state.pop(key)


def get_sums(scalars: dict[str, Tensor]) -> Sums:
    return Sums(
        Sum(scalars["sum_g_sq"], scalars["sum_g_sq_lost"]),
        Sum(scalars["sum_d_sq_over_a"], scalars["sum_d_sq_over_a_lost"]),
    )


def set_sums(sums: Sums) -> dict[str, Tensor]:
    return {
        "sum_g_sq": sums.sum_g_sq.value,
        "sum_g_sq_lost": sums.sum_g_sq.lost,
        "sum_d_sq_over_a": sums.sum_d_sq_over_a.value,
        "sum_d_sq_over_a_lost": sums.sum_d_sq_over_a.lost,
    }


def diagnose(home: dict[str, Any], *, several: bool) -> dict[str, float]:
    """The numbers of a run, as `StormOptimizer.diagnostics` describes them."""
    values = {
        "step": home["step"],
        "gain": home["gain"],
        "step_size": home["step_size"],
        "grad_norm": home["grad_norm_sq"],
        "estimator_norm": home["estimator_norm_sq"],
        "sum_g_sq": get_sums(home).sum_g_sq.total,
        "sum_d_sq_over_a": get_sums(home).sum_d_sq_over_a.total,
    }
    table = torch.stack(list(values.values())).cpu().double()
    if (table[0] > 0).any():  # buckets that have not had a gradient yet say nothing
        table = table[:, table[0] > 0]
    out: dict[str, float] = {}
    for name, row in zip(values, table):
        value = {"step": row.max(), "gain": row.mean(), "step_size": row.mean()}.get(
            name, row.sum()
        )
        stats = {"": value} | ({"_min": row.min(), "_max": row.max()} if several else {})
        for suffix, number in stats.items():
            out[name + suffix] = float(number.sqrt() if name.endswith("_norm") else number)
    return out | {"grad_evaluations": float(home["grad_evaluations"])}
