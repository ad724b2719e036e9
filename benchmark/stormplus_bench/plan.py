"""Expand a suite into its runs, before the first one starts.

A suite is a benchopt run configuration; benchopt itself expands its selectors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from benchopt.benchmark import Benchmark, _list_parametrized_classes

from stormplus.install import BENCH
from stormplus_bench.cli import did_you_mean
from stormplus_bench.own import described, read_method, read_workload
from stormplus_bench.rows import Key

FOLDER = Path(__file__).parent / "benchmark_stormplus"  # benchopt's benchmark
KEYS = ("objective", "dataset", "solver")


@dataclass(frozen=True)
class Plan:
    """A suite's runs, and what is skipped and why."""

    config: dict[str, Any]
    runs: list[Key]
    skipped: dict[str, str]

    @property
    def folders(self) -> set[Path]:
        """The folders of the user's files."""
        entries = [e for key in ("solver", "dataset") for e in self.config[key]]
        own = [entry["own"] for entry in entries if isinstance(entry, dict) and "own" in entry]
        return {Path(file).parent for options in own for file in options["file"]}

    def left(self, done: set[Key]) -> list[Key]:
        return [run for run in self.runs if run not in done]


def suites() -> dict[str, Path]:
    """Return the suites of the benchmark by name."""
    return {path.stem: path for path in sorted((FOLDER / "configs").glob("*.yml"))}


def read_suite(name: str) -> dict[str, Any]:
    """Return a suite by name, or from a file."""
    path = suites().get(name, Path(name))
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"no suite {name!r}{did_you_mean(name, suites())} Choose from {', '.join(suites())}, "
            "or give a file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(config, dict) or not {"dataset", "solver"} <= set(config):
        raise ValueError(f"{path} should have the keys dataset and solver, as benchopt's do")
    for key, value in config.items():
        if key not in KEYS:
            raise ValueError(
                f"{path}: {key} would be ignored; a suite has {', '.join(KEYS)}, the rest are "
                "options of the command"
            )
        if not isinstance(value, list) or not value:
            raise ValueError(f"{path}: {key} should be a list that is not empty, got {value!r}")
    return config


def with_own(
    config: dict[str, Any],
    solvers: Sequence[Path] = (),
    workloads: Sequence[Path] = (),
    seeds: int | None = None,
    *,
    alone: bool = False,
) -> dict[str, Any]:
    """Return the suite with the user's optimizers added and models in place of its data sets.

    `seeds` is a number of seeds, instead of the suite's; `alone` leaves out the suite's methods.

    Raises:
        ValueError: A file is wrong; the message says what it should have.
    """
    methods = {str(path.resolve()): read_method(str(path.resolve())) for path in solvers}
    models = [str(path.resolve()) for path in workloads]
    names = [method.name for method in methods.values()]
    names += [read_workload(file).name for file in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two files have the name {', '.join(twice)}: rename one of them")
    config = config | {"solver": [] if alone else list(config["solver"])}
    for file, method in methods.items():
        config["solver"].append({"own": {"file": [file], "lr": list(method.rates)}})
    if models:
        config["dataset"] = [{"own": {"file": models}}]
    if seeds is not None:
        config["objective"] = [{"Training loss": {"seed": list(range(seeds))}}]
    return config


def make_plan(config: dict[str, Any], methods: Sequence[str] = ()) -> Plan:
    """Expand a suite, or some of its methods, and take a gradient of each workload."""
    benchmark = Benchmark(FOLDER, no_cache=True)
    objectives = list(_instances(benchmark.check_objective_filters(config.get("objective"))))
    solvers = list(_instances(benchmark.check_solver_patterns(list(config["solver"]))))
    if methods:
        solvers = _only(solvers, methods)
        selected = [{s.name: {n: [getattr(s, n)] for n in type(s).parameters}} for s in solvers]
        config = config | {"solver": selected}
    plan = Plan(config, [], {})
    for dataset in _instances(benchmark.check_dataset_patterns(list(config["dataset"]))):
        data = dataset.get_data()
        workload = data["workload"]
        if workload is None:
            plan.skipped[str(dataset)] = data["reason"]
            continue
        try:
            model = workload.model(0).to(workload.device).train()
            workload.loss(model, next(workload.samples(0))).backward()
        except Exception as error:
            where = getattr(dataset, "file", str(dataset))
            raise ValueError(f"the first gradient fails: {described(error, where)}") from error
        for solver in solvers:
            if reason := solver.reason_to_skip(workload):
                plan.skipped[f"{solver.method} on {workload.name}"] = reason
                continue
            for objective in objectives:
                plan.runs.append(Key(workload.name, solver.method, solver.rate, objective.seed))
    # A default rate may be in the list of rates, too.
    return replace(plan, runs=list(dict.fromkeys(plan.runs)))


def _instances(classes: Any) -> Iterator[Any]:
    for instance, installed in _list_parametrized_classes(*classes):
        if not installed:
            raise ModuleNotFoundError(f"{instance} cannot be imported: {BENCH}")
        yield instance


def _only(solvers: list[Any], methods: Sequence[str]) -> list[Any]:
    """Return the solvers with these names, as in tables ("STORM+") or suites, and the user's."""
    names = dict.fromkeys(name for s in solvers for name in (s.name, s.method))
    for method in methods:
        if method.lower() not in map(str.lower, names):
            raise ValueError(
                f"no method {method!r}{did_you_mean(method, names)} This suite has "
                + ", ".join(dict.fromkeys(s.method for s in solvers))
            )
    chosen = set(map(str.lower, methods))
    return [s for s in solvers if s.name == "own" or {s.method.lower(), s.name.lower()} & chosen]
