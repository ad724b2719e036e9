"""State that survives a checkpoint: kinds of buffers, and checks before a state is loaded.

torch's loader casts every tensor of a state to its parameter's dtype and takes strings apart, and
its distributed checkpoint knows tensors and numbers only. So what an optimizer was constructed with
is text in bytes, and a saved state is put back as it was saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stormplus.torch._tensors import State, wide_dtype
from stormplus.untuned_rule import sample_stride

FORMAT = 4
_IDENTITY_SIZE = 1024  # the distributed checkpoint loads into tensors of the same size


@dataclass(frozen=True)
class BufferSpec:
    """What kind of tensor a parameter has in its state, under one name.

    Attributes:
        wide: Float32 for parameters in half precision; else the parameter's dtype.
        dtype: This dtype instead; complex parameters have it as pairs of reals.
        half_only: Only parameters in half precision have it.
        sampled: It has one element per sampled coordinate, the same on every process.
    """

    wide: bool = True
    dtype: torch.dtype | None = None
    half_only: bool = False
    sampled: bool = False

    def dtype_for(self, p: Tensor) -> torch.dtype:
        """Return the dtype of this buffer of p."""
        dtype = self.dtype or (wide_dtype(p.dtype) if self.wide else p.dtype)
        return dtype.to_real() if self.sampled and dtype.is_complex else dtype

    def shape_for(self, p: Tensor) -> tuple[int, ...]:
        """Return the shape of this buffer of p."""
        if self.sampled:
            size = p.numel() * (2 if p.is_complex() else 1)
            return (-(-size // sample_stride(size)),)
        pairs = p.is_complex() and not self.dtype_for(p).is_complex
        return (*p.shape, 2) if pairs else tuple(p.shape)

    def place(self, p: Tensor, state: State, name: str) -> None:
        """Make the buffer, or adapt it to p's present device, dtype and layout."""
        if self.half_only and wide_dtype(p.dtype) == p.dtype:
            state.pop(name, None)
            return
        buffer: Tensor | None = state.get(name)
        dtype, shape = self.dtype_for(p), self.shape_for(p)
        if buffer is None:
            if shape == tuple(p.shape) and not self.sampled:
                state[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
            else:
                state[name] = torch.zeros(shape, dtype=dtype, device=p.device)
            return
        if tuple(buffer.shape) != shape:
            raise ValueError(
                f"a parameter has the shape {tuple(p.shape)}, and a state of the shape "
                f"{tuple(buffer.shape)}: it was resized. Call opt.reset() to start over"
            )
        if shape == tuple(p.shape) and not self.sampled and buffer.stride() != p.stride():
            state[name] = torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(buffer)
        elif buffer.device != p.device or buffer.dtype != dtype:
            state[name] = buffer.to(p.device, dtype)


def encode(identity: Mapping[str, Any]) -> Tensor:
    """Return an optimizer's identity as bytes."""
    text = json.dumps(identity).encode()
    size = -(-len(text) // _IDENTITY_SIZE) * _IDENTITY_SIZE
    return torch.tensor(list(text.ljust(size)), dtype=torch.uint8, device="cpu")


def ids(state_dict: State) -> list[Any]:
    """Return the keys of the parameters' states, in the order of the parameters."""
    return [i for group in state_dict["param_groups"] for i in group["params"]]


def scalars_of(state_dict: State) -> State:
    """Return the numbers that all parameters share; {} if there are none."""
    entries = (e for e in state_dict["state"].values() if isinstance(e, dict))
    return next((e["scalars"] for e in entries if "scalars" in e), {})


def copied(scalars: State) -> State:
    """Return `scalars` with tensors of their own."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in scalars.items()}


def check_loadable(state_dict: State, identity: Mapping[str, Any], optimizer: str) -> None:
    """Raise if a state is not that of an optimizer with this identity, by the name of its class."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"not an optimizer state: it has the keys {sorted(state_dict)}")
    saved = scalars_of(state_dict)
    if not saved:
        keys = sorted({key for entry in state_dict["state"].values() for key in entry})
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
    params: list[Tensor],
    buffers: Mapping[str, BufferSpec],
) -> None:
    """Raise if a state lacks options of the groups or buffers of the parameters' shapes."""
    entries = [state_dict["state"].get(i, {}) for i in ids(state_dict)]
    for group in state_dict["param_groups"]:
        missing = defaults.keys() - group.keys() - {"differentiable"}  # torch adds it by loading
        if missing:
            raise ValueError(
                f"a parameter group of the state has no {', '.join(sorted(missing))}: load it with "
                "the version of stormplus that saved it"
            )
    if bool(scalars_of(state_dict)["grad_evaluations"] > 0) and not any(
        entry.get("started") for entry in entries
    ):
        raise ValueError(
            "the state was loaded in part: torch.distributed.checkpoint passes over numbers in "
            "opt.state_dict(); save and load what its get_state_dict(model, opt) returns"
        )
    for i, (entry, p) in enumerate(zip(entries, params)):
        for name in buffers.keys() & entry.keys():
            if tuple(entry[name].shape) != buffers[name].shape_for(p):
                raise ValueError(
                    f"the state of parameter {i} has the shape {tuple(entry[name].shape)}, the "
                    f"parameter {tuple(p.shape)}: load it with the model that it was saved with"
                )


def restored(entry: State, p: Tensor, buffers: Mapping[str, BufferSpec]) -> State:
    """Return a parameter's own part of a saved entry, as it was saved."""
    state: State = {"started": 0} | {k: v for k, v in entry.items() if k != "scalars"}
    for name, value in state.items():
        if isinstance(value, Tensor):
            dtype = buffers[name].dtype_for(p) if name in buffers else value.dtype
            device = p.device if name in buffers else value.device
            state[name] = value.to(device, dtype, copy=True)
    return state
