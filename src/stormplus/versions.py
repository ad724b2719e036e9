"""Differences between versions of other libraries.

Each function names the version that makes it superfluous; remove it when that version is the floor
in pyproject.toml. Frameworks are imported inside the functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    from torch import Tensor


@cache
def release(name: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (2, 13) for "2.13.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version(name))[:2]))


def version_increment() -> Callable[[list[Tensor]], None]:
    """Return the function that bumps version counters of tensors; torch 2.5 accepts a list."""
    from torch.autograd.graph import increment_version

    if release("torch") >= (2, 5):
        return increment_version

    def one_by_one(tensors: list[Tensor]) -> None:
        for t in tensors:
            increment_version(t)

    return one_by_one


def split_named_parameters(group: dict[str, Any]) -> None:
    """Split `named_parameters()` in a group into parameters and names, as torch 2.6 does."""
    from torch import Tensor

    if release("torch") >= (2, 6) or isinstance(group["params"], (Tensor, set)):
        return
    params = group["params"] = list(group["params"])
    if params and all(isinstance(p, tuple) for p in params):
        group["param_names"], group["params"] = map(list, zip(*params))


def explicit_mesh(array: jax.Array) -> Any:
    """Return the mesh of an array with explicit sharding, else None; jax 0.6 has `jax.typeof`."""
    import jax

    if not hasattr(jax, "typeof"):
        return None
    sharding = jax.typeof(array).sharding
    return sharding.mesh if any(sharding.spec) else None


def clip_gradients(trainer: Any, model: Any) -> None:
    """Unscale and clip as `transformers.Trainer` does; transformers 5.3 has a method for it."""
    if hasattr(trainer, "_clip_grad_norm"):
        trainer._clip_grad_norm(model)
    else:
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)


def order_is_drawn_again(trainer: Any) -> bool:
    """Return whether a resumed Lightning epoch draws its order twice; 2.5.3 does not."""
    return not hasattr(trainer.fit_loop, "is_resuming")
