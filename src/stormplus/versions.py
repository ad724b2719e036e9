"""What differs between the versions of other libraries, and nothing else.

Each entry names the version that makes it superfluous: it goes when that is the floor in
pyproject.toml. No framework is imported before a function is called.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    from torch import Tensor


@cache
def release(name: str) -> tuple[int, ...]:
    """The first two numbers of a version: (2, 13) for "2.13.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version(name))[:2]))


def increment_version(tensors: list[Tensor]) -> None:
    """Tell autograd that these were written to. torch 2.5 takes them all at once."""
    from torch.autograd.graph import increment_version

    for argument in [tensors] if release("torch") >= (2, 5) else tensors:
        increment_version(argument)


def part_names(group: dict[str, Any]) -> None:
    """Part `named_parameters()` into parameters and names. torch 2.6 does so itself."""
    from torch import Tensor

    if release("torch") >= (2, 6) or isinstance(group["params"], (Tensor, set)):
        return
    params = group["params"] = list(group["params"])
    if params and all(isinstance(p, tuple) for p in params):
        group["param_names"], group["params"] = map(list, zip(*params))


def explicitly_sharded(array: jax.Array) -> bool:
    """Whether axes of a mesh with explicit axes lie over an array. jax 0.6 can always say."""
    import jax

    return hasattr(jax, "typeof") and any(jax.typeof(array).sharding.spec)


def clip_gradients(trainer: Any, model: Any) -> None:
    """As `transformers.Trainer` does; it unscales too. transformers 5.3 has a method for it."""
    if hasattr(trainer, "_clip_grad_norm"):
        trainer._clip_grad_norm(model)
    else:
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
