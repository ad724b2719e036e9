"""Beyond the paper: an optimizer with one gradient a step and nothing to tune.

It is made of known parts. The distance is DoG's (Ivgi, Hinder and Carmon, 2023), the unit of a
coordinate is AdaGrad's and RMSprop's, the interpolation between a fast iterate and its average is
Schedule-Free's (Defazio and others, 2024), and the average is Shamir and Zhang's (2013).
STORM+'s corrected estimator is not in it: docs/untuned.md has the study behind that.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, _disable_dynamo  # type: ignore[attr-defined]

from stormplus import rules
from stormplus.rules import INTERPOLATION
from stormplus.torch.core.base import BaseOptimizer, writable
from stormplus.torch.core.kernels import (
    CHUNK,
    NATIVE,
    NativeUntuned,
    Scratch,
    finite_or_nan,
    increment_version,
    split,
    square_norm,
    suits_untuned,
)
from stormplus.torch.core.sharding import Groups, held_indices, is_dtensor, local, reshard
from stormplus.torch.core.state import FROZEN, JOINED, Buffer, Numbers, State, run_of
from stormplus.torch.core.tensors import (
    Item,
    Kept,
    Member,
    Roster,
    Totals,
    blame,
    name_of,
    users_level,
)

Rows: TypeAlias = npt.NDArray[np.int64]  # which tensors, by their place among all

# In every coordinate, with b = 0.9 and the weights w, c of rules.py:
#
#     z <- z - step        the fast iterate
#     x <- x + c (z - x)   the average
#     y  = (1 - b) z + b x the parameters, where gradients are taken
#
# Neither z nor x is stored, only y and the lead e = z - x. With m = e - step:
#
#     e <- (1 - c) m
#     y <- y + (c + (1 - b)(1 - c)) m - (1 - b) e_before
#
# so that x = y - (1 - b) e and z = y + b e. A lead is small beside the weights, so that rounding it
# to 16 bits costs little.
_STATE_DTYPES = (None, torch.float32, torch.bfloat16)


_NO_LR = (
    "there is no rate to set, and Adam's 1e-3 would all but stop the run. Leave it out; a "
    "scheduler multiplies param_groups[...]['lr'], which is 1.0, and a group may have a `factor` "
    "of its own"
)


class Untuned(BaseOptimizer):
    """One gradient per step, Adam's memory, and nothing to tune.

    Every tensor has a distance r and a ceiling R for it; with g the gradient, in each coordinate:

        s^2  <- mean of g^2 over about the last third of the run        the unit
        z    <- z - (r / sqrt(t)) g / s                                 the fast iterate
        x    <- mean of z over about the last tenth of the run          the average
        y     = 0.1 z + 0.9 x                                           the parameters
        r    <- min(max(r, RMS of z - z_1), R)                          from R / 60 on

    R is the tensor's root mean square at the start, or one over the root of its inputs if that
    is larger. No step is larger than the first, R / 60, unless the steps so far agree in every
    matrix of the model, and none moves a coordinate by more than r. Both times `lr` and `factor` of
    its group, and weight decay comes on top. docs/untuned.md has the whole rule and the study
    behind it.

    It is a plain torch optimizer: `loss.backward(); opt.step()`, a closure if you like, any
    trainer. Call `opt.eval()` before you validate or save a model: it puts the average x into
    the parameters, which is what you want to keep; `opt.train()` takes it out again. If the
    model has BatchNorm, `recalibrate(model, batches)` after `eval()`.

    There is no `lr`. The groups have one, 1.0, so that a scheduler has something to multiply, and a
    `factor` of their own, to slow some layers down.

    Memory: two buffers of the parameters' size, as Adam. Parameters in half precision have a
    third, in float32: the steps are smaller than what they can hold.

    A pass hook (`register_pass_hook`) is told of "before_step", "after_step", and of "failed"
    when a gradient is not finite and nothing has moved.

    Args:
        params: Parameters, parameter groups, or `named_parameters()`. A group may have its own
            `weight_decay`, `maximize` and `factor`.
        weight_decay: Decoupled, as AdamW's with the step size for its lr: a step takes this
            times the step size off every weight. Tensors that start above their natural scale
            have larger steps, and the same decay.
        maximize: Maximize the objective instead.
        state_dtype: torch.bfloat16 keeps the two buffers in 16 bits, rounded at random so that
            small changes count in the mean: half the memory. None: as the parameters.
        check_finite: Raise `FloatingPointError` on a gradient that is not finite, before
            anything has moved.
    """

    _layout: _Layout | None = None
    _left: tuple[int, dict[int, int]] = (-1, {})  # where eval() has left the parameters
    _numbers: ClassVar[dict[str, float]] = {
        "step": 0.0,
        "step_size": 0.0,
        "distance": 0.0,
        "ceiling": 1.0,
        "counted": 0.0,
        # In units of the ceiling: the last step, and the square of how far steps of these sizes
        # would have led at random.
        "pace": 0.0,
        "walk": rules.FIRST_WALK,
        "evidence": 0.0,
        # What the last step has measured; the next one begins by taking it in.
        "mean_square": 0.0,
        "moved": 0.0,
    }
    _shown = ("step", "step_size", "distance")
    _kept = ("_state_dtype", "_trusted")
    _lent: ClassVar[dict[str, Buffer]] = {"iterate": Buffer(wide=False)}
    _absent: ClassVar[dict[str, str]] = {"lr": _NO_LR, "learning_rate": _NO_LR}

    def __init__(
        self,
        params: Any,
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        check_finite: bool = True,
    ) -> None:
        if state_dtype not in _STATE_DTYPES:
            raise ValueError(f"state_dtype must be torch.bfloat16 or None, got {state_dtype!r}")
        self._state_dtype = None if state_dtype == torch.float32 else state_dtype
        self._trusted = 0  # the generation whose parameters have been compared with the state
        buffers = {
            "lead": Buffer(dtype=self._state_dtype),
            "unit": Buffer(dtype=self._state_dtype),
            "origin": Buffer(sampled=True),
            "master": Buffer(half_only=True),
        }
        defaults = {"lr": 1.0, "factor": 1.0, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params, defaults, buffers=buffers, scope="tensor", check_finite=check_finite
        )

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there, or that the closure computes.

        Args:
            closure: Optional: zeroes the gradients, computes the loss, calls backward.

        Returns:
            The closure's loss, or None.
        """
        self._check_that_training()
        loss = None
        if closure is not None:
            loss = torch.enable_grad()(closure)()
            self._check_that_training()  # it may have validated
        self._descend()
        return loss

    @torch.no_grad()
    def _descend(self) -> None:
        roster = self._roster()
        layout = self._laid_out(roster)
        lots = layout.lots()
        if not lots:
            return  # no gradient anywhere: no step, as torch's own optimizers
        try:
            self._step_with(lots, layout)
        finally:
            for lot in lots:  # gradients are as large as the model
                lot.items = []

    def _step_with(self, lots: list[_Lot], layout: _Layout) -> None:
        self._tell("before_step")
        if self._check_finite:
            self._probe(lots, layout)
        if self._trusted != self.generation:
            self._compare_with_saved(lots)
        if any(lot.joining for lot in lots):
            self._start(lots, layout)
        rows = lots[0].rows if len(lots) == 1 else np.concatenate([lot.rows for lot in lots])
        with np.errstate(all="ignore"):  # what is not finite is found there
            table = self._decide(layout, rows)
        totals = Totals(2, layout.roster, self._run["step"])
        for lot in lots:
            lot.descend(table, totals.table(lot.process_groups, lot.device))
        self._measure(layout, rows, totals.sum())
        self._run["grad_evaluations"] += 1
        self._opt_called = True  # what lr_scheduler looks for before it warns
        self._tell("after_step")

    def _decide(self, layout: _Layout, rows: Rows) -> Numbers:
        """Take in what the last step has measured, and decide on this one.

        Returns:
            A column of coefficients for each tensor: the step, its limit in a coordinate, the part
            that weight decay takes, w, c, the sign of the gradient, and t.
        """
        run = self._on_host()
        t = run["step"] + 1
        moved, square, ceiling = run["moved"], run["mean_square"], run["ceiling"]
        counts = rules.counted_step(square)
        counted, walk = run["counted"] + counts, run["walk"] + run["pace"] ** 2 * square
        least = rules.least_agreement(moved / ceiling, walk, layout.asked)
        evidence = run["evidence"] + counts * least**2
        r = rules.next_distance(run["distance"], moved, ceiling)
        eta = rules.untuned_step_size(r, counted, ceiling, evidence)
        finite = np.isfinite(moved + eta)
        if not finite.all() and not finite[rows].all():
            self._tell("failed")
            bad = self.parameters()[rows[~finite[rows]][0]]
            raise FloatingPointError(
                f"{name_of(self.param_groups, bad)} is not finite, or too far from where it "
                "began to be measured; nothing has moved: go back to the last checkpoint"
            )
        lr, decay, sign = layout.options()
        alpha = lr * eta
        # Who has no gradient stays as it is.
        at = slice(None) if len(rows) == len(t) else rows
        new = {"step": t, "counted": counted, "distance": r, "step_size": eta}
        new |= {"pace": alpha / ceiling, "walk": walk, "evidence": evidence}
        for name, value in new.items():
            run[name][at] = value[at]
        if self._run["step"].device.type != "cpu":
            for name in new:
                self._run[name] = torch.from_numpy(run[name]).to(self._run[name], non_blocking=True)
        if layout.decays:
            decay = rules.decay_factor(decay, alpha, layout.natural, ceiling)
        w, c = rules.unit_weight(t), rules.average_weight(t)
        return np.array((alpha, lr * r, decay, w, c, sign, t))

    def _on_host(self) -> dict[str, Numbers]:
        """The numbers of the run; on the CPU they are the run's own memory."""
        if self._run["step"].device.type == "cpu":
            return self._views.of(self._run)
        table = torch.stack([self._run[name] for name in self._numbers]).cpu()  # waits, once
        return dict(zip(self._numbers, table.double().numpy()))

    def _measure(self, layout: _Layout, rows: Rows, sums: Tensor) -> None:
        """Keep what this step has measured: the mean of (g / s)^2, and how far z has come."""
        if sums.device.type == "cpu":
            run, table = self._views.of(self._run), sums.numpy()
            run["mean_square"][rows] = table[0, rows] / layout.sizes[rows]
            run["moved"][rows] = np.sqrt(table[1, rows] / layout.counts[rows])
            return
        sizes, counts = layout.sizes_like(sums)
        at = slice(None) if len(rows) == len(sizes) else torch.from_numpy(rows).to(sums.device)
        self._run["mean_square"][at] = (sums[0] / sizes)[at]
        self._run["moved"][at] = (sums[1] / counts).sqrt_()[at]

    def _start(self, lots: list[_Lot], layout: _Layout) -> None:
        """Tensors that get their first gradient begin where they are."""
        totals = Totals(1, layout.roster, self._run["step"])
        begun = [
            (lot, lot.rows[i], lot.items[i], lot.samples[i]) for lot in lots for i in lot.joining
        ]
        scratch = Scratch()
        for lot, row, item, _ in begun:
            totals.table(lot.process_groups, lot.device)[0, row] += square_norm(item.x, scratch)
        start = np.sqrt(totals.sum()[0].cpu().numpy() / layout.sizes)
        for _, row, _, _ in begun:
            if not np.isfinite(start[row]):
                self._tell("failed")
                name = name_of(self.param_groups, self.parameters()[row])
                raise FloatingPointError(f"{name} is not finite; nothing has moved")
        ceiling = rules.distance_ceiling(start, layout.natural)
        first = rules.first_distance(ceiling)
        for lot, row, item, sample in begun:
            self._run["ceiling"][row] = float(ceiling[row])
            self._run["distance"][row] = float(first[row])
            sample.keep_origin(item, lot.process_groups)
            for master in item.buffers[3:]:
                master.copy_(item.x)
            item.state["joined"] = JOINED

    def _probe(self, lots: list[_Lot], layout: _Layout) -> None:
        if len(lots) == 1 and not lots[0].process_groups:
            found = lots[0].probe()
        else:
            totals = Totals(1, layout.roster, self._run["step"])
            for lot in lots:
                totals.table(lot.process_groups, lot.device)[0, lot.rows[0]] += lot.probe()
            found = totals.sum().sum()
        if not math.isfinite(found):  # waits for the device
            self._tell("failed")
            raise FloatingPointError(
                f"{blame(self.param_groups)}; nothing has moved: go on with another sample"
            )

    def _laid_out(self, roster: Roster) -> _Layout:
        if self._layout is None or self._layout.roster is not roster:
            self._layout = _Layout(roster, len(self._run["step"]))
            for member in roster.members:
                if self.state[member.p]["joined"] == FROZEN:  # it has numbers of its first life
                    for name, number in self._numbers.items():
                        self._run[name][member.bucket] = number
        return self._layout

    def _compare_with_saved(self, lots: list[_Lot]) -> None:
        """Warn if the parameters are not where the loaded state has left them."""
        self._trusted = self.generation
        for lot in lots:
            for i, (row, item) in enumerate(zip(lot.rows, lot.items)):
                if i in lot.joining or lot.process_groups:
                    continue
                saved, found = float(self._run["moved"][row]), lot.samples[i].moved(item)
                if abs(found - saved) > 1e-4 * max(saved, found):
                    warnings.warn(
                        f"{name_of(self.param_groups, self.parameters()[row])} is not where this "
                        "state left it: load a model that was saved at the same moment, and in the "
                        "same mode (opt.eval() or opt.train()), as the optimizer",
                        stacklevel=users_level(),
                    )
                    return

    # -- the average -----------------------------------------------------------------------------

    def _check_that_training(self) -> None:
        if self.at_average:
            raise RuntimeError(
                "the parameters hold the average, and a gradient that was taken there is of no "
                "use: call opt.train() before the forward pass"
            )

    @property
    def at_average(self) -> bool:
        """Whether the parameters hold the average: `eval()` was called, and not `train()`."""
        self._notice_emptied()
        return bool(self._run["averaged"])

    @writable()
    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the parameters: call it before you validate or save a model.

        BatchNorm's running statistics are those of the iterates: `recalibrate` takes them anew.
        Without a step so far the parameters stay as they are. Calling it twice is calling it
        once.
        """
        if not self.at_average:
            self._roster()  # buffers are where the parameters are
            reshard()
            for p in self.parameters():
                state = self.state[p]
                if "lead" not in state:
                    continue
                state["iterate"] = p.detach().clone()
                if state["joined"] == JOINED:
                    local(p).copy_(_average(state))
            self._run["averaged"] = 1
        elif self._left[0] == self.generation:
            return
        self._left = self.generation, {id(p): p._version for p in self.parameters()}

    @torch.no_grad()
    def train(self) -> None:
        """Put the last iterate back, exactly, and go on.

        A tensor that has had no gradient so far stays as it is.
        """
        if not self.at_average:
            return
        if self.overwritten:
            warnings.warn(
                "the parameters were written to after opt.eval(), and opt.train() puts the last "
                "iterate over that: load weights before opt.eval() or after opt.train(), or call "
                "opt.reset() to begin anew from them",
                stacklevel=users_level(),
            )
        reshard()
        for p in self.parameters():
            iterate: Tensor | None = self.state[p].pop("iterate", None)
            if iterate is not None and self.state[p]["joined"] == JOINED:
                p.copy_(iterate)
        self._run["averaged"] = 0

    @property
    @torch.no_grad()
    def overwritten(self) -> bool:
        """Whether other weights than the average are there since `eval()`, without their state.

        A write through `p.data` is not seen: torch does not count it.
        """
        generation, versions = self._left
        if not self.at_average or generation != self.generation:
            return False  # a state that was loaded belongs to whatever is there
        for p in self.parameters():
            state = self.state[p]
            if versions.get(id(p), p._version) == p._version or state["joined"] != JOINED:
                continue
            # The same weights again are nothing new. Shards are not compared: that all processes
            # come to the same answer matters more.
            if is_dtensor(p) or not torch.equal(local(p), _average(state).to(local(p))):
                return True
        return False

    # -- what the base asks for ------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        return {"rule": "Untuned", "state_dtype": str(self._state_dtype)}

    def _begin(self) -> State:
        return {"grad_evaluations": 0, "averaged": 0}

    def _check_options(self, group: dict[str, Any]) -> None:
        known = [1.0, *(other["lr"] for other in self.param_groups if other is not group)]
        if group["lr"] not in known and not self._renewing:
            if self._gathering:
                raise ValueError(f"a group of Untuned got lr={group['lr']!r}: {_NO_LR}")
            warnings.warn(  # a trainer's callback that unfreezes a backbone, at a tenth of the rest
                f"a group of Untuned was added with lr={float(group['lr']):g}, which is no rate "
                "there but a factor on all steps of the group: 1.0 is plain",
                stacklevel=users_level(),
            )
        factor = group["factor"]
        if not (isinstance(factor, Real) and 0 <= float(factor) < math.inf):
            raise ValueError(f"factor must be a finite number, at least 0, got {factor!r}")

    def _check_saved(self, state_dict: State) -> None:
        entries, run = list(state_dict["state"].values()), run_of(state_dict)
        if (
            run
            and run["averaged"]
            and any("iterate" not in e for e in entries if e["joined"] == JOINED)
        ):
            raise ValueError(
                "the state was saved after eval(), and the iterate that train() brings back is not "
                "in it: torch.distributed.checkpoint loads only what is there already. Call "
                "opt.eval() before you load, or opt.train() before you save"
            )


# -- tensors -------------------------------------------------------------------------------------


class _Layout:
    """The parameters as `Untuned` sees them: made anew only when the roster is.

    Attributes:
        roster: The trainable parameters.
        sizes: The number of elements of each tensor, 1 where there is none.
        counts: The number of those that are sampled, likewise.
        natural: The natural scale of each.
        asked: Whose steps must agree before larger ones are made.
    """

    def __init__(self, roster: Roster, rows: int) -> None:
        self.roster = roster
        self.sizes, self.counts, self.natural = np.ones(rows), np.ones(rows), np.ones(rows)
        self._groups: list[dict[str, Any] | None] = [None] * rows
        self._samples: dict[int, _Sample] = {}
        self._kept: _Lot | None = None
        self._known: tuple[Any, ...] = ()
        self._on_device: tuple[Tensor, Tensor] | None = None
        for member in roster.members:
            p, row = member.p, member.bucket
            sample = self._samples[row] = _Sample(p)
            self.sizes[row], self.counts[row] = max(sample.size, 1), max(sample.count, 1)
            outputs = p.shape[0] if p.ndim + p.is_complex() > 1 else 1
            self.natural[row] = rules.natural_scale(sample.size // max(outputs, 1))
            self._groups[row] = member.group
        self.asked = np.zeros(rows, bool)
        self.asked[[member.bucket for member in roster.members]] = rules.asked(
            [member.p.ndim if member.p.numel() else 0 for member in roster.members]
        )
        self._distinct = list(
            {id(member.group): member.group for member in roster.members}.values()
        )

    def lots(self) -> list[_Lot]:
        """The tensors that have a gradient, by what a pass must know of all of them."""
        if self._kept is not None and self._kept.take_gradients():
            return [self._kept]
        found: dict[Any, _Lot] = {}
        for member, g, joining in self.roster.present():
            if g is None or member.p.numel() == 0:
                continue  # no gradient, no step
            item = self.roster.item(member, g)
            key = member.process_groups, item.x.device, item.x.dtype
            if key not in found:
                found[key] = _Lot(*key)
            found[key].take(member, item, self._samples[member.bucket], joining=joining)
        for lot in found.values():
            lot.rows = np.array(lot.rows)
        lots = list(found.values())
        self._kept = None
        if len(lots) == 1 and lots[0].lasts(len(self.roster.members)):
            self._kept = lots[0]
            self._kept.keep(self.roster)
        return lots

    @property
    def decays(self) -> bool:
        """Whether a tensor has weight decay, by the last `options`."""
        return any(decay for _, decay, _ in self._known)

    def options(self) -> tuple[Numbers, Numbers, Numbers]:
        """Of each tensor: the factor on its steps, its weight decay, and -1 to maximize."""
        known = tuple(map(_options, self._distinct))
        if known != self._known:
            self._known = known
            of = {id(group): option for group, option in zip(self._distinct, known)}
            rows = [of.get(id(group), (1.0, 0.0, 1.0)) for group in self._groups]
            self._options = np.array(rows).T.copy()
        lr, weight_decay, sign = self._options
        return lr, weight_decay, sign

    def sizes_like(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """The sizes, and how many coordinates the samples have."""
        if self._on_device is None or self._on_device[0].device != sums.device:
            sizes, counts = (torch.from_numpy(n).to(sums) for n in (self.sizes, self.counts))
            self._on_device = sizes, counts
        return self._on_device


def _options(group: dict[str, Any]) -> tuple[float, float, float]:
    lr = float(group["lr"]) * float(group["factor"])
    return lr, float(group["weight_decay"]), -1.0 if group["maximize"] else 1.0


class _Sample:
    """Every k-th coordinate of a tensor, counted over all processes that share it."""

    def __init__(self, p: Tensor) -> None:
        self.size = p.numel() * (2 if p.is_complex() else 1)
        self.stride = rules.sample_stride(self.size)
        self.count = -(-self.size // self.stride)
        x = local(p)
        self.regular = not is_dtensor(p) and x.is_contiguous()
        if self.regular:
            return
        shape = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
        held = [*held_indices(p), torch.arange(2)] if p.is_complex() else held_indices(p)
        places = torch.arange(0, self.size, self.stride)
        mine = torch.ones_like(places, dtype=torch.bool)
        index = []
        for coordinate, here, size in zip(torch.unravel_index(places, shape), held, shape):
            at = torch.full((size,), -1).index_copy_(0, here, torch.arange(len(here)))
            index.append(at[coordinate])
            mine &= index[-1] >= 0
        self._mine = mine.nonzero().reshape(-1).to(x.device)
        self._index = tuple(i[mine].to(x.device) for i in index)

    def of(self, t: Tensor) -> Tensor:
        """The sampled coordinates of a local tensor that lie here."""
        return t.view(-1)[:: self.stride] if self.regular else t[self._index]

    def keep_origin(self, item: Item, process_groups: Groups) -> None:
        """Remember where the tensor begins, in full on every process."""
        origin = item.buffers[2]
        if self.regular:
            origin.copy_(self.of(item.x))
            return
        origin.zero_()
        origin[self._mine] = self.of(item.x).to(origin.dtype)
        for group in process_groups:
            torch.distributed.all_reduce(origin, group=group)

    def square_distance(self, item: Item) -> Tensor:
        """|z - z_1|^2 over what lies here of the sample."""
        y, lead = _in_full(*map(self.of, (item.x, *item.buffers[3:]))), self.of(item.buffers[0])
        origin = item.buffers[2] if self.regular else item.buffers[2][self._mine]
        z = torch.add(y, lead.to(y.dtype), alpha=INTERPOLATION)
        return square_norm(z - origin)

    def moved(self, item: Item) -> float:
        """The distance of a tensor that is whole here."""
        return float((self.square_distance(item) / max(self.count, 1)).sqrt())


def _average(state: State) -> Tensor:
    """What lies here of x, by the iterate that `eval()` keeps."""
    iterate, lead, master = local(state["iterate"]), local(state["lead"]), state.get("master")
    y = _in_full(iterate, None if master is None else local(master))
    return torch.sub(y, lead.to(y), alpha=1 - INTERPOLATION)


def _in_full(x: Tensor, master: Tensor | None = None) -> Tensor:
    """y: the parameter, or its float32 master, where that still rounds to it, and to a number."""
    if master is None:
        return x
    return torch.where((master.to(x.dtype) == x) & x.isfinite(), master, x.to(master.dtype))


class _Lot:
    """Tensors of one dtype and device, each with coefficients of its own."""

    def __init__(self, process_groups: Groups, device: torch.device, dtype: torch.dtype) -> None:
        self.process_groups, self.device, self.dtype = process_groups, device, dtype
        self.rows: Any = []
        self.params: list[Tensor] = []
        self.items: list[Item] = []
        self.samples: list[_Sample] = []
        self.joining: list[int] = []
        self._plan: tuple[list[int], NativeUntuned | None, list[int]] | None = None
        self._tensors: Kept | None = None

    def keep(self, roster: Roster) -> None:
        """Be there for the next step too."""
        self._tensors = roster.kept(self.params, self.items)

    def lasts(self, rows: int) -> bool:
        """Whether it can be used again: all tensors, and none that changes by itself."""
        return (
            len(self.rows) == rows == len(self._prepared()[0])
            and not self.process_groups
            and not self.joining
            and Kept.fits(self.params, self.items)
        )

    def take_gradients(self) -> bool:
        """Take the new gradients, if nothing else has changed."""
        items = None if self._tensors is None else self._tensors.renewed()
        if items is None:
            return False
        self.items = items
        _, native, _ = self._prepared()
        if native is not None:
            native.take(items)
        return True

    def take(self, member: Member, item: Item, sample: _Sample, *, joining: bool) -> None:
        """Add a tensor."""
        if joining:
            self.joining.append(len(self.items))
        self.rows.append(member.bucket)
        self.params.append(member.p)
        self.items.append(item)
        self.samples.append(sample)

    def probe(self) -> Tensor | float:
        """0 if the gradients are finite, else nan."""
        if self._plan is not None and len(self._plan[0]) == len(self.items):
            _, native, _ = self._plan
            return 0.0 if native is not None and native.finite() else math.nan
        return finite_or_nan([item.g for item in self.items if item.g is not None], self.device)

    def descend(self, table: Numbers, out: Tensor) -> None:
        """One step of every tensor.

        Args:
            table: The coefficients of all tensors, by column.
            out: A table with a column for each tensor, to which are added the sum of (g / s)^2 and
                |z - z_1|^2 over the sample.
        """
        rows = len(self.rows)
        numbers = table if rows == table.shape[1] else np.ascontiguousarray(table[:, self.rows])
        taken, native, measured = self._prepared()
        if native is not None:
            if len(taken) == rows == out.shape[1] and out.dtype == torch.float64:
                native.step(numbers, out.numpy())
            else:
                own = numbers if len(taken) == rows else np.ascontiguousarray(numbers[:, taken])
                sums = np.zeros((2, len(taken)))
                native.step(own, sums)
                out.numpy()[:, self.rows[taken]] += sums
            increment_version([self.items[i].x for i in taken])  # autograd has not seen it
        rest = [i for i in range(rows) if i not in taken] if len(taken) < rows else []
        for chunks in _lists(self.items, rest, self.device) if rest else ():
            for (i, _, _), square in zip(chunks, _descend(chunks, numbers)):
                out[0, self.rows[i]] += square
        for i in (i for i in range(rows) if i not in measured) if len(measured) < rows else ():
            out[1, self.rows[i]] += self.samples[i].square_distance(self.items[i])

    def _prepared(self) -> tuple[list[int], NativeUntuned | None, list[int]]:
        """What goes the native way, its pass, and whose distance is measured on that way."""
        if self._plan is None:
            taken = [i for i, item in enumerate(self.items) if suits_untuned(item)]
            measured = [i for i in taken if self.samples[i].regular]
            native = None
            if NATIVE is not None and taken:
                strides = [self.samples[i].stride if i in measured else 0 for i in taken]
                native = NativeUntuned(NATIVE, [self.items[i] for i in taken], strides)
            self._plan = taken, native, measured
        return self._plan


# -- one pass ------------------------------------------------------------------------------------

_Chunk: TypeAlias = tuple[
    int, int, tuple[Tensor, ...]
]  # of tensor i, from an element on: x, g, ...


def _lists(items: list[Item], which: list[int], device: torch.device) -> Iterator[list[_Chunk]]:
    """Chunks to be handled together: as many as a large tensor has, or on the CPU one."""
    found: list[_Chunk] = []
    limit, size = CHUNK, 0
    if device.type != "cpu":  # an operation for many tensors saves launches there
        limit = max(CHUNK, max(items[i].x.numel() for i in which) // 4)
    for i in which:
        x, g, buffers, _ = items[i]
        assert g is not None
        tensors = (x, g, *buffers[:2], *buffers[3:])
        start = 0
        pieces = [tensors] if x.numel() <= limit else split(limit, *tensors)
        for chunk in pieces:
            if found and (device.type == "cpu" or size + chunk[0].numel() > limit):
                yield found
                found, size = [], 0
            found.append((i, start, chunk))
            start += chunk[0].numel()
            size += chunk[0].numel()
    if found:
        yield found


def _descend(chunks: list[_Chunk], numbers: Numbers) -> list[Tensor]:
    """A step on chunks, and the sum of (g / s)^2 in each."""
    at = numbers[:, [i for i, _, _ in chunks]]
    alpha, limit, decay, w, c, sign, t = at
    xs = [chunk[0] for _, _, chunk in chunks]
    halves = len(chunks[0][2]) == 5
    ys = [_in_full(x, m) for _, _, (x, _, _, _, m) in chunks] if halves else xs
    wide = ys[0].dtype
    gs = torch._foreach_mul([g.to(wide) for _, _, (_, g, *_) in chunks], sign.tolist())
    leads, units = ([chunk[k].to(wide) for _, _, chunk in chunks] for k in (2, 3))
    # s: the root is stored, not the square: 1e-20 and 1e20 have none in float32. torch has no
    # such operation for many tensors.
    olds = torch._foreach_mul(units, np.sqrt(1 - w).tolist())
    news = torch._foreach_mul(gs, np.sqrt(w).tolist())
    units = [torch.hypot(old, new) for old, new in zip(olds, news)]
    us = torch._foreach_div(gs, torch._foreach_clamp_min(units, torch.finfo(wide).tiny))
    squares = [square_norm(u) for u in us]
    torch._foreach_mul_(us, alpha.tolist())
    torch._foreach_clamp_min_(us, (-limit).tolist())
    torch._foreach_clamp_max_(us, limit.tolist())
    if decay.any():
        zs = torch._foreach_add(ys, leads, alpha=INTERPOLATION)
        torch._foreach_add_(us, torch._foreach_mul(zs, decay.tolist()))
    ms = torch._foreach_sub(leads, us)
    b = INTERPOLATION
    moves = torch._foreach_mul(ms, (c + (1 - b) * (1 - c)).tolist())
    torch._foreach_sub_(moves, leads, alpha=1 - b)
    ys = list(torch._foreach_add(ys, moves))
    leads = list(torch._foreach_mul(ms, (1 - c).tolist()))
    for k, (_, start, chunk) in enumerate(chunks):
        x, _, lead, unit, *master = chunk
        x.copy_(ys[k])  # half-precision x is rounded once, at the end
        for m in master:
            m.copy_(ys[k])
        for which, (new, kept) in enumerate(((leads[k], lead), (units[k], unit))):
            rounds = kept.dtype != wide
            kept.copy_(_rounded_at_random(new, int(t[k]), start, which) if rounds else new)
    return squares


def _rounded_at_random(v: Tensor, t: int, start: int, which: int) -> Tensor:
    """V in bfloat16, up or down with the odds that make it right in the mean.

    The odds are drawn from the step and the place of the element, and from no stream: a run that
    is resumed goes on as it would have, and the user's random numbers are left alone.
    """
    key = _mixed(torch.tensor(2 * t + which))
    place = torch.arange(start, start + v.numel(), device=v.device).reshape(v.shape)
    odds = _mixed(_mixed(place & 0xFFFFFFFF) ^ key.to(v.device)) & 0xFFFF
    bits = v.float().view(torch.int32).to(torch.int64)
    return ((bits + odds) & ~0xFFFF).to(torch.int32).view(torch.float32).to(torch.bfloat16)


def _mixed(n: Tensor) -> Tensor:
    """Scatter 32 bits: neighbours come out far apart."""
    n = ((n ^ (n >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    n = ((n ^ (n >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return n ^ (n >> 15)
