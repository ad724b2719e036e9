"""Checks of what users pass in: options, parameters, gradients and closures."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable
from numbers import Real
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from stormplus.torch._rng import is_expanded
from stormplus.torch._sharding import norm_groups
from stormplus.torch._tensors import parameter_name

# Modules of wrappers that construct an optimizer on a part of the parameters.
_SPLITTERS = ("zero_redundancy_optimizer", "optimizer", "apply_optimizer_in_backward")
_PACKAGE = "torch.distributed.optim."


def check_options(group: dict[str, Any]) -> None:
    """Raise if the options that all optimizers have, or the parameters, make no sense."""
    lr, decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got the shape {tuple(lr.shape)}")
    if not (isinstance(lr, (Real, Tensor)) and 0 <= float(lr) < math.inf):
        raise ValueError(f"lr must be a finite number, at least 0, got {lr!r}; the default is 1.0")
    if not (isinstance(decay, Real) and 0 <= float(decay) < math.inf):
        raise ValueError(f"weight_decay must be a finite number, at least 0, got {decay!r}")
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


def check_whole(params: Iterable[Tensor]) -> None:
    """Raise if the parameters are only a part of a model, as far as that can be seen."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # only the caller distinguishes a part from a whole
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_PACKAGE) and module.removeprefix(_PACKAGE) in _SPLITTERS:
            raise RuntimeError(
                f"{module} gives the optimizer a part of the parameters, whose norms would be "
                "wrong: use torch.distributed.fsdp.fully_shard, which shards the state too"
            )
        frame = frame.f_back
    for p in params:
        norm_groups(p)


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


def closure_needed(opt: object) -> str:
    """Return the error message for a `step()` without a closure."""
    return (
        f"{type(opt).__name__} takes the gradient twice on the same sample; step() needs a closure:"
        "\n    def closure():\n"
        "        opt.zero_grad(); loss = loss_fn(model(x), y); loss.backward(); return loss\n"
        "    opt.step(closure)\n"
        "Instead: opt.move() and opt.estimate(); with a GradScaler stormplus.scaled_step; in a "
        "trainer stormplus.integrations."
    )


def require_pairs(opt: object, what: str, instead: str = "opt.step()") -> None:
    """Raise if an optimizer takes one gradient per step."""
    from stormplus.torch.storm import PairedOptimizer

    if not isinstance(opt, PairedOptimizer):
        raise ValueError(
            f"{type(opt).__name__} takes one gradient per step: {what} is not needed, call "
            f"{instead} as usual"
        )


NO_LR = (
    "Untuned() accepts only params positionally; it has no learning rate, and Adam's 1e-3 would "
    "all but stop the run. Leave it out; a scheduler multiplies param_groups[...]['lr'], which is "
    "1.0, and a group may have a `factor` of its own"
)


def without_lr(init: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor say what to do instead of passing a learning rate."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > 1 or {"lr", "learning_rate"} & kwargs.keys():
            raise TypeError(NO_LR)
        init(self, *args, **kwargs)

    return checked
