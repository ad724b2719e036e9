"""What a suite would run: every run by its key, before the first one starts.

A suite is a benchopt run configuration, so `benchopt run FOLDER --config FILE` understands it
too. Here its selectors are expanded by benchopt itself, never by a second parser.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from benchopt.benchmark import Benchmark, _list_parametrized_classes

from stormplus.install import BENCH
from stormplus_bench import rows
from stormplus_bench.own import fingerprint, read_method, read_workload
from stormplus_bench.rows import Key

FOLDER = Path(__file__).parent / "benchmark_stormplus"  # what benchopt runs
KEYS = ("objective", "dataset", "solver")
CALIBRATION = 12  # gradient evaluations timed to project a total


class BadSuite(ValueError):
    """A suite that does not exist or cannot be read."""


@dataclass(frozen=True)
class Run:
    """One run that a suite asks for."""

    workload: str
    method: str
    lr: float
    seed: int
    budget: int  # gradient evaluations

    @property
    def key(self) -> Key:
        return self.workload, self.method, self.lr, self.seed


@dataclass(frozen=True)
class Plan:
    """A suite's runs, what is skipped and why, and seconds of one gradient a workload."""

    config: dict[str, Any]
    runs: list[Run]
    skipped: dict[str, str]
    seconds: dict[str, float]

    def left(self, done: set[Key]) -> list[Run]:
        return [run for run in self.runs if run.key not in done]

    def projected(self, runs: list[Run], jobs: int) -> float:
        """Seconds, for `jobs` runs side by side."""
        return sum(self.seconds[run.workload] * run.budget for run in runs) / jobs


def suites() -> dict[str, Path]:
    """The suites that ship with the benchmark, by name."""
    return {path.stem: path for path in sorted((FOLDER / "configs").glob("*.yml"))}


def read_suite(name: str) -> dict[str, Any]:
    """A suite by its name, or from a file of one's own."""
    path = suites().get(name, Path(name))
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise BadSuite(
            f"there is no suite {name!r}: choose from {', '.join(suites())}, or give a file"
        ) from None
    except yaml.YAMLError as error:
        raise BadSuite(f"{path} is not YAML: {error}") from None
    if not isinstance(config, dict) or not {"dataset", "solver"} <= set(config):
        raise BadSuite(f"{path} should have the keys dataset and solver, as benchopt's do")
    if unknown := sorted(set(config) - set(KEYS)):
        raise BadSuite(
            f"{path}: {', '.join(unknown)} would be ignored; a suite has {', '.join(KEYS)}, and "
            "everything else is an option of the command"
        )
    for key, value in config.items():
        if not isinstance(value, list) or not value:
            raise BadSuite(f"{path}: {key} should be a list with something in it, got {value!r}")
    return config


def with_own(
    config: dict[str, Any],
    solvers: Sequence[Path] = (),
    workloads: Sequence[Path] = (),
    seeds: int | None = None,
    *,
    alone: bool = False,
) -> dict[str, Any]:
    """A suite with optimizers of one's own added, on models of one's own instead of its data sets.

    Args:
        config: The suite.
        solvers: Files of optimizers.
        workloads: Files of models.
        seeds: How many, instead of the suite's.
        alone: Whether to leave out the suite's methods.

    Raises:
        ValueError: A file lacks something; the message says what it should have.
    """
    config = dict(config)
    methods = {str(path.resolve()): read_method(str(path.resolve())) for path in solvers}
    names = [method.name for method in methods.values()]
    names += [read_workload(str(path.resolve())).name for path in workloads]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two files have the name {', '.join(twice)}: rename one of them")
    # The default is asked for as such, so that its rows say so.
    config["solver"] = [
        *([] if alone else config["solver"]),
        *({"own": {"file": [f], "lr": [None, *m.rates[1:]]}} for f, m in methods.items()),
    ]
    if workloads:
        config["dataset"] = [{"own": {"file": [str(path.resolve()) for path in workloads]}}]
    if seeds is not None:
        config["objective"] = [{"Training loss": {"seed": list(range(seeds))}}]
    return config


def check_unchanged(journal: Path, solvers: Sequence[Path], workloads: Sequence[Path]) -> None:
    """Raise a ValueError if the journal has runs of another version of one's own files."""
    for kind, files in (("method", solvers), ("workload", workloads)):
        for path in map(Path.resolve, files):
            name = (read_method if kind == "method" else read_workload)(str(path)).name
            if rows.versions_of(journal, kind, name) - {fingerprint(str(path))}:
                raise ValueError(
                    f"{path} has changed since runs of {name} were written to {journal}, or they "
                    "are of another file: give another --output, or the changed one a new name"
                )


def make_plan(config: dict[str, Any], threads: int = 1) -> Plan:
    """Expand the selectors of a configuration and time a few gradients of each workload."""
    torch.set_num_threads(threads)
    benchmark = Benchmark(FOLDER, no_cache=True)
    objectives = list(_instances(benchmark.check_objective_filters(config.get("objective"))))
    solvers = list(_instances(benchmark.check_solver_patterns(list(config["solver"]))))
    plan = Plan(config, [], {}, {})
    for dataset in _instances(benchmark.check_dataset_patterns(list(config["dataset"]))):
        data = dataset.get_data()
        workload = data["workload"]
        if workload is None:
            plan.skipped[str(dataset)] = data["reason"]
            continue
        try:
            plan.seconds[workload.name] = _seconds_a_gradient(workload)
        except Exception as error:
            raise ValueError(
                f"{workload.name}: a first gradient fails with {type(error).__name__}: {error}"
            ) from error
        for objective in objectives:
            for solver in solvers:
                skip, reason = solver.applies(workload)
                if skip:
                    plan.skipped[f"{solver.method} on {workload.name}"] = reason
                    continue
                lr = solver.default_lr if solver.lr is None else solver.lr
                budget = workload.budget * (solver.price if workload.counts == "samples" else 1)
                run = Run(workload.name, solver.method, lr, objective.seed, budget)
                if run not in plan.runs[-2 * len(solvers) :]:  # a default may be on the grid
                    plan.runs.append(run)
    return plan


def _instances(classes: Any) -> Iterator[Any]:
    for instance, installed in _list_parametrized_classes(*classes):
        if not installed:
            raise ModuleNotFoundError(f"{instance} cannot be imported: {BENCH}")
        yield instance


def _seconds_a_gradient(workload: Any) -> float:
    model, samples = workload.model(0).to(workload.device), workload.samples(0)
    model.train()
    start = time.perf_counter()
    for k in range(CALIBRATION):
        if k == 2:  # the first ones warm up
            start = time.perf_counter()
        workload.loss(model, next(samples)).backward()
    return (time.perf_counter() - start) / (CALIBRATION - 2)
