"""Errors and warnings about what users pass in: options, parameters and gradients."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from stormplus.torch._sharding import local, norm_groups
from stormplus.torch._tensors import accumulator_dtype
from stormplus.trainers import stack_frames

# Modules of wrappers that construct an optimizer on a part of the parameters.
_SPLITTERS = tuple(
    f"torch.distributed.optim.{name}"
    for name in ("zero_redundancy_optimizer", "optimizer", "apply_optimizer_in_backward")
)


def check_number(name: str, value: Any) -> None:
    """Raise unless an option is a finite number, at least 0."""
    if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
        raise ValueError(f"{name} must be a finite number, at least 0, got {value!r}")


def check_group(group: dict[str, Any]) -> None:
    """Raise if the options that all optimizers have, or the parameters, make no sense."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got the shape {tuple(lr.shape)}")
    check_number("lr", float(lr) if isinstance(lr, Tensor) else lr)
    for name in {"weight_decay", "factor"} & group.keys():
        check_number(name, group[name])
    for p in group["params"]:
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(f"parameters must be floating point or complex, got {p.dtype}")
        if p.layout != torch.strided:
            raise TypeError(f"parameters must be dense, got layout {p.layout}: call to_dense()")
        if p.is_conj() or p.is_neg() or is_expanded(p):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is a conjugate, negative or expanded view: "
                "clone() it, or optimize what it is a view of"
            )
        norm_groups(p)  # raises if it is only a piece
    for frame in stack_frames():  # only the caller distinguishes a part of a model from a whole
        module = frame.f_globals.get("__name__", "")
        if module in _SPLITTERS:
            raise RuntimeError(
                f"{module} gives the optimizer a part of the parameters, whose norms would be "
                "wrong: use torch.distributed.fsdp.fully_shard, which shards the state too"
            )


def is_expanded(t: Tensor) -> bool:
    """Return whether elements share memory."""
    return t.numel() > 0 and any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape))


def reject_gradient(groups: list[dict[str, Any]], p: Tensor, g: Tensor) -> NoReturn:
    """Raise because a gradient is sparse or has another shape than its parameter."""
    name = parameter_name(groups, p)
    if g.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {name} is sparse ({g.layout}), which is not supported: make it "
            "dense, for example with nn.Embedding(..., sparse=False)"
        )
    raise RuntimeError(
        f"the gradient of {name} has the shape {tuple(g.shape)}: it belongs to a parameter that "
        "was resized since; call opt.zero_grad() before the backward pass"
    )


def parameter_name(groups: list[dict[str, Any]], p: Tensor) -> str:
    """Return how to call a parameter in a message."""
    for i, group in enumerate(groups):
        for j, q in enumerate(group["params"]):
            if q is p:
                where = f"parameter {j} of group {i}"
                named = group.get("param_names")
                if named and len(named) == len(group["params"]):  # else it was edited by hand
                    return f"{where} ('{named[j]}')"
                return f"{where}, shape {tuple(p.shape)}"
    raise KeyError("not a parameter of this optimizer")


def describe_nonfinite(groups: list[dict[str, Any]]) -> str:
    """Return which gradient is not finite, by name."""
    for p in (p for group in groups for p in group["params"]):
        if p.requires_grad and p.grad is not None:
            g = local(p.grad).to(accumulator_dtype(p.grad.device))
            if not bool(torch.isfinite(torch.linalg.vector_norm(g) ** 2)):
                name = parameter_name(groups, p)
                return f"the squared norm of the gradient of {name} is not finite"
    return (
        "a squared norm or a sum of them is not finite: of a gradient on another process, of a "
        "parameter under weight decay, or of the estimator"
    )


def warn(message: str) -> None:
    """Warn with the user's line."""
    level = 1
    for frame in stack_frames():
        if frame.f_globals["__name__"].split(".")[0] not in ("stormplus", "torch"):
            break
        level += 1
    warnings.warn(message, stacklevel=level)


NO_LR = (
    "Untuned has no learning rate, and Adam's 1e-3 would all but stop the run. Leave it out; a "
    "scheduler multiplies param_groups[...]['lr'], which is 1.0, and a group may have its own "
    "`factor`"
)


def reject_lr(init: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor raise for a learning rate, with what to do instead."""

    @functools.wraps(init)
    def checked(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        if args or {"lr", "learning_rate"} & kwargs.keys():
            raise TypeError(f"{NO_LR}. A trainer that passes one needs stormplus.integrations")
        init(self, params, **kwargs)

    return checked
