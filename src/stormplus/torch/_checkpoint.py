"""Saved states: how an optimizer's identity is encoded, and checks before a state is loaded.

torch's loader casts every tensor of a state to its parameter's dtype and takes strings apart, and
its distributed checkpoint knows tensors and numbers only. So what an optimizer was constructed with
is text in bytes, and a saved state is put back as it was saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from stormplus.torch._tensors import BufferKind, State

FORMAT = 6
_IDENTITY_SIZE = 1024  # the distributed checkpoint loads into tensors of the same size


def encode(identity: Mapping[str, Any]) -> Tensor:
    """Return an optimizer's identity as bytes."""
    text = json.dumps(identity).encode()
    size = -(-len(text) // _IDENTITY_SIZE) * _IDENTITY_SIZE
    return torch.tensor(list(text.ljust(size)), dtype=torch.uint8, device="cpu")


def entries(state_dict: State) -> list[State]:
    """Return the states of the parameters, in their order; {} where there is none."""
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    return [state_dict["state"].get(i, {}) for i in ids]


def scalars_of(states: list[State]) -> State:
    """Return the numbers that all parameters share; {} if there are none."""
    return next((state["scalars"] for state in states if "scalars" in state), {})


def copied(entry: State) -> State:
    """Return a part of a state with tensors of its own."""
    own: State = tree_map_only(Tensor, Tensor.clone, entry)
    return own


def check_loadable(state_dict: State, identity: Mapping[str, Any], optimizer: str) -> None:
    """Raise if a state is not that of an optimizer with this identity, by the name of its class."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"not an optimizer state: it has the keys {sorted(state_dict)}")
    saved = scalars_of(entries(state_dict))
    if not saved:
        keys = sorted({key for entry in entries(state_dict) for key in entry})
        raise ValueError(
            f"this is not the state of {optimizer} (a parameter's keys are {keys}): load it into "
            "the optimizer that saved it"
        )
    if saved["format"] != FORMAT:
        raise ValueError(
            f"the state has format {saved['format']}, this version of stormplus reads "
            f"{FORMAT}: load it with the version that saved it"
        )
    theirs = json.loads(bytes(saved["identity"].tolist()))
    ours = json.loads(json.dumps(identity))
    for key in ours | theirs:
        if theirs.get(key) != ours.get(key):
            word = key.removeprefix("rule.")
            raise ValueError(
                f"the state was saved with {word}={theirs.get(key)!r}, {optimizer} has "
                f"{word}={ours.get(key)!r}: construct the optimizer as it was"
            )


def check_complete(
    state_dict: State,
    defaults: Mapping[str, Any],
    kinds: list[tuple[Tensor, dict[str, BufferKind]]],
) -> None:
    """Raise if a state lacks options of the groups or buffers of the parameters' shapes."""
    for group in state_dict["param_groups"]:
        missing = defaults.keys() - group.keys() - {"differentiable"}  # torch adds it by loading
        if missing:
            raise ValueError(
                f"a parameter group of the state has no {', '.join(sorted(missing))}: load it with "
                "the version of stormplus that saved it"
            )
    saved = entries(state_dict)
    evaluations = int(scalars_of(saved)["grad_evaluations"])
    if evaluations and not any(entry.get("initialized") for entry in saved):
        raise ValueError(
            "the state was loaded in part: torch.distributed.checkpoint passes over numbers in "
            "opt.state_dict(); save and load what its get_state_dict(model, opt) returns"
        )
    for i, (entry, (p, buffers)) in enumerate(zip(saved, kinds)):
        for name in buffers.keys() & entry.keys() if p.requires_grad else ():
            if tuple(entry[name].shape) != buffers[name].shape_for(p):
                raise ValueError(
                    f"the state of parameter {i} has the shape {tuple(entry[name].shape)}, the "
                    f"parameter {tuple(p.shape)}: load it with the model that it was saved with"
                )
