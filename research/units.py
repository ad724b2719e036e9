"""The unit of the gradient: the constant kappa of the main theorem, and a map of lr and unit.

    python research/units.py [kappa | map]

kappa: f(x; xi) = h (1 - cos x) + xi x with xi = -1 or 1 meets every assumption, with L = h, B = 2h,
sigma = 1 and G = 1 + h. As printed, kappa = B^(3/4) + L^(3/2) goes to 0 with h. With unit = lr = 1,
T^(1/3) E|grad f(x_bar_T)| goes to (3/2) / sqrt(pi) = 0.846 for every h: eps_t has the variance
a_t / 2 with a_t = t^(-2/3), x follows so that grad f(x_t) = -eps_t, and the mean over t <= T of
E|eps_t| = sqrt(a_t / pi) is 0.846 T^(-1/3). Beside it, unit = sqrt(BL) and lr = sqrt(B/L), the best
that the proof allows (docs/theory.md).

map: the share of the loss that is left after 1,000 samples over a grid of lr and unit, on two data
sets; lr is given times the distance from x_1 to the minimum, unit times the first gradient's norm.

Writes docs/results/units.json and docs/figures/units.png; a minute each.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from common import DOCS, WIDTH, load, parser, save, versions
from matplotlib.figure import Figure
from rates import corrected_momentum, measure
from scipy.optimize import minimize as scipy_minimize
from sklearn.datasets import load_diabetes

from stormplus import minimize
from stormplus.rules import StormPlusRule
from stormplus.theory.bounds import main_theorem_constants
from stormplus.theory.problems import BoundedNonConvex, breast_cancer

HEIGHTS = (0.3, 0.1, 0.03)
PREDICTED = 1.5 / math.sqrt(math.pi)
STEPS, SEEDS, BATCH = 1000, 2, 16
LRS = np.geomspace(1e-3, 1e1, 9)  # times the distance from x_1 to the minimum
UNITS = np.geomspace(1e-3, 1e3, 7)  # times |g_1|


class TiltedRipples(BoundedNonConvex):
    """Several heights at once; the samples differ only by a tilt."""

    def __init__(self, heights: Any) -> None:
        super().__init__(1, np.ones((len(heights), 1)), profile="ripple")
        self.height = np.asarray(heights)[:, None, None]  # type: ignore[assignment]

    def grad_from_slopes(self, slopes: Any, xi: Any) -> Any:
        return self.height * slopes[0] + xi[1]


def scaled_means(
    checkpoints: Any, seeds: tuple[int, ...], heights: Any, lr: Any = 1.0, unit: Any = 1.0
) -> Any:
    """Return T^(1/3) E|grad f(x_bar_T)| over (checkpoint, height)."""
    method = partial(corrected_momentum, rule=StormPlusRule(), lr=lr, unit=unit)
    mean, _, _ = measure(method, TiltedRipples(heights), seeds, checkpoints)
    return mean.mean(-1) * np.asarray(checkpoints)[:, None] ** (1 / 3)


def kappa() -> dict[str, Any]:
    """Return the table of the counterexample, with the paper's unit and with the best one."""
    T, seeds, h = [10**k for k in range(2, 6)], tuple(range(40)), np.array(HEIGHTS)
    value_range, smoothness = 2 * h, h
    unit = np.sqrt(value_range * smoothness)[:, None]
    lr = np.sqrt(value_range / smoothness)[:, None]
    printed, best = scaled_means(T, seeds, h), scaled_means(T, seeds, h, lr, unit)
    rows = [
        {
            "h": height,
            "kappa as printed": main_theorem_constants(
                height, 1 + height, 2 * height, as_printed=True
            ).kappa,
            "(BL)^(1/3)": float((2 * height**2) ** (1 / 3)),
            "unit 1, lr 1": printed[:, i].round(3).tolist(),
            "unit sqrt(BL), lr sqrt(B/L)": best[:, i].round(3).tolist(),
        }
        for i, height in enumerate(HEIGHTS)
    ]
    for row in rows:
        print(row, flush=True)
    return {"T": T, "seeds": 40, "predicted limit, unit 1": round(PREDICTED, 3), "rows": rows}


def least_squares() -> tuple[Any, Any, int]:
    """Return grad, value and the number of rows of MSE on the diabetes data, raw targets."""
    bunch = load_diabetes(scaled=False)
    a = np.column_stack([bunch.data / np.abs(bunch.data).max(0), np.ones(len(bunch.data))])
    y = bunch.target

    def grad(x: Any, xi: Any) -> Any:
        return 2 * a[xi].T @ (a[xi] @ x - y[xi]) / len(xi)

    return grad, lambda x: float(np.mean((a @ x - y) ** 2)), len(y)


def one_map(grad: Any, value: Any, n: int, dim: int) -> dict[str, Any]:
    """Return the share of f(x_1) - min f that is left, over (unit, lr), from x_1 = 0."""
    x0, everything = np.zeros(dim), np.arange(n)
    best = scipy_minimize(value, x0, jac=lambda x: grad(x, everything), method="BFGS")
    distance = float(np.linalg.norm(best.x))
    first = float(np.mean([np.linalg.norm(grad(x0, i)) for i in everything.reshape(-1, 1)]))

    def run(lr: float, unit: float, seed: int) -> float:
        def sample(rng: np.random.Generator) -> Any:
            return rng.integers(n, size=BATCH)

        options = {"lr": lr * distance, "unit": unit * first, "rng": seed}
        try:
            return value(minimize(grad, x0, sample, STEPS, **options).x)  # type: ignore[arg-type]
        except FloatingPointError:  # diverged
            return math.inf

    left = [
        [np.mean([run(lr, unit, seed) for seed in range(SEEDS)]) - best.fun for lr in LRS]
        for unit in UNITS
    ]
    paper = np.mean([run(1 / distance, 1 / first, seed) for seed in range(SEEDS)]) - best.fun
    whole = value(x0) - best.fun
    return {
        "first gradient": round(first, 3),
        "distance": round(distance, 3),
        "left, unit 1, lr 1": float(f"{paper / whole:.3g}"),
        "left": [[float(f"{v / whole:.3g}") for v in row] for row in left],
    }


def maps() -> dict[str, Any]:
    cancer = breast_cancer()
    grad, value, n = least_squares()
    return {
        "lr / distance": LRS.tolist(),
        "unit / |g_1|": UNITS.tolist(),
        "steps": STEPS,
        "breast cancer, logistic": one_map(cancer.grad, cancer.full_value, 569, cancer.dim),
        "diabetes, least squares": one_map(grad, value, n, 11),
    }


def edges(centres: Any) -> Any:
    """Return the edges of cells around a geometric grid."""
    half = math.sqrt(centres[1] / centres[0])
    return np.append(centres / half, centres[-1] * half)


def draw(found: dict[str, Any]) -> None:
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    image = None
    for axis, name in zip(panels, ("breast cancer, logistic", "diabetes, least squares")):
        part = found[name]
        left = np.clip(np.nan_to_num(np.array(part["left"]), nan=np.inf), 1e-5, 10)
        image = axis.pcolormesh(
            edges(LRS), edges(UNITS), np.log10(left), cmap="viridis_r", vmin=-4, vmax=1
        )
        axis.set(xscale="log", yscale="log", xlabel="lr / distance to the minimum")
        axis.set_title(f"{name}, $|g_1|$ = {part['first gradient']:.3g}", fontsize=9)
        axis.axhline(1, color="white", linestyle="--")
        star = [1 / part["distance"]], [1 / part["first gradient"]]
        axis.plot(*star, "*", color="red", markersize=12, clip_on=False)
    panels[0].set_ylabel("unit / $|g_1|$")
    figure.colorbar(image, ax=panels, label="log10 of the share of the loss that is left")
    figure.savefig(DOCS / "figures" / "units.png", dpi=130)


def main() -> None:
    options, parts = parser(__doc__), {"kappa": kappa, "map": maps}
    options.add_argument("part", nargs="?", choices=parts)
    wanted, found = options.parse_args().part, load("units.json")
    for part in [wanted] if wanted else parts:
        found[part] = parts[part]()
        save("units.json", found | {"versions": versions()})
    if "map" in found:
        draw(found["map"])


if __name__ == "__main__":
    main()
