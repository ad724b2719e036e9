"""What STORM+ in measured units measures: how far it has come, how large the gradients are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stormplus.jax.options import Number, Options, check_number
from stormplus.jax.trees import Layout, PyTree, estimator_dtype, sums_dtype
from stormplus.rules import FIRST_DISTANCE, average_weight


@dataclass(frozen=True)
class UnitsOptions(Options):
    """See `stormplus.jax.untuned` for what each one does."""

    correction: bool
    fixed_distance: Number | None
    fixed_gradient: Number | None
    average: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("correction", "average"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("distance", "gradient"):
            value, hint = getattr(self, f"fixed_{name}"), "None measures it"
            if value is None or isinstance(value, jax.Array):
                continue
            check_number(name, value, hint)
            if value == 0:
                raise ValueError(f"{name} must be positive, got {value!r}; {hint}")

    def layout(self, params: PyTree) -> Layout:
        # Holes matter to grad_fn alone, which would be called with them.
        holes = not self.correction
        return Layout(params, mask=self.mask, scope=self.scope, groups=self.groups, holes=holes)

    @property
    def length(self) -> str:
        """What |.| of a difference of parameters means."""
        return self.norm if self.correction else "mean"

    def first_distance(self, layout: Layout) -> jax.Array:
        """r_0: a hundredth of |x_1|."""
        if self.fixed_distance is not None:
            return jnp.full(layout.shape, self.fixed_distance, sums_dtype())
        r = FIRST_DISTANCE * layout.length(layout.wide(layout.x), self.length)
        return jnp.where(r == 0, FIRST_DISTANCE, r)  # zeros tell no scale: as if |x_1| were 1

    def next_distance(
        self, layout: Layout, r: jax.Array, x: list[jax.Array], origin: PyTree
    ) -> jax.Array:
        """r_t = max(r_{t-1}, |x_t - x_1|)."""
        if self.fixed_distance is not None:
            return jnp.full(layout.shape, self.fixed_distance, sums_dtype())
        x_1 = layout.wide(jax.tree.leaves(origin))
        away = [x_i - x_1_i for x_i, x_1_i in zip(layout.wide(x), x_1)]
        return jnp.maximum(r, layout.length(away, self.length))

    def origin(self, layout: Layout) -> PyTree | None:
        """x_1, to measure the distance from. Copies: a donated buffer must not occur twice."""
        if self.fixed_distance is not None:
            return None
        return layout.with_holes(jnp.array(x_i, copy=True) for x_i in layout.x)

    def first_average(self, layout: Layout) -> PyTree | None:
        if not self.average:
            return None
        return layout.with_holes(
            jnp.array(x_i, estimator_dtype(x_i), copy=True) for x_i in layout.x
        )

    def next_average(
        self, layout: Layout, average: PyTree | None, x_new: list[jax.Array], t: jax.Array
    ) -> PyTree | None:
        """The mean of the points with weights that grow like t^8: the last tenth, about."""
        if average is None:
            return None
        weight = layout.each(jnp.broadcast_to(average_weight(t), layout.shape))
        pairs = zip(jax.tree.leaves(average), map(_rounded, x_new), weight)
        return layout.with_holes(m + w * (x_i - m) for m, x_i, w in pairs)


def _rounded(x: jax.Array) -> jax.Array:
    """Widened, and as x is: compiled, a sum just made would go on unrounded into the next."""
    bits = jnp.finfo(x.dtype)  # type: ignore[no-untyped-call, unused-ignore]
    return jax.lax.reduce_precision(x.astype(estimator_dtype(x)), bits.nexp, bits.nmant)


class ScalarUnits(NamedTuple):
    """What correction=True has measured.

    Attributes:
        distance: r_t. This and the next have shape () with scope "global", else one entry a
            leaf or group.
        gradient_unit: s_t, the largest |g_i| so far.
        origin: x_1; None where `distance` is fixed.
        average: The average of the points, float32 or wider; None with average=False.
    """

    distance: jax.Array
    gradient_unit: jax.Array
    origin: PyTree
    average: PyTree


@dataclass(frozen=True)
class MeasuredUnits:
    """The `Units` of the template: r and s, one number a block each."""

    options: UnitsOptions

    def init(self, layout: Layout) -> ScalarUnits:
        gradient = 0.0 if self.options.fixed_gradient is None else self.options.fixed_gradient
        return ScalarUnits(
            distance=self.options.first_distance(layout),
            gradient_unit=jnp.full(layout.shape, gradient, sums_dtype()),
            origin=self.options.origin(layout),
            average=self.options.first_average(layout),
        )

    def measure(
        self,
        units: ScalarUnits,
        layout: Layout,
        x_new: list[jax.Array],
        g_sq: jax.Array,
        t: jax.Array,
    ) -> tuple[ScalarUnits, tuple[Any, Any]]:
        options = self.options
        r = options.next_distance(layout, units.distance, x_new, units.origin)
        if options.fixed_gradient is None:
            s = jnp.maximum(units.gradient_unit, jnp.sqrt(g_sq))
        else:
            s = jnp.full(layout.shape, options.fixed_gradient, sums_dtype())
        measured = ScalarUnits(
            distance=r,
            gradient_unit=s,
            origin=units.origin,
            average=options.next_average(layout, units.average, x_new, t),
        )
        # The rule divides by s^2, which is 0 until a gradient is not, and for one so small
        # that the sums do not see it.
        return measured, (r, jnp.where(s * s == 0, 1, s))
