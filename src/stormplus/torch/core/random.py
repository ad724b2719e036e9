"""What an evaluation changes beside the gradients: random streams, and a model's buffers."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PATIENCE = 60.0  # seconds, before `pair_lock` says what it waits for
_LOCK = threading.RLock()


@contextmanager
def pair_lock() -> Iterator[None]:
    """What a pair is evaluated under, from its first random number to its last.

    torch's random streams belong to the process, and a pair plays a piece of them twice. So pairs
    in two threads take turns, and a thread that draws beside them does so under this lock:

        with stormplus.pair_lock():
            noise = torch.randn(8)

    or from a `torch.Generator` of its own, without it. A closure must not wait for a thread that
    waits for the lock. Who holds it may take it again.
    """
    if not _LOCK.acquire(timeout=PATIENCE):
        warnings.warn(
            f"another thread has been inside a pair for {PATIENCE:g} seconds, and this one waits "
            "for it. If that one waits for this one, draw from a torch.Generator of your own, or "
            "construct optimizers whose closures draw nothing with replay_rng=False",
            RuntimeWarning,
            stacklevel=3,
        )
        _LOCK.acquire()
    try:
        yield
    finally:
        _LOCK.release()


class RandomStreams:
    """Where torch's random streams stand, so that they can be played again.

    The CPU's, those of `devices`, and generators of the user's own.
    """

    def __init__(
        self, devices: Iterable[torch.device], generators: tuple[torch.Generator, ...]
    ) -> None:
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self._generators = generators
        self._states = [
            torch.get_rng_state(),
            *(torch.get_device_module(d).get_rng_state(d) for d in self._devices),
            *(generator.get_state() for generator in generators),
        ]

    def rewind(self) -> None:
        cpu, *others = self._states
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, others):
            torch.get_device_module(device).set_rng_state(state, device)
        for generator, state in zip(self._generators, others[len(self._devices) :]):
            generator.set_state(state)

    @property
    def size(self) -> int:
        return sum(state.numel() for state in self._states)

    def pack(self) -> Tensor:
        """All of it as bytes in one tensor, for a checkpoint."""
        return torch.cat(self._states)

    def unpack(self, packed: Tensor) -> None:
        """Take the place of these streams from what `pack` has made."""
        sizes = [state.numel() for state in self._states]
        if packed.numel() != sum(sizes):
            raise RuntimeError(
                f"the checkpoint holds {packed.numel()} bytes of random state, this process "
                f"has {sum(sizes)}: resume with the same devices and generators"
            )
        self._states = list(torch.split(packed.cpu(), sizes))


class RunningStatistics:
    """The buffers of a model as they stand, so that they can be put back."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else model.modules()
        self._saved = [
            (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for buffers, name, buffer, value in self._saved:
            # An expanded buffer shares memory between its elements: nobody can have written it.
            if buffer is not None and value is not None and not is_expanded(buffer):
                buffer.copy_(value)
            buffers[name] = buffer  # a module may have put another tensor in its place


def is_expanded(t: Tensor) -> bool:
    """Whether elements share memory."""
    return t.numel() > 0 and any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape))
