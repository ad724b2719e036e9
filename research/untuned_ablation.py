"""Change one thing in Untuned's rule: `python research/untuned_ablation.py SEED...`.

Each constant is halved and doubled, and other forms take a formula's place. Rows go to
research/results/untuned_ablation.jsonl; research/untuned_study.py makes their table. Of the
interpolation y = 0.1 z + 0.9 x it is the weight of z that is halved and doubled. Language models
have only the forms that are meant for long runs, the long one with the first seed, and gradients
of pure noise those that forget; their `train_loss` is the distance travelled in units of the start.
"""

import json
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import parser
from untuned_cases import CASES

from stormplus import Untuned, untuned_rule
from stormplus.torch.kernels import plain
from stormplus_bench.train import catalogue
from stormplus_bench.train.long import LONG
from stormplus_bench.train.small_data import SMALL_DATA
from stormplus_bench.train.steppers import AtAverage
from stormplus_bench.train.training import Training

ROWS = Path(__file__).parent / "results" / "untuned_ablation.jsonl"
WORKLOADS = {
    **{name: catalogue.EVERY[name] for name in ("autoencoder-mnist", "cnn-mnist", "bncnn-cifar10")},
    **SMALL_DATA,
}
LANGUAGE = {
    "gpt-shakespeare": catalogue.EVERY["gpt-shakespeare"],
    "gpt-shakespeare-long": LONG["gpt-shakespeare"],
}
AS_IS = "as it is"
NOISE = {name: CASES[name] for name in CASES if "noise" in name}
# What a variant replaces, by dotted name, and what takes its place.
Changes = dict[str, Any]
RULE = "stormplus.untuned_rule"
TORCH = "stormplus.torch"


def start(factor: float) -> Changes:
    return {f"{RULE}.initial_distance": lambda ceiling: ceiling / (200 * factor)}


def bound(factor: float) -> Changes:
    return {
        f"{RULE}.max_step_size": lambda ceiling, evidence: ceiling / (60 * factor) * (1 + evidence)
    }


def exponent(factor: float) -> Changes:
    def grown(displacement: Any, ratio: Any) -> Any:
        return displacement * (ratio.clip(1, 2) ** (2 * factor)).clip(1, 4)

    return {f"{RULE}.grown_distance": grown}


def largest_growth(factor: float) -> Changes:
    def grown(displacement: Any, ratio: Any) -> Any:
        return displacement * (ratio.clip(1, 1e6) ** 2).clip(1, 4 * factor)

    return {f"{RULE}.grown_distance": grown}


def gradients(factor: float) -> Changes:
    k = 3 * factor
    return {f"{RULE}.grad_weight": lambda t: k / (t + k - 1)}


def iterates(factor: float) -> Changes:
    k = 9 * factor
    return {f"{RULE}.average_weight": lambda t: k / (t + k - 1)}


def scale(factor: float) -> Changes:
    natural = untuned_rule.natural_scale
    return {f"{RULE}.natural_scale": lambda inputs: natural(inputs) * factor}


def ceiling(factor: float) -> Changes:
    return {
        f"{RULE}.distance_ceiling": lambda start, natural, xp: xp.maximum(start, natural) * factor
    }


def step_exponent(factor: float) -> Changes:
    def next_step_size(scalars: Any, xp: Any) -> Any:
        eta = scalars.distance / (1 + scalars.effective_steps.value) ** (factor / 2)
        return xp.minimum(eta, untuned_rule.max_step_size(scalars.ceiling, scalars.evidence))

    return {f"{RULE}.next_step_size": next_step_size}


def evidence_exponent(factor: float) -> Changes:
    def next_evidence(scalars: Any, counts: Any, agreement: Any) -> Any:
        return scalars.evidence + counts * agreement ** (2 * factor)

    return {f"{RULE}.next_evidence": next_evidence}


def ceiling_exponent(factor: float) -> Changes:
    """Cap r at R (1 + A)^(factor / 2), with the same E."""
    least_ratio = untuned_rule.least_ratio

    def next_evidence(scalars: Any, counts: Any, agreement: Any) -> Any:
        return scalars.evidence + counts * ((1 + agreement) ** (1 / factor) - 1) ** 2

    return {
        f"{RULE}.least_ratio": lambda *args: least_ratio(*args) ** factor,
        f"{RULE}.next_evidence": next_evidence,
    }


def clip(factor: float) -> Changes:
    coefficients = Untuned._coefficients

    def with_limit(*args: Any) -> Any:
        found = coefficients(*args)
        return found._replace(max_move=factor * found.max_move)

    return {f"{TORCH}.untuned.Untuned._coefficients": with_limit}


def interpolation(factor: float) -> Changes:
    b = 1 - 0.1 * factor
    return {
        f"{RULE}.INTERPOLATION": b,
        f"{TORCH}.kernels.plain.INTERPOLATION": b,
        f"{TORCH}.kernels.native.supports": lambda *tensors: False,  # it has the constant in C
    }


def forgetting(exponent: float) -> Changes:
    """Let E fall as 1 / c^exponent, c the effective steps, while the steps do not agree."""

    def forgotten(scalars: Any, counts: Any, agreement: Any) -> Any:
        steps = 1 + scalars.effective_steps.value
        kept = (steps / (steps + counts)) ** exponent
        return scalars.evidence * kept + counts * agreement**2

    return {f"{RULE}.next_evidence": forgotten}


def falling_where_turning() -> Changes:
    """Let E of a tensor fall as 1 / c while its displacement is below that of noise: rho < 1/2."""
    least_ratio, seen = untuned_rule.least_ratio, []

    def recorded(ratio: Any, *args: Any) -> Any:
        seen[:] = [ratio]
        return least_ratio(ratio, *args)

    def next_evidence(scalars: Any, counts: Any, agreement: Any) -> Any:
        steps = 1 + scalars.effective_steps.value
        kept = np.where(seen[0] < 0.5, steps / (steps + counts), 1.0)
        return scalars.evidence * kept + counts * agreement**2

    return {f"{RULE}.least_ratio": recorded, f"{RULE}.next_evidence": next_evidence}


def agreement_since_doubling() -> Changes:
    """Measure A from where z was when t last was a power of two, so that it forgets the start."""
    measure, least_ratio, after_step = (
        plain.squared_displacement,
        untuned_rule.least_ratio,
        untuned_rule.after_step,
    )
    anchors: dict[int, Any] = {}  # by tensor: where z and the walk were
    recent: dict[int, Any] = {}  # the mean squared distance from there, and z

    def measured(group: Any, i: int) -> Any:
        at = group.coordinates[i].index
        x, e = (t[i].reshape(-1)[at] for t in (group.params, group.z_minus_x))
        z, index = x + plain.INTERPOLATION * e, group.indices[i]
        anchor, _ = anchors.setdefault(index, (group.initial_sample[i].clone(), 0.0))
        recent[index] = float((z - anchor).square().mean()), z
        return measure(group, i)

    def after(scalars: Any, **measurements: Any) -> Any:
        def least(ratio: Any, walk: Any, *args: Any) -> Any:
            ratio, t = ratio.copy(), int(scalars.step.max()) + 1
            for index, (distance, z) in recent.items():
                since = max(walk[index] - anchors[index][1], 1e-30)
                ratio[index] = distance / scalars.ceiling[index] ** 2 / since
                if t & (t - 1) == 0:
                    anchors[index] = z, walk[index]
            return least_ratio(ratio, walk, *args)

        with mock.patch(f"{RULE}.least_ratio", least):
            return after_step(scalars, **measurements)

    return interpolation(1.0) | {
        f"{TORCH}.kernels.plain.squared_displacement": measured,
        f"{RULE}.after_step": after,
    }


def growing_interpolation(exponent: float) -> Changes:
    """Let the weight of z in y fall as 0.1 (1 + t / 100)^-exponent."""

    def weight(t: float) -> float:
        return 0.1 * (1 + t / 100) ** -exponent

    def update(y: Any, g: Any, e: Any, s: Any, coefficients: Any) -> Any:
        t = float(coefficients.step)
        plain.INTERPOLATION = 1 - weight(t - 1)
        y, new_e, s, u = untuned_update(y, g, e, s, coefficients)
        # From y = x + (1 - b) e to the next b, with which the rest of the step is done.
        y = y + (weight(t) - weight(t - 1)) * new_e
        plain.INTERPOLATION = untuned_rule.INTERPOLATION = 1 - weight(t)
        return y, new_e, s, u

    untuned_update = plain.untuned_update
    return interpolation(1.0) | {f"{TORCH}.kernels.plain.untuned_update": update}


def fading_iterate(rate: float) -> Changes:
    """Let z decay towards x: z <- z - k (z - x), with k = rate / (t + 8)."""

    def update(y: Any, g: Any, e: Any, s: Any, coefficients: Any) -> Any:
        y, e, s, u = untuned_update(y, g, e, s, coefficients)
        k = rate / (float(coefficients.step) + 8)
        return y - (1 - plain.INTERPOLATION) * k * e, (1 - k) * e, s, u

    untuned_update = plain.untuned_update
    return interpolation(1.0) | {f"{TORCH}.kernels.plain.untuned_update": update}


def grown_by(exponent: float) -> Changes:
    """Let r grow by the ratio to this power, without a limit other than the ceiling."""

    def grown(displacement: Any, ratio: Any) -> Any:
        return displacement * ratio.clip(1) ** exponent

    return {f"{RULE}.grown_distance": grown}


def own_agreement() -> Changes:
    """Let each tensor have its own A."""

    def agreement(ratio: Any, walk: Any, eligible: Any, xp: Any) -> Any:
        return xp.where(walk > untuned_rule.INITIAL_WALK, ratio, 1.0).clip(1.0)

    return {f"{RULE}.least_ratio": agreement}


def least_of_all() -> Changes:
    """Take the least agreement over vectors, too."""
    return {f"{RULE}.eligible_tensors": lambda axes: [True] * len(axes)}


CONSTANTS = {
    "200 (start)": start,
    "60 (bound)": bound,
    "2 (exponent)": exponent,
    "4 (largest growth)": largest_growth,
    "3 (gradients)": gradients,
    "9 (iterates)": iterates,
    "1/sqrt(m)": scale,
    "R": ceiling,
    "0.1 (interpolation)": interpolation,
    "1/2 (of 1 + c)": step_exponent,
    "2 (of A)": evidence_exponent,
    "1/2 (of 1 + A)": ceiling_exponent,
    "r (clip)": clip,
}

FORMS = {
    "E falls as 1/sqrt(c)": partial(forgetting, 0.5),
    "E falls as 1/c": partial(forgetting, 1.0),
    "E falls as 1/c where rho < 1/2": falling_where_turning,
    "A since the last doubling of t": agreement_since_doubling,
    "growth max(1, rho)": partial(grown_by, 1.0),
    "growth max(1, rho)^2": partial(grown_by, 2.0),
    "A of each tensor": own_agreement,
    "A over vectors, too": least_of_all,
}
FOR_LONG_RUNS = {
    "weight of z falls as 1/sqrt(t)": partial(growing_interpolation, 0.5),
    "weight of z falls as 1/t": partial(growing_interpolation, 1.0),
    "z decays towards x": partial(fading_iterate, 3.0),
}


def run(constant: str, factor: float, name: str, seed: int) -> dict[str, Any]:
    changed: Changes = {}
    if constant in CONSTANTS:
        changed = CONSTANTS[constant](factor)
    elif constant != AS_IS:
        changed = (FORMS | FOR_LONG_RUNS)[constant]()
    with ExitStack() as stack:
        for target, new in changed.items():
            stack.enter_context(mock.patch(target, new))
        workload = (WORKLOADS | LANGUAGE | NOISE)[name]()
        workload.fractions = (0, 1)
        training = Training(workload, lambda t: AtAverage(Untuned(t.parameters)), seed).finish()
    losses = ("train_loss",) if name in NOISE else ("train_loss", "valid_loss")
    ends = {key: training.curve[key][-1] for key in losses}
    return {"constant": constant, "factor": factor, "workload": name, "seed": seed, **ends}


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main(seeds: list[int]) -> None:
    torch.set_num_threads(1)
    for_long_runs = [(name, 1.0) for name in (AS_IS, *FOR_LONG_RUNS)]
    variants = [(name, f) for name in CONSTANTS for f in (0.5, 2.0)]
    variants += [(name, 1.0) for name in FORMS] + for_long_runs
    keys = list(product(variants, WORKLOADS, seeds))
    keys += product(for_long_runs, ["gpt-shakespeare"], seeds)
    keys += product([(name, 1.0) for name in (AS_IS, *FORMS)], NOISE, seeds)
    keys += product(for_long_runs, ["gpt-shakespeare-long"], seeds[:1])
    for (constant, factor), name, seed in keys:
        key = (constant, factor, name, seed)
        if key not in {(r["constant"], r["factor"], r["workload"], r["seed"]) for r in read()}:
            with ROWS.open("a") as file:
                file.write(json.dumps(run(*key)) + "\n")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("seeds", nargs="+", type=int)
    main(options.parse_args().seeds)
