"""The average of `Untuned`, which eval() shows, and checks of what users do with it."""

from __future__ import annotations

from statistics import fmean

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

    _state_dtype: torch.dtype | None  # of z_minus_x and grad_rms
    _lr_checked = False
    _compared = 0  # the generation whose parameters were compared with the state

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
                # A frozen parameter stays where other steps have left it.
                if "z_minus_x" in state and not info.left_out:
                    state["iterate"] = p.detach().clone()
                    if state["initialized"] and p.numel():  # it may be emptied
                        local(p).copy_(_average(state))
            self._shared_state["averaged"] = 1
        for info in self._infos:
            if info.average_version is None:  # else eval() was called before
                info.average_version = info.p._version

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
            info.average_version = None
        self._shared_state["averaged"] = 0

    @property
    @torch.no_grad()
    def overwritten(self) -> bool:
        """Whether the parameters hold other weights than the average that `eval()` has put there.

        A write through `p.data` is not seen: torch does not count it.
        """
        for info in self._infos if self.at_average else ():
            p, state = info.p, info.state
            # None after loading: the state belongs to whatever is there.
            if info.average_version in (None, p._version) or "iterate" not in state:
                continue
            if not state["initialized"]:
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
            summary[name] = fmean(values) if name == "step_size" else max(values)
            summary |= {f"{name}_min": min(values), f"{name}_max": max(values)}
        return summary | {"grad_evaluations": float(self.grad_evaluations)}

    # -- checks ----------------------------------------------------------------------------------

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
        saved = [float(numbers["displacement"]) for numbers in self._tensor_table.snapshot()]
        for tensors in (t for t in groups if not (t.is_new or t.process_groups)):
            for i, index in enumerate(tensors.indices):
                mean = float(plain.squared_displacement(tensors, i)) / tensors.coordinates[i].count
                if abs(mean**0.5 - saved[index]) > 1e-4 * max(saved[index], mean**0.5):
                    name = parameter_name(self.param_groups, self._infos[index].p)
                    warn(
                        f"{name} is not where this state left it: load a model that was saved at "
                        "the same moment, and in the same mode (opt.eval() or opt.train()), as the "
                        "optimizer"
                    )
                    return

    def _buffers(self, p: Tensor) -> dict[str, BufferKind]:
        wide = wide_dtype(p.dtype)
        # bfloat16 has no complex numbers: pairs of reals.
        pairs = (*p.shape, 2) if self._state_dtype and p.is_complex() else None
        stored = BufferKind(self._state_dtype or wide, pairs)
        sample = BufferKind(wide.to_real() if wide.is_complex else wide, (coordinate_count(p),))
        kinds = {"z_minus_x": stored, "grad_rms": stored, "initial_sample": sample}
        return kinds if wide == p.dtype else kinds | {"master": BufferKind(wide)}

    def _check_loaded(self, state_dict: State) -> None:
        saved = entries(state_dict)
        has_iterates = all(
            "iterate" in entry
            for entry, p in zip(saved, self.parameters())
            if entry.get("initialized") and p.requires_grad
        )
        if scalars_of(saved)["averaged"] and not has_iterates:
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
