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

    @property
    def size(self) -> int:
        return sum(state.numel() for state in self._states)

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
            if buffer is not None and value is not None and not _expanded(buffer):
                buffer.copy_(value)
            buffers[name] = buffer  # a module may have put another tensor in its place


def _expanded(t: Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape))


def require_pairs(opt: object, what: str, instead: str = "opt.step()") -> None:
    """Refuse to make pairs of gradients for an optimizer that takes one."""
    from stormplus.torch.optimizer import takes_pairs  # which imports this module

    if not takes_pairs(opt):
        raise ValueError(
            f"{type(opt).__name__} takes one gradient a step: {what} is not needed, call "
            f"{instead} as usual"
        )


class same_sample:
    """One sample, two evaluations: random numbers replayed, running statistics moved once.

    Around a closure:

        opt.step(same_sample(opt, model)(closure))

    or around one step, for loops that own their backward passes (enter it after the sample
    has been drawn):

        with same_sample(opt, model):
            if opt.started and not opt.pending:
                backward()
                opt.move()
            backward()
            opt.estimate()

    After the first evaluation all buffers of the model are put back, so that the second
    one, at the new point, is the one that counts; modules are neither frozen nor switched
    to eval. An evaluation that fails, or is not finite, leaves them as they were. If the
    optimizer was loaded from a checkpoint made between the two
    evaluations, the random streams start where that sample's did.

    Args:
        opt: One of the optimizers.
        model: The module with the running statistics; None if there is none.
    """

    def __init__(self, opt: StormOptimizer, model: nn.Module | None = None) -> None:
        require_pairs(opt, "same_sample")
        self._opt, self._model = opt, model

    def __call__(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            statistics = RunningStatistics(self._model)
            counts = not self._opt.started or self._opt.pending  # the sample's last evaluation
            try:
                loss = closure()
            except BaseException:
                counts = False
                raise
            finally:
                if counts:
                    self._opt._statistics = statistics  # put back if the estimate fails
                else:
                    statistics.put_back()
            return loss

        return evaluate

    def __enter__(self) -> Self:
        self._entry = self._streams = self._opt._random_streams()
        replay = self._opt._options.replay and bool(self._opt._home["rng"].any())
        if self._opt.pending and replay:
            self._streams = self._opt._random_streams()
            self._streams.unpack(self._opt._home["rng"])
            self._streams.rewind()
        elif not self._opt.pending:
            self._opt._home["rng"] = self._streams.pack()
        self._statistics = RunningStatistics(self._model)
        self._opt._samples.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opt._samples.remove(self)
        if kind is not None:
            self.put_back()

    def rewind(self) -> None:
        """Back to where the sample began; `opt.move()` calls it inside the context."""
        if self._opt._options.replay:
            self._streams.rewind()
        self.put_back()

    def abandon(self) -> None:
        """The pending sample is given up: `opt.restart()` calls it inside the context."""
        if self._streams is not self._entry:
            self._entry.rewind()

    def put_back(self) -> None:
        """Undo what the evaluation did to running statistics."""
        self._statistics.put_back()
