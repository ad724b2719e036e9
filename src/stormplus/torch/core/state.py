"""What is remembered between steps, in a form that survives a checkpoint.

A parameter's state has its buffers, which are of its size, and `joined`. All other numbers are of
the run: vectors with one entry per bucket, integers, and bytes. They are one dictionary of the
optimizer's, and stand as `run` in the state of the last trainable parameter, the one place that
torch's own loader and its distributed checkpoint both keep. Among them are a format number and
the *identity*: what the optimizer was constructed with, so that no other can load it.

Torch's loader casts every tensor of a state to its parameter's dtype and takes strings apart, and
its distributed checkpoint knows tensors and numbers only. So the identity is text in bytes, and a
saved state is put back as it was saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stormplus.rules import sample_stride

State = dict[str, Any]
Numbers: TypeAlias = npt.NDArray[np.float64]  # one for each bucket

FORMAT = 2
JOINED, WAITING, FROZEN = 1, 0, -1  # `joined`: has buffers in use, has had no gradient, is frozen

_ROOM = 1024  # the identity is padded: the distributed checkpoint loads into tensors of one size

_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32 for half precision: in bf16 the factor 1 - 1e-3 is 1, and d never decays."""
    return _WIDE.get(dtype, dtype)


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Float64 where the device has it; `rules.Sum` compensates where it has not."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Buffer:
    """What kind of tensor a parameter has in its state, under one name.

    Attributes:
        wide: As precise as the parameter, or float32 if that is in half precision.
        dtype: Instead, this one.
        half_only: Only parameters in half precision have it.
        sampled: It has one element for each sampled coordinate (`rules.sample_stride`), the same
            on every process, instead of one for each element.
    """

    wide: bool = True
    dtype: torch.dtype | None = None
    half_only: bool = False
    sampled: bool = False

    def dtype_for(self, p: Tensor) -> torch.dtype:
        """Of this buffer of p."""
        dtype = self.dtype or (wide_dtype(p.dtype) if self.wide else p.dtype)
        return dtype.to_real() if self.sampled and dtype.is_complex else dtype

    def shape_for(self, p: Tensor) -> tuple[int, ...]:
        """Of this buffer of p."""
        if not self.sampled:
            return tuple(p.shape)
        size = p.numel() * (2 if p.is_complex() else 1)
        return (-(-size // sample_stride(size)),)

    def place(self, p: Tensor, state: State, name: str) -> None:
        """Make it, or lay it out as p is now: unfrozen, moved or rearranged by `.to()`."""
        if self.half_only and wide_dtype(p.dtype) == p.dtype:
            state.pop(name, None)
            return
        buffer: Tensor | None = state.get(name)
        dtype = self.dtype_for(p)
        if buffer is not None:
            if tuple(buffer.shape) != self.shape_for(p):
                raise ValueError(
                    f"a parameter has the shape {tuple(p.shape)} now, and a state of the shape "
                    f"{tuple(buffer.shape)}: it was resized. Begin anew, with opt.reset() or a new "
                    "optimizer, or give the new parameter as such, with opt.add_param_group()"
                )
            if not self.sampled and buffer.stride() != p.stride():  # channels_last, say, or no more
                state[name] = torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(buffer)
            elif buffer.device != p.device or buffer.dtype != dtype:
                state[name] = buffer.to(p.device, dtype)
        elif self.sampled:
            state[name] = torch.zeros(self.shape_for(p), dtype=dtype, device=p.device)
        else:
            state[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)


Buffers = Mapping[str, Buffer]


def encoded(identity: Mapping[str, Any]) -> Tensor:
    """An optimizer's identity as bytes."""
    text = json.dumps(identity).encode()
    return torch.tensor(list(text.ljust(-(-len(text) // _ROOM) * _ROOM)), dtype=torch.uint8)


def copied(run: State, device: torch.device) -> State:
    """The numbers of a run on a device, as precise as they were."""
    run = dict(run)
    for key, value in run.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            run[key] = value.to(device, accumulator_dtype(device), copy=True)
        elif isinstance(value, Tensor):
            run[key] = value.cpu().clone()
    return run


def ids(state_dict: State) -> list[Any]:
    """The keys of the parameters' states, in the order of the parameters."""
    return [i for group in state_dict["param_groups"] for i in group["params"]]


def run_of(state_dict: State) -> State | None:
    """The numbers of the run in a saved state."""
    return next((e["run"] for e in state_dict["state"].values() if "run" in e), None)


def check_loadable(
    state_dict: State, run: State, buckets: int, identity: Mapping[str, Any], name: str
) -> None:
    """Refuse a state that an optimizer cannot go on from, before anything has changed.

    Args:
        state_dict: What `load_state_dict` received.
        run: The optimizer's own numbers.
        buckets: How many sets of them it has.
        identity: The optimizer's own.
        name: The optimizer's class.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"not an optimizer state: it has the keys {sorted(state_dict)}")
    saved = run_of(state_dict)
    if saved is None:
        entries = list(state_dict["state"].values())
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
    theirs = json.loads(bytes(saved["identity"].tolist()))
    ours = json.loads(json.dumps(identity))
    for key in ours | theirs:
        if theirs.get(key) != ours.get(key):
            word = key.removeprefix("rule.")
            raise ValueError(
                f"the state was saved with {word}={theirs.get(key)!r}, {name} has "
                f"{word}={ours.get(key)!r}: construct the optimizer as it was"
            )
    if lacking := sorted(run.keys() - saved.keys()):
        raise ValueError(
            f"the state of {name} has no {', '.join(lacking)}: load it with the version of "
            "stormplus that saved it"
        )
    if len(saved["step"]) != buckets:
        raise ValueError(
            f"the state has {len(saved['step'])} sets of sums, {name} has {buckets}: give it the "
            "same parameters and groups"
        )


def check_shapes(state_dict: State, params: list[Tensor], buffers: Buffers) -> None:
    """Refuse buffers that are of another model."""
    for i, p in zip(ids(state_dict), params):
        entry = state_dict["state"].get(i, {})
        for name in buffers.keys() & entry.keys():
            if tuple(entry[name].shape) != buffers[name].shape_for(p):
                raise ValueError(
                    f"the state of parameter {i} has the shape {tuple(entry[name].shape)}, the "
                    f"parameter {tuple(p.shape)}: load it with the model that it was saved with"
                )


def check_groups(state_dict: State, defaults: Mapping[str, Any]) -> None:
    """Refuse groups that lack an option: they would fail at the next step."""
    for i, group in enumerate(state_dict["param_groups"]):
        missing = defaults.keys() - group.keys() - {"differentiable"}  # torch adds it by loading
        if missing:
            raise ValueError(
                f"parameter group {i} of the state has no {', '.join(sorted(missing))}: load a "
                "state that this version of the optimizer has saved, or add what is missing"
            )


def restored(entry: State, p: Tensor, buffers: Buffers) -> State:
    """A parameter's own part of a saved entry, as it was: torch has cast it to p's dtype."""
    state: State = {"joined": WAITING} | {k: v for k, v in entry.items() if k != "run"}
    for name, value in state.items():
        if isinstance(value, Tensor):
            dtype = buffers[name].dtype_for(p) if name in buffers else value.dtype
            state[name] = value.to(p.device, dtype, copy=True)
    return state
