"""Making both evaluations of a step see the same sample, and count it once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from stormplus.torch.optimizer import StormOptimizer


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

    def pack(self) -> Tensor:
        """All of it as bytes in one tensor, for a checkpoint."""
        return torch.cat(self._states)

    def unpack(self, packed: Tensor) -> None:
        sizes = [state.numel() for state in self._states]
        if packed.numel() != sum(sizes):
            raise RuntimeError(
                f"the checkpoint holds {packed.numel()} bytes of random state, this process "
                f"has {sum(sizes)}: resume with the same devices and generators"
            )
        self._states = list(torch.split(packed.cpu(), sizes))


class same_sample:
    """One sample, two evaluations: random numbers replayed, running statistics moved once.

    As a context around one step, for `move()`/`estimate()` loops and for `step(closure)`:

        with same_sample(opt, model):
            loss_fn(model(x), y).backward()
            opt.move()
            opt.zero_grad()
            loss_fn(model(x), y).backward()
            opt.estimate()

    or around a closure: `opt.step(same_sample(opt, model)(closure))`. Enter it after the
    sample has been drawn.

    All buffers of the model are put back after the first evaluation, so that the second
    one, at the new point, is the one that counts.

    Args:
        opt: One of the optimizers.
        model: The module whose buffers are to be kept; None if it has no running
            statistics.
    """

    def __init__(self, opt: StormOptimizer, model: nn.Module | None = None) -> None:
        self._opt, self._model = opt, model

    def __call__(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            first = self._opt.started and not self._opt.pending
            buffers = self._buffers() if first else []
            loss = closure()
            _put_back(buffers)
            return loss

        return evaluate

    def __enter__(self) -> Self:
        self._streams = self._opt._random_streams()
        if self._opt.pending:  # resumed from a checkpoint between the two evaluations
            self._streams.unpack(self._opt._home["rng"])
            self._streams.rewind()
        else:
            self._opt._home["rng"] = self._streams.pack()
        self._saved = self._buffers()
        self._opt._between.append(self._rewind)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opt._between.remove(self._rewind)
        self._saved = []

    def _rewind(self) -> None:
        if self._opt._options.replay_rng:
            self._streams.rewind()
        _put_back(self._saved)

    def _buffers(self) -> list[tuple[Tensor, Tensor]]:
        if self._model is None:
            return []
        return [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]


@torch.no_grad()
def _put_back(buffers: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, saved in buffers:
        buffer.copy_(saved)
