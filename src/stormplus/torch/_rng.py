"""Random streams that the second evaluation of a pair replays, and a check that it was made."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
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
    """A snapshot of random streams: the CPU's, the devices', and the user's generators."""

    def __init__(
        self, devices: Iterable[torch.device], generators: tuple[torch.Generator, ...]
    ) -> None:
        # Without devices whose random state torch cannot read, as XLA's.
        modules = [(device, getattr(torch, device.type, None)) for device in devices]
        self._modules: list[tuple[torch.device, Any]] = [
            (device, module)
            for device, module in modules
            if device.type not in ("cpu", "meta") and hasattr(module, "get_rng_state")
        ]
        self._generators = generators
        self._states = [
            torch.get_rng_state(),
            *(module.get_rng_state(device) for device, module in self._modules),
            *(generator.get_state() for generator in generators),
        ]

    def rewind(self) -> None:
        """Set the streams back to the snapshot."""
        cpu, *others = self._states
        torch.set_rng_state(cpu)
        for (device, module), state in zip(self._modules, others):
            module.set_rng_state(state, device)
        for generator, state in zip(self._generators, others[len(self._modules) :]):
            generator.set_state(state)

    def pack(self) -> Tensor:
        """Return the snapshot as bytes in one tensor, for a checkpoint."""
        return torch.cat(self._states)

    def unpack(self, packed: Tensor) -> None:
        """Replace the snapshot by one that `pack` has returned."""
        sizes = [state.numel() for state in self._states]
        if packed.numel() != sum(sizes):
            raise RuntimeError(
                f"the checkpoint holds {packed.numel()} bytes of random state, this process "
                f"has {sum(sizes)}: resume with the same devices and generators"
            )
        # Clones: Generator.set_state crashes on a view with an offset (torch 2.13).
        self._states = [piece.clone() for piece in torch.split(packed.cpu(), sizes)]


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


class RandomReplay:
    """What a paired optimizer knows about the random streams of its evaluations."""

    _replay_rng: Generators | None
    _shared_state: dict[str, Any]
    param_groups: list[dict[str, Any]]

    @property
    def replays_rng(self) -> bool:
        """Whether both evaluations are to see the same random numbers."""
        return self._replay_rng is not None

    def lock(self) -> AbstractContextManager[Any]:
        """Return the context in which a pair is evaluated; an empty one if no stream is rewound."""
        return pair_lock() if self.replays_rng else nullcontext()

    def random_streams(self) -> RandomStreams:
        """Return a snapshot of the random streams that an evaluation may draw from."""
        devices = dict.fromkeys(p.device for group in self.param_groups for p in group["params"])
        return RandomStreams(devices, self._replay_rng or ())

    @property
    def pending_streams(self) -> Tensor | None:
        """Where the random streams of the pending sample began, packed; None if unknown."""
        packed: Tensor = self._shared_state["rng"]
        return packed if bool(packed.any()) else None

    @pending_streams.setter
    def pending_streams(self, packed: Tensor | None) -> None:
        rng = self._shared_state["rng"]
        if packed is None:
            rng.zero_()
        elif packed.shape == rng.shape:
            rng.copy_(packed)
        else:
            self._shared_state["rng"] = packed  # of other devices


class FreshGradients:
    """Checks that an evaluation has written a gradient since this was made.

    Trainers that step without a closure may pass an empty one: both gradients would silently be the
    same tensor. The references are weak, so that gradients can be freed.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        grads = ((p, p.grad) for p in params if p.grad is not None)
        self._seen = [(p, TensorWeakRef(g), g._version) for p, g in grads]

    def check(self) -> None:
        if self._seen and all(
            p.grad is not None and p.grad is grad() and p.grad._version == version
            for p, grad, version in self._seen
        ):
            raise RuntimeError(
                "the closure has not computed a gradient in its second call: call backward in it; "
                "with CUDA graphs use move() and estimate(), in a trainer stormplus.integrations"
            )
