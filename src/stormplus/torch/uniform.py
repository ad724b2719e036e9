"""`UniformIterate`: the paper's output, a point uniform over x_1, ..., x_T."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stormplus.torch._sharding import reshard


class UniformIterate:
    """Keeps one point, uniform over all points seen, by reservoir sampling.

    Call `update()` after every step: the first step does not move the parameters, so after step t
    they are at x_t. The choice comes from a generator of its own: the global random stream is
    untouched, and all ranks of a distributed run keep the same iterate.

    Args:
        module_or_params: A module (its buffers are kept with the parameters), or parameters.
        seed: Of the choice. The same on all ranks.
    """

    def __init__(self, module_or_params: nn.Module | Iterable[Tensor], seed: int = 0) -> None:
        self._source = module_or_params
        if not isinstance(module_or_params, nn.Module):
            self._source = list(module_or_params)
        self._kept = self._point()
        if not self._kept:
            raise ValueError("UniformIterate got no parameters")
        self.seed, self.count, self.chosen = int(seed), 0, 0  # `chosen` counts from 1
        self._generator = torch.Generator().manual_seed(self.seed)

    def _point(self) -> list[Tensor]:
        return [t.detach().clone() for t in _tensors(self._source)]

    def update(self) -> bool:
        """Take note of the present point; True if it is now the one kept."""
        self.count += 1
        # Alg. 1, line 8: iterate t replaces the one kept with probability 1/t.
        # On the CPU as the generator is, whatever torch.set_default_device says.
        drawn = torch.randint(self.count, (1,), generator=self._generator, device="cpu")
        if int(drawn) > 0:
            return False
        self.chosen, self._kept = self.count, self._point()
        return True

    @torch.no_grad()
    def copy_to(self, target: nn.Module | Iterable[Tensor] | None = None) -> None:
        """Write the kept point into `target`, by default where it was taken from."""
        if self.count == 0:
            raise RuntimeError("no iterate yet: call update() after every step")
        targets = _tensors(self._source if target is None else target)
        if [t.shape for t in targets] != [t.shape for t in self._kept]:
            raise ValueError("the target's parameters and buffers differ in number or shape")
        for theirs, mine in zip(targets, self._kept):
            theirs.copy_(mine)

    def state_dict(self) -> dict[str, Any]:
        numbers = {"seed": self.seed, "count": self.count, "chosen": self.chosen}
        return numbers | {"kept": list(self._kept), "generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = state_dict["kept"]
        if [t.shape for t in kept] != [t.shape for t in self._kept]:
            raise ValueError("the saved iterate has other shapes than this model")
        self._kept = [saved.to(mine, copy=True) for mine, saved in zip(self._kept, kept)]
        self.seed, self.count, self.chosen = (state_dict[k] for k in ("seed", "count", "chosen"))
        self._generator.set_state(state_dict["generator"].cpu())


def _tensors(source: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    reshard()  # a root of FSDP2 that is gathered has other tensors, and sees no writing to its own
    if isinstance(source, nn.Module):  # it may have replaced its buffers since
        return [*source.parameters(), *source.buffers()]
    return list(source)
