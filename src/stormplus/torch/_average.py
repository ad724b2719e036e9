"""What `Untuned` does besides its step: initial values, checks, and the average of eval()."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from stormplus import untuned_rule as rule
from stormplus.torch._base import BaseOptimizer
from stormplus.torch._checkpoint import entries, scalars_of
from stormplus.torch._checks import parameter_name, warn
from stormplus.torch._sharding import coordinate_count, is_dtensor, local, reshard
from stormplus.torch._tensors import BufferKind, State, TensorGroup, wide_dtype
from stormplus.torch.kernels import plain

_ADAM_LIKE_LR = 0.03  # OneCycleLR(max_lr=1.0) starts at 0.04


class AveragedOptimizer(BaseOptimizer):
    """Parameters y between a fast iterate z and its average x, of which `z_minus_x` is stored."""

    _state_dtype: torch.dtype | None  # of z_minus_x and grad_rms; None: the parameters' precision
    _lr_checked = False
    _compared = 0  # the generation whose parameters were compared with the state
    _left_by_eval: tuple[int, dict[int, int]] = (-1, {})  # the generation, and versions by id

    def _start(self, groups: list[TensorGroup]) -> None:
        """Let tensors that get their first gradient start from where they are."""
        table = self._tensor_table
        indices = sorted(index for tensors in groups for index in tensors.indices)
        infos = [self._infos[i] for i in indices]
        _, mask = table.index_and_mask(indices)
        constants = {
            "size": [info.coordinates.size for info in infos],
            "sample_count": [info.coordinates.count for info in infos],
            "natural_scale": [rule.natural_scale(_inputs(info.p)) for info in infos],
        }
        full_rows = table.scatter(np.array(list(constants.values()), np.float64), indices)
        table.write(dict(zip(constants, full_rows)), mask)
        rows = table.rows
        parts = []
        for tensors in groups:
            # Preallocate: scalars between large temporaries fragment the allocator.
            squares = torch.empty(
                len(tensors.params), dtype=table.tensor.dtype, device=tensors.device
            )
            for i, x in enumerate(tensors.params):
                squares[i] = plain.squared_norm(x)
            parts.append((tensors.process_groups, table.scatter((squares,), tensors.indices)))
        rms = (self._total(parts)[0] / rows["size"]) ** 0.5
        ceiling = rule.distance_ceiling(rms, rows["natural_scale"], table.xp)
        if table.on_host:
            for info in infos:
                if not math.isfinite(ceiling[info.index]):
                    name = parameter_name(self.param_groups, info.p)
                    self._fail(f"{name} is not finite; nothing has moved")
        for tensors in groups:
            for x, z_1, coordinates in zip(
                tensors.params, tensors.initial_sample, tensors.coordinates
            ):
                coordinates.store(x, z_1, tensors.process_groups)
            for x, master in zip(tensors.params, tensors.masters):
                master.copy_(x)
        table.write({"ceiling": ceiling, "distance": rule.initial_distance(ceiling)}, mask)
        self._mark_initialized(groups)

    def _check_lr(self, lrs: list[float]) -> None:
        """Raise if an lr is negative; warn if the first ones look like Adam's learning rate."""
        if min(lrs) < 0:
            raise ValueError(f"lr must be at least 0, got {min(lrs)!r}: a schedule is past its end")
        # A loaded state may belong to the end of a schedule.
        if self._lr_checked or self.generation or torch.compiler.is_compiling() or not max(lrs):
            return
        self._lr_checked = True
        if max(lrs) < _ADAM_LIKE_LR:
            warn(
                f"Untuned has lr={max(lrs):g} in its first step: lr multiplies steps whose size is "
                "found already, and Adam's would all but stop the run. Delete the scheduler or the "
                "line that sets lr, or scale it to 1.0"
            )

    def _compare_with_loaded(self, groups: list[TensorGroup]) -> None:
        """Warn if the parameters are not where the loaded state has left them."""
        self._compared = self.generation
        saved = self._tensor_table.snapshot()
        for tensors in groups:
            for i, index in enumerate(tensors.indices):
                if tensors.is_new or tensors.process_groups:
                    break
                mean = float(plain.squared_displacement(tensors, i)) / tensors.coordinates[i].count
                measured, expected = mean**0.5, float(saved[index]["displacement"])
                if abs(measured - expected) > 1e-4 * max(expected, measured):
                    name = parameter_name(self.param_groups, self._infos[index].p)
                    warn(
                        f"{name} is not where this state left it: load a model that was saved at "
                        "the same moment, and in the same mode (opt.eval() or opt.train()), as the "
                        "optimizer"
                    )
                    return

    @property
    def at_average(self) -> bool:
        """Whether the parameters hold the average: `eval()` was called, and not `train()`."""
        self._refresh()  # a trainer that loads a state may copy its dictionaries
        return bool(self._shared_state["averaged"])

    @torch.inference_mode(False)
    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the parameters: call it before you validate or save a model.

        BatchNorm's running statistics are those of the iterates: call `recalibrate` afterwards.
        Before the first step the parameters stay as they are. Calling it again changes nothing.
        """
        if not self.at_average:
            self._place_state()  # parameters may have been moved or unfrozen
            reshard()
            for info in self._infos:
                p, state = info.p, info.state
                if "z_minus_x" in state:
                    state["iterate"] = p.detach().clone()
                    if state["initialized"]:
                        local(p).copy_(_average(state))
            self._shared_state["averaged"] = 1
        elif self._left_by_eval[0] == self.generation:
            return
        self._left_by_eval = self.generation, {id(p): p._version for p in self.parameters()}

    @torch.no_grad()
    def train(self) -> None:
        """Put the last iterate back, exactly, to continue training.

        A tensor that has had no gradient so far stays as it is.
        """
        if not self.at_average:
            return
        if self.overwritten:
            warn(
                "the parameters were written to after opt.eval(), and opt.train() overwrites that "
                "with the last iterate: load weights before opt.eval() or after opt.train(), or "
                "call opt.reset() to start over from them"
            )
        reshard()
        for info in self._infos:
            iterate: Tensor | None = info.state.pop("iterate", None)
            if iterate is not None and info.state["initialized"]:
                info.p.copy_(iterate)
        self._shared_state["averaged"] = 0

    @property
    @torch.no_grad()
    def overwritten(self) -> bool:
        """Whether the parameters hold other weights than the average that `eval()` has put there.

        A write through `p.data` is not seen: torch does not count it.
        """
        generation, versions = self._left_by_eval
        if not self.at_average or generation != self.generation:
            return False  # a loaded state belongs to whatever is there
        for info in self._infos:
            p, state = info.p, info.state
            if versions.get(id(p), p._version) == p._version or not state["initialized"]:
                continue
            # The same weights again change nothing. Shards are not compared: it matters more that
            # all processes come to the same answer.
            if is_dtensor(p) or not torch.equal(local(p), _average(state).to(local(p))):
                return True
        return False

    def diagnostics(self) -> dict[str, float]:
        """Return where the run stands, in plain floats, with minimum and maximum over the tensors.

        `step` and `distance` are the largest, `step_size` is the mean. Reading waits for the
        device.
        """
        numbers = self._tensor_table.snapshot()
        numbers = [entry for entry in numbers if entry["step"] > 0] or numbers
        summary: dict[str, float] = {}
        for name in ("step", "step_size", "distance"):
            values = [float(entry[name]) for entry in numbers]
            summary[name], summary[f"{name}_min"] = max(values), min(values)
            summary[f"{name}_max"] = max(values)
        summary["step_size"] = sum(float(entry["step_size"]) for entry in numbers) / len(numbers)
        return summary | {"grad_evaluations": float(self.grad_evaluations)}

    def _buffers(self, p: Tensor) -> dict[str, BufferKind]:
        wide = wide_dtype(p.dtype)
        # bfloat16 has no complex numbers: pairs of reals.
        pairs = (*p.shape, 2) if self._state_dtype and p.is_complex() else None
        stored = BufferKind(self._state_dtype or wide, pairs)
        sample = BufferKind(wide.to_real() if wide.is_complex else wide, (coordinate_count(p),))
        kinds = {"z_minus_x": stored, "grad_rms": stored, "initial_sample": sample}
        return kinds if wide == p.dtype else kinds | {"master": BufferKind(wide)}

    def _check_loaded(self, state_dict: State) -> None:
        if scalars_of(state_dict)["averaged"] and any(
            "iterate" not in entry for entry in entries(state_dict) if entry.get("initialized")
        ):
            raise ValueError(
                "the state was saved after eval(), and the iterate that train() puts back is not "
                "in it: torch.distributed.checkpoint loads only what exists already. Call "
                "opt.eval() before you load, or opt.train() before you save"
            )


def _average(state: State) -> Tensor:
    """Return the local part of x, from the iterate that `eval()` keeps."""
    master = state.get("master")
    y = plain.full_precision(local(state["iterate"]), None if master is None else local(master))
    return y - (1 - rule.INTERPOLATION) * local(state["z_minus_x"]).to(y)


def _inputs(p: Tensor) -> int:
    """Return how many numbers make up one output; of a vector, its length."""
    shape = (*p.shape, 2) if p.is_complex() else p.shape
    return math.prod(shape[1:] if len(shape) > 1 else shape)
