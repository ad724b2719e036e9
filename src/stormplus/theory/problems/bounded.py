"""Bounded non-convex functions that meet every assumption of the paper, at any noise level.

With u = x - centre, two profiles phi, psi of one variable and signs xi, xi' in {-1, 1},

    f(x; xi, xi') = sum_j  height phi(u_j) + s (xi_j phi(u_j) + xi'_j psi(u_j)),

so f(x) = height sum_j phi(u_j). The xi_j change the curvature of a sample and the xi'_j tilt it:
with additive noise alone the error's Z_t would be 0 and every correction would look perfect. Both
profiles have phi'^2 + psi'^2 <= 1, so that s = sigma / sqrt(dim) gives
E|grad f(x; xi) - grad f(x)|^2 <= sigma^2.

| profile  | phi              | psi            | phi'^2 + psi'^2 |
|----------|------------------|----------------|-----------------|
| "well"   | u^2 / (1 + u^2)  | u / (1 + u^2)  | 1 / (1 + u^2)^2 |
| "ripple" | 1 - cos u        | sin u          | 1               |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from stormplus.theory.problems.base import Array, Constants, Objective

# Of the well: max|phi'| = 3 sqrt(3) / 8, max|phi''| = 2, max|psi'| = 1, and
# max|psi''| = (3 + 2 sqrt(2)) / 4, at u = sqrt(2) - 1.
WELL_SLOPE = 3 * math.sqrt(3) / 8
WELL_CURVATURE = 2.0
WELL_TILT_CURVATURE = (3 + 2 * math.sqrt(2)) / 4


class BoundedNonConvex(Objective):
    """A sum of wells or of ripples; every constant of the paper is known.

    All methods also work on arrays of points: the last axis is the coordinate, and `sigma` may be
    an array over the leading axes.

    Args:
        dim: Number of coordinates.
        sigma: The noise level, 0 for none; or an array of them.
        profile: "well" or "ripple".
        height: Scales f, and so B and (without noise) L and G.
        seed: Of the centres, uniform in [-1, 1].
    """

    full_sample = (0.0, 0.0)  # the mean of the signs

    def __init__(
        self,
        dim: int = 10,
        sigma: float | Array = 1.0,
        *,
        profile: str = "well",
        height: float = 1.0,
        seed: int = 0,
    ) -> None:
        if profile not in ("well", "ripple"):
            raise ValueError(f"profile must be 'well' or 'ripple', got {profile!r}")
        if not (np.all(np.asarray(sigma) >= 0) and np.all(np.isfinite(sigma))):
            raise ValueError(f"sigma must be finite and not negative, got {sigma!r}")
        self.dim, self.profile, self.height = dim, profile, height
        self.sigma = np.asarray(sigma, dtype=np.float64)
        self.scale = self.sigma[..., None] / math.sqrt(dim)  # s
        self.data = {"centre": np.random.default_rng(seed).uniform(-1, 1, dim)}
        self.constants = self._constants(float(self.sigma.max()))

    def _constants(self, sigma: float) -> Constants:
        s, h = sigma / math.sqrt(self.dim), self.height
        # For the ripple, (h + s) phi + s psi is a sinusoid of this amplitude, and so are its
        # derivatives: L and G are exact. For the well they are bounds.
        amplitude = math.hypot(h + s, s)
        slope, curvature, phi_range = amplitude, amplitude, 2.0
        if self.profile == "well":
            slope = min(amplitude, (h + s) * WELL_SLOPE + s)
            curvature = (h + s) * WELL_CURVATURE + s * WELL_TILT_CURVATURE
            phi_range = 1.0
        return Constants(curvature, slope * math.sqrt(self.dim), sigma, h * phi_range * self.dim)

    def sample(self, rng: np.random.Generator) -> tuple[Array, Array]:
        signs = 2.0 * rng.integers(2, size=(2, self.dim)) - 1
        return signs[0], signs[1]

    def loss(self, x: Any, xi: Any, data: Mapping[str, Any], xp: Any) -> Any:
        u = x - data["centre"]
        if self.profile == "well":
            phi, psi = u * u / (1 + u * u), u / (1 + u * u)
        else:
            phi, psi = 1 - xp.cos(u), xp.sin(u)
        s = float(self.scale[0]) if self.sigma.ndim == 0 else self.scale
        return (self.height * phi + s * (xi[0] * phi + xi[1] * psi)).sum(-1)

    def slopes(self, x: Array) -> tuple[Array, Array]:
        """Return phi' and psi' in each coordinate."""
        u = x - self.data["centre"]
        if self.profile == "ripple":
            return np.sin(u), np.cos(u)
        u_sq = u * u
        q = 1 / (1 + u_sq)
        q *= q
        return 2 * u * q, (1 - u_sq) * q

    def grad(self, x: Array, xi: Any) -> Array:
        return self.grad_from_slopes(self.slopes(x), xi)

    def grad_from_slopes(self, slopes: tuple[Array, Array], xi: Any) -> Array:
        """Return the gradient from the slopes, which all samples at a point share."""
        dphi, dpsi = slopes
        noise: Array = self.scale * (xi[0] * dphi + xi[1] * dpsi)
        return self.height * dphi + noise

    def start(self, rng: np.random.Generator | int = 0) -> Array:
        """Return a point at distance 1 from the centre in every coordinate."""
        signs = 2.0 * np.random.default_rng(rng).integers(2, size=self.dim) - 1
        x: Array = self.data["centre"] + signs
        return x
