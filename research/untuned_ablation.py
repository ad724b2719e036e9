"""Change one thing in Untuned's rule: `python research/untuned_ablation.py SEED...`.

Each constant is halved and doubled, and other forms take a formula's place. Rows go to
research/results/untuned_ablation.jsonl; research/untuned_study.py makes their table.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import parser

from stormplus import Untuned, untuned_rule
from stormplus_bench.train import catalogue
from stormplus_bench.train.steppers import AtAverage
from stormplus_bench.train.training import Training

ROWS = Path(__file__).parent / "results" / "untuned_ablation.jsonl"
WORKLOADS = ("autoencoder-mnist", "cnn-mnist", "bncnn-cifar10")
AS_IS = "as it is"


def start(factor: float) -> dict[str, Callable[..., Any]]:
    return {"initial_distance": lambda ceiling: ceiling / (200 * factor)}


def bound(factor: float) -> dict[str, Callable[..., Any]]:
    return {"max_step_size": lambda ceiling, evidence: ceiling / (60 * factor) * (1 + evidence)}


def exponent(factor: float) -> dict[str, Callable[..., Any]]:
    def grown(displacement: Any, ratio: Any) -> Any:
        return displacement * (ratio.clip(1, 2) ** (2 * factor)).clip(1, 4)

    return {"grown_distance": grown}


def largest_growth(factor: float) -> dict[str, Callable[..., Any]]:
    def grown(displacement: Any, ratio: Any) -> Any:
        return displacement * (ratio.clip(1, 1e6) ** 2).clip(1, 4 * factor)

    return {"grown_distance": grown}


def gradients(factor: float) -> dict[str, Callable[..., Any]]:
    k = 3 * factor
    return {"grad_weight": lambda t: k / (t + k - 1)}


def iterates(factor: float) -> dict[str, Callable[..., Any]]:
    k = 9 * factor
    return {"average_weight": lambda t: k / (t + k - 1)}


def scale(factor: float) -> dict[str, Callable[..., Any]]:
    natural = untuned_rule.natural_scale
    return {"natural_scale": lambda inputs: natural(inputs) * factor}


def forgetting(exponent: float) -> dict[str, Callable[..., Any]]:
    """Let E fall as 1 / c^exponent, c the effective steps, while the steps do not agree."""

    def forgotten(scalars: Any, counts: Any, agreement: Any) -> Any:
        steps = 1 + scalars.effective_steps.value
        kept = (steps / (steps + counts)) ** exponent
        return scalars.evidence * kept + counts * agreement**2

    return {"next_evidence": forgotten}


def grown_by(exponent: float) -> dict[str, Callable[..., Any]]:
    """Let r grow by the ratio to this power, without a limit other than the ceiling."""

    def grown(displacement: Any, ratio: Any) -> Any:
        return displacement * ratio.clip(1) ** exponent

    return {"grown_distance": grown}


CONSTANTS = {
    "200 (start)": start,
    "60 (bound)": bound,
    "2 (exponent)": exponent,
    "4 (largest growth)": largest_growth,
    "3 (gradients)": gradients,
    "9 (iterates)": iterates,
    "1/sqrt(m)": scale,
}

FORMS = {
    "E falls as 1/sqrt(c)": forgetting(0.5),
    "E falls as 1/c": forgetting(1.0),
    "growth max(1, rho)": grown_by(1.0),
    "growth max(1, rho)^2": grown_by(2.0),
}


def run(constant: str, factor: float, name: str, seed: int) -> dict[str, Any]:
    changed = CONSTANTS[constant](factor) if constant in CONSTANTS else FORMS.get(constant, {})
    before = {key: getattr(untuned_rule, key) for key in changed}
    for key, function in changed.items():
        setattr(untuned_rule, key, function)
    try:
        workload = catalogue.EVERY[name]()
        workload.fractions = (0, 1)
        training = Training(workload, lambda t: AtAverage(Untuned(t.parameters)), seed).finish()
    finally:
        for key, function in before.items():
            setattr(untuned_rule, key, function)
    ends = {key: training.curve[key][-1] for key in ("train_loss", "valid_loss")}
    return {"constant": constant, "factor": factor, "workload": name, "seed": seed, **ends}


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main(seeds: list[int]) -> None:
    torch.set_num_threads(1)
    variants = [(name, f) for name in CONSTANTS for f in (0.5, 2.0)]
    variants += [(name, 1.0) for name in (AS_IS, *FORMS)]
    for name in WORKLOADS:
        for constant, factor in variants:
            for seed in seeds:
                key = (constant, factor, name, seed)
                done = {(r["constant"], r["factor"], r["workload"], r["seed"]) for r in read()}
                if key not in done:
                    with ROWS.open("a") as file:
                        file.write(json.dumps(run(*key)) + "\n")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("seeds", nargs="+", type=int)
    main(options.parse_args().seeds)
