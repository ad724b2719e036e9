"""What differs between the versions of other libraries, and nothing else.

Each entry names the version that makes it superfluous: it goes when that is the floor in
pyproject.toml. No framework is imported before a function is called.
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
    """The first two numbers of a version: (2, 13) for "2.13.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version(name))[:2]))


def version_increment() -> Callable[[list[Tensor]], None]:
    """What tells autograd that tensors were written to. torch 2.5 takes them all at once."""
    from torch.autograd.graph import increment_version

    if release("torch") >= (2, 5):
        return increment_version

    def one_by_one(tensors: list[Tensor]) -> None:
        for t in tensors:
            increment_version(t)

    return one_by_one


def part_names(group: dict[str, Any]) -> None:
    """Part `named_parameters()` into parameters and names. torch 2.6 does so itself."""
    from torch import Tensor

    if release("torch") >= (2, 6) or isinstance(group["params"], (Tensor, set)):
        return
    params = group["params"] = list(group["params"])
    if params and all(isinstance(p, tuple) for p in params):
        group["param_names"], group["params"] = map(list, zip(*params))


def explicit_mesh(array: jax.Array) -> Any:
    """The mesh whose explicit axes lie over an array, or None. jax 0.6 can always say."""
    import jax

    if not hasattr(jax, "typeof"):
        return None
    sharding = jax.typeof(array).sharding
    return sharding.mesh if any(sharding.spec) else None


def barrier() -> Callable[[Any], Any]:
    """What keeps the compiler from sharing work across it, if it can be differentiated.

    jax 0.6 has derivatives for it. Without one it is nothing, at the price of some memory.
    """
    import jax

    return jax.lax.optimization_barrier if release("jax") >= (0, 6) else lambda tree: tree


def clip_gradients(trainer: Any, model: Any) -> None:
    """As `transformers.Trainer` does; it unscales too. transformers 5.3 has a method for it."""
    if hasattr(trainer, "_clip_grad_norm"):
        trainer._clip_grad_norm(model)
    else:
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)


def order_is_drawn_again(trainer: Any) -> bool:
    """Whether a resumed epoch of Lightning's draws its order twice. Lightning 2.5.3 does not."""
    return not hasattr(trainer.fit_loop, "is_resuming")
