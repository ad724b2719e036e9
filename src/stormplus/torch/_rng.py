"""Random streams that the second evaluation of a pair replays, and whether it was made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

_LOCK = threading.RLock()


def pair_lock() -> AbstractContextManager[bool]:
    """Return the lock under which a pair is evaluated, from its first random number to its last.

    torch's random streams belong to the process, and a pair replays a piece of them. So pairs in
    two threads take turns, and another thread that draws numbers meanwhile does so under this lock,
    or from a `torch.Generator` of its own. The lock is reentrant. A closure must not wait for a
    thread that waits for the lock.
    """
    return _LOCK


class RandomStreams:
    """A snapshot of random streams: the CPU's, the devices', and the user's generators.

    If `generators` is None, the second evaluation draws other numbers: `rewind` does nothing.
    """

    def __init__(self, devices: Iterable[torch.device], generators: Generators | None) -> None:
        self._replay = generators is not None
        all_generators = (torch.default_generator, *(generators or ()))
        self.states = [generator.get_state() for generator in all_generators]
        self._setters: list[Callable[[Tensor], Any]] = [g.set_state for g in all_generators]
        for device in dict.fromkeys(devices):
            module: Any = getattr(torch, device.type, None)
            # XLA has no such function.
            if device.type not in ("cpu", "meta") and hasattr(module, "get_rng_state"):
                self.states.append(module.get_rng_state(device))
                self._setters.append(partial(module.set_rng_state, device=device))

    def rewind(self) -> None:
        """Set the streams back for the second evaluation."""
        if self._replay:
            self.restore()

    def restore(self) -> None:
        """Set the streams back to the snapshot."""
        for set_state, state in zip(self._setters, self.states):
            set_state(state)


class Generators(tuple[torch.Generator, ...]):
    """The user's generators: a copy of an optimizer replays the same ones, not copies of them."""

    def __deepcopy__(self, memo: Any) -> Generators:
        return self


def check_generators(replay_rng: bool | Iterable[torch.Generator]) -> Generators | None:
    """Return the generators to replay besides torch's own; None to replay nothing."""
    if isinstance(replay_rng, bool):
        return Generators() if replay_rng else None
    given = list(replay_rng) if isinstance(replay_rng, Iterable) else [replay_rng]
    for generator in given:
        if not isinstance(generator, torch.Generator):
            raise TypeError(
                f"replay_rng must be True, False or a list of torch.Generator, got {generator!r}"
            )
    return Generators(given)


def gradients_unchanged(params: Iterable[Tensor]) -> Callable[[], bool]:
    """Return a function that returns whether no gradient has been written since this call.

    Trainers that step without a closure may pass an empty one: both gradients would silently be the
    same tensor. The references are weak, so that gradients can be freed.
    """
    grads = ((p, p.grad) for p in params if p.grad is not None)
    before = [(p, TensorWeakRef(g), g._version) for p, g in grads]
    return lambda: (
        bool(before)
        and all(
            p.grad is not None and p.grad is grad() and p.grad._version == version
            for p, grad, version in before
        )
    )
