"""The passes in pure torch, one tensor at a time: the specification of all other backends.

A pair of gradients takes two passes. Between them d holds the bracket of Algorithm 1, d_t - g~_t,
so that no previous iterate is stored.

`Untuned` keeps neither its fast iterate z nor the average x, only the parameters
y = (1 - b) z + b x, and e = z - x. With m = e - move, where a move includes the decay of z:

    z <- z - move                       e <- (1 - c) m
    x <- x + c (z - x)       becomes    y <- y + (c + (1 - b)(1 - c)) m - (1 - b) e
    y  = (1 - b) z + b x

so that x = y - (1 - b) e and z = y + b e. e is small compared with the weights: rounding it to 16
bits costs little.

A pass that writes takes `skip`: None, or a flag on the device. If it is set, nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stormplus.torch._tensors import Number, Numbers, TensorGroup, accumulator_dtype
from stormplus.untuned_rule import INTERPOLATION

_CHUNK = 1 << 17  # elements: 512 kB in float32, so that temporaries stay in a CPU's cache


def any_nonfinite(group: TensorGroup) -> Any:
    """Return whether a gradient has a NaN or an infinity; on a device as a 0-dim tensor."""
    pieces = [piece for g in group.grads for (piece,) in _chunks(g)]
    return torch.stack([~torch.isfinite(piece).all() for piece in pieces]).any()


def move(group: TensorGroup, alpha: Number, skip: Tensor | None = None) -> None:
    """Move the parameters by -alpha d, with alpha = lr eta / unit, and subtract g~ from d."""
    for tensors in zip(group.params, group.grads, group.estimators):
        for x, g, d in _chunks(*tensors):
            g_tilde = objective_gradient(x.to(d.dtype), g, group.sign, group.l2)
            _write((x, d), moved_x_and_d(x, g_tilde, d, alpha), skip)


def moved_x_and_d(x: Tensor, g_tilde: Tensor, d: Tensor, alpha: Number) -> tuple[Tensor, Tensor]:
    """Return the new x and d, in the dtype of d."""
    return x.to(d.dtype) - alpha * d, d - g_tilde  # Alg. 1, line 4, and the bracket of line 6


def estimate(
    group: TensorGroup, one_minus_a: Number, *, finite_only: bool, skip: Any = None
) -> Numbers:
    """Set d to g + (1 - a) d, and return |g|^2 and |d|^2. Before the first sample d is zero.

    With `finite_only`, elements of g that are not finite are left out of d.
    """
    sums = new_sums(group, 2)
    for tensors in zip(group.params, group.grads, group.estimators):
        for x, g, d in _chunks(*tensors):
            gradient = objective_gradient(x.to(d.dtype), g, group.sign, group.l2)
            new = estimated(gradient, d, one_minus_a, finite_only=finite_only)
            _write((d,), (new,), skip)
            sums[0] += squared_norm(gradient)
            sums[1] += squared_norm(new)
    return sums


def estimated(gradient: Tensor, d: Tensor, one_minus_a: Number, *, finite_only: bool) -> Tensor:
    """Return the new d."""
    if finite_only:
        gradient = finite_part(gradient)
    return gradient + one_minus_a * d  # Alg. 1, line 6


def undo_estimate(group: TensorGroup, one_minus_a: float) -> None:
    """Undo an `estimate` with `finite_only`, to one rounding of g + (1 - a) d.

    Where g is so large that d was lost in the sum, d becomes zero: the same gradient, evaluated
    again, hides d in the same way. Where a is 1, d has no effect.
    """
    for x, g, d in zip(group.params, group.grads, group.estimators):
        gradient = finite_part(objective_gradient(x.to(d.dtype), g, group.sign, group.l2))
        d.copy_(finite_part((d - gradient) / one_minus_a))


class UntunedCoefficients(NamedTuple):
    """What `untuned_step` needs to know, one entry per tensor.

    All backends use these names, and w = grad_weight, c = average_weight, one_minus_w, one_minus_c,
    and m_weight = c + (1 - b)(1 - c), the weight of m in the new y.
    """

    alpha: Numbers  # lr eta: how far a coordinate with |g| = s moves
    max_move: Numbers  # the largest change of one coordinate
    decay: Numbers  # the fraction of z that weight decay removes
    grad_weight: Numbers  # w, the weight of g^2 in s^2
    average_weight: Numbers  # c, the weight of z in the average
    grad_factor: Numbers  # multiplies g: -1 to maximize, 1 over the scale of a GradScaler
    step: Numbers  # t; with the place of an element it seeds stochastic rounding

    def of(self, indices: Any, device: torch.device) -> UntunedCoefficients:
        """Select some tensors, and bring their coefficients to where they are."""
        rows = [row[indices] for row in self]
        on_cpu = device.type == "cpu"  # which could read too early, if it did not wait
        if isinstance(self.step, Tensor) or not on_cpu:
            rows = [torch.as_tensor(row).to(device, non_blocking=not on_cpu) for row in rows]
        return UntunedCoefficients(*rows)


def untuned_step(
    group: TensorGroup, coefficients: UntunedCoefficients, skip: Tensor | None = None
) -> Numbers:
    """Take a step, and return the sums of u^2 and of (z - z_1)^2, per tensor.

    The second is over the sampled coordinates that are here.
    """
    sums = new_sums(group, 2, len(group.params))
    rows = [c if isinstance(c, Tensor) else c.tolist() for c in coefficients]
    lists = [group.params, group.grads, group.z_minus_x, group.grad_rms]
    if group.masters:
        lists.append(group.masters)
    for i, tensors in enumerate(zip(*lists)):
        step, start = UntunedCoefficients(*(row[i] for row in rows)), 0
        for x, g, old_e, old_s, *master in _chunks(*tensors):
            y, e, s, u = untuned_update(full_precision(x, *master), g, old_e, old_s, step)
            if e.dtype != old_e.dtype:
                place = torch.arange(start, start + x.numel(), device=x.device).view(x.shape)
                e, s = stochastic_round(torch.stack([e, s]), step.step, place)
            # Half-precision x is rounded once, at the end.
            _write((x, old_e, old_s, *master), (y, e, s, y), skip)
            sums[0, i] += squared_norm(u)
            start += x.numel()
        sums[1, i] = squared_displacement(group, i)
    return sums


def untuned_update(
    y: Tensor, g: Tensor, e: Tensor, s: Tensor, coefficients: UntunedCoefficients
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the new y, e and s, and u. The coefficients are numbers, or broadcast against y."""
    alpha, max_move, decay, w, c, grad_factor, _ = coefficients
    b, one_minus_w, one_minus_c = INTERPOLATION, 1 - w, 1 - c
    m_weight = c + (1 - b) * one_minus_c
    g, e, s = grad_factor * g.to(y.dtype), e.to(y.dtype), s.to(y.dtype)
    # The root is stored, not the square: in float32 those of 1e-20 and 1e20 do not exist.
    s = torch.hypot(one_minus_w**0.5 * s, w**0.5 * g)
    u = g / (s + (s == 0))  # 0 where there has been no gradient
    move = torch.clamp(alpha * u, min=-max_move, max=max_move)
    m = e - (move + decay * (y + b * e))
    return y + (m_weight * m - (1 - b) * e), one_minus_c * m, s, u


def squared_displacement(group: TensorGroup, i: int) -> Tensor:
    """Return |z - z_1|^2 over the sampled coordinates of a tensor."""
    sampled = group.coordinates[i]
    lists = [group.params, group.z_minus_x, *([group.masters] if group.masters else [])]
    x, e, *master = (tensors[i].reshape(-1)[sampled.index] for tensors in lists)
    y, z_1 = full_precision(x, *master), group.initial_sample[i][sampled.in_whole]
    return squared_norm(y + INTERPOLATION * e.to(y.dtype) - z_1)


# -- elementwise ---------------------------------------------------------------------------------


def objective_gradient(x: Tensor, g: Tensor, sign: float, l2: float) -> Tensor:
    """Return the gradient of what is minimized, with x's dtype."""
    g = g.to(x.dtype) if sign > 0 else -g.to(x.dtype)
    # Beyond the paper: L2 regularization is part of the objective, and so of its gradient.
    return g + l2 * x if l2 else g


def full_precision(x: Tensor, master: Tensor | None = None) -> Tensor:
    """Return y: the parameter, or its float32 master where that still rounds to a finite x."""
    if master is None:
        return x
    same = (master.to(x.dtype) == x) & (x - x == 0)  # fewer launches than isfinite()
    return torch.where(same, master, x.to(master.dtype))


def finite_part(t: Tensor) -> Tensor:
    """Return t with zeros in place of NaN and infinities."""
    return torch.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0)


def squared_norm(t: Tensor) -> Tensor:
    """Return |t|^2; in float32 it would lose digits, and overflow from 1e19 on."""
    dtype = accumulator_dtype(t.device)
    pieces = (piece.reshape(-1).to(dtype) for (piece,) in _chunks(t))
    return reduce(torch.add, (torch.dot(piece, piece) for piece in pieces))


def stochastic_round(buffers: Tensor, t: Number, place: Tensor) -> Tensor:
    """Round two stacked buffers to bfloat16, with probabilities that make the mean exact.

    The random bits are a hash of the step t, the buffer and the element's place in memory: a
    resumed run continues as it would have.
    """
    which = torch.arange(2, device=place.device).reshape(2, *[1] * place.ndim)
    key = mix_bits(2 * (t.to(torch.int64) if isinstance(t, Tensor) else int(t)) + which)
    random_bits = mix_bits(mix_bits(place) ^ key) & 0xFFFF
    wide = buffers.float()
    bits = (wide.view(torch.int32) + random_bits.to(torch.int32)) & ~0xFFFF
    # The bits of a NaN could overflow.
    return torch.where(wide.isnan(), wide, bits.view(torch.float32)).to(torch.bfloat16)


def mix_bits(n: Tensor) -> Tensor:
    """Hash 32 bits in int64; native.c, triton_kernels.py and JAX have the same function."""
    n = ((n ^ (n >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    n = ((n ^ (n >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return n ^ (n >> 15)


def new_sums(group: TensorGroup, *shape: int) -> Tensor:
    """Return zeros to add to: scalars between large temporaries would fragment the allocator."""
    return torch.zeros(shape, dtype=accumulator_dtype(group.device), device=group.device)


def _write(targets: Sequence[Tensor], values: Sequence[Tensor], skip: Tensor | None) -> None:
    for target, value in zip(targets, values):
        target.copy_(value if skip is None else torch.where(skip, target, value.to(target.dtype)))


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of bounded size on a CPU; elsewhere, or with gaps, the tensors themselves."""
    on_cpu, size = tensors[0].device.type == "cpu", tensors[0].numel()
    if on_cpu and size > _CHUNK and all(t.is_contiguous() for t in tensors):
        yield from zip(*(t.view(-1).split(_CHUNK) for t in tensors))
    else:
        yield tensors
