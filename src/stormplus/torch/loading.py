"""Which saved states an optimizer can go on from, and how they are taken in."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from stormplus.rules import StormRule
from stormplus.torch.norms import accumulator_dtype
from stormplus.torch.state import (
    CODES,
    FORMAT,
    PLAIN_BUFFERS,
    SCALARS,
    UNIT_SCALARS,
    WIDE_BUFFERS,
    estimator_dtype,
)

# Arguments that a state is bound to: their names in the header, and to the user.
ARGUMENTS = {field.name: field.name for field in fields(StormRule)} | {
    "fixed_distance": "distance",
    "fixed_gradient": "gradient",
    "keeps_average": "average",
}


def check_loadable(state_dict: dict[str, Any], own: dict[str, Any], name: str) -> None:
    """Refuse a state this optimizer cannot go on from, before anything has changed.

    Args:
        state_dict: What `load_state_dict` received.
        own: The state where this optimizer keeps its numbers.
        name: This optimizer's class.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"not an optimizer state: it has the keys {sorted(state_dict)}")
    entries = list(state_dict["state"].values())
    saved = next((entry for entry in entries if "format" in entry), None)
    if saved is None:
        keys = sorted(entries[0]) if entries else []
        raise ValueError(
            f"this is not the state of {name} (a parameter's keys are {keys}): load it into "
            "the optimizer that saved it"
        )
    if saved["format"] != FORMAT:
        raise ValueError(
            f"the state has format {saved['format']}, this version of stormplus reads "
            f"{FORMAT}: load it with the version that saved it"
        )
    if bool((saved["step"] > 0).any()) and saved["grad_evaluations"] == 0:
        raise ValueError(
            "the state was loaded in part: torch.distributed.checkpoint passes over numbers in "
            "opt.state_dict(); save and load what its get_state_dict(model, opt) returns"
        )
    for key, words in CODES.items():
        if saved[key] != own[key]:
            raise ValueError(
                f"the state was saved with {key} {words[saved[key]]!r}, {name} has "
                f"{words[own[key]]!r}: construct the optimizer as it was"
            )
    for key, word in ARGUMENTS.items():
        if key in own and saved[key] != own[key]:
            raise ValueError(
                f"the state was saved with {word}={_shown(saved[key])}, {name} has "
                f"{word}={_shown(own[key])}: construct the optimizer as it was"
            )
    if saved["step"].shape != own["step"].shape:
        raise ValueError(
            f"the state has {len(saved['step'])} sets of sums, {name} has "
            f"{len(own['step'])}: give it the same parameters and groups"
        )
    if saved.get("averaged") and any(
        "average" in entry and "point" not in entry for entry in entries if entry["joined"] == 1
    ):
        raise ValueError(
            "the state was saved after eval(), and the iterate that train() brings back is not in "
            "it: torch.distributed.checkpoint loads only what is there already. Call opt.eval() "
            "before you load, or opt.train() before you save"
        )


def _shown(value: Any) -> Any:
    return None if isinstance(value, float) and value == 0 else value  # a unit that is measured


def ids(state_dict: dict[str, Any]) -> list[Any]:
    """The keys of the parameters' states, in the order of the parameters."""
    return [i for group in state_dict["param_groups"] for i in group["params"]]


def check_shapes(state_dict: dict[str, Any], param_groups: list[dict[str, Any]]) -> None:
    params = [p for group in param_groups for p in group["params"]]
    for i, p in zip(ids(state_dict), params):
        d = state_dict["state"].get(i, {}).get("estimator")
        if d is not None and d.shape != p.shape:
            raise ValueError(
                f"the state of parameter {i} has the shape {tuple(d.shape)}, the parameter "
                f"{tuple(p.shape)}: load it with the model that it was saved with"
            )


def restored(saved: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """A parameter's saved state as it was: torch's loader has cast it to p's dtype."""
    state = dict(saved)
    for key, value in saved.items():
        if key in WIDE_BUFFERS:
            state[key] = value.to(p.device, estimator_dtype(p.dtype), copy=True)
        elif key in PLAIN_BUFFERS:
            state[key] = value.to(p.device, p.dtype, copy=True)
        elif key in SCALARS or key in UNIT_SCALARS:
            state[key] = value.to(p.device, accumulator_dtype(p.device), copy=True)
        elif isinstance(value, Tensor):
            state[key] = value.clone()
    return state
