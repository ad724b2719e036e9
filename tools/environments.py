"""`make test-versions`: run the tests on the oldest and the newest versions of dependencies.

    python tools/environments.py oldest between newest next benchmark

Each environment, under `.versions/`, has what pyproject.toml allows: the floors, something in
between, the newest releases, or the floors of the benchmark. The tests run against the wheel. The
results are rows of docs/results/versions.json and the table of docs/versions.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".versions"
ROWS = ROOT / "docs" / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"

LIBRARY = ("", "torch", "jax", "theory")  # extras for the optimizers' tests; "" is none
TRAINERS = (
    "accelerate", "keras", "lightning", "mlflow", "pytorch-optimizer", "skorch", "tensorboard",
    "wandb",
)  # fmt: skip
# They require torchvision, which is not needed here: installed without dependencies.
ALONE = ("fastai", "timm")
TOOLS = ("hatchling", "hypothesis", "psutil", "pytest")
SHOWN = ("numpy", "scipy", "torch", "jax", "optax")
# torch last: kernels that torch 2.4 compiles disable subnormal numbers for the whole process.
TESTS = (
    "jax", "theory", "test_rules.py", "test_untuned_rule.py", "test_reference.py",
    "test_package.py", "test_documents.py::test_code_blocks_run[README.md]", "torch",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """One line of the table.

    Attributes:
        python: The version of Python.
        oldest: Install every requirement of the library at its floor, else the newest version.
        pins: Additional requirements.
        trainers: Extras to install at their floors and to test.
        alone: The same, without dependencies.
        optional: Skip it if there is no such interpreter.
        benchmark: Install the floors of the benchmark, and run its tests alone.
    """

    python: str
    oldest: bool = False
    pins: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    optional: bool = False
    benchmark: bool = False


ENVIRONMENTS = {
    "oldest": Environment(
        "3.10",
        oldest=True,
        pins=("fastcore<1.8", "fastdownload", "fastprogress<1.1", "pandas"),  # for fastai
        trainers=TRAINERS,
        alone=ALONE,
    ),
    "between": Environment(
        "3.12",
        pins=("numpy==1.26.4", "scipy==1.13.1", "torch==2.6.0", "jax==0.6.2", "optax==0.2.5"),
        trainers=("huggingface",),  # transformers resumes a run with torch 2.6 or newer only
    ),
    "newest": Environment("3.13"),
    "next": Environment("3.14", optional=True),
    "benchmark": Environment(
        "3.11",
        benchmark=True,
        # pyarrow, a dependency of benchopt, needs a newer NumPy from 18 on.
        pins=("numpy==1.26.4", "scipy==1.13.1", "torch==2.13.0", "pyarrow<18"),
    ),
}
BENCHMARK = "benchmark"  # as an extra: the distribution of that name
BESIDE = {"trainers": "The trainers' tests", BENCHMARK: "The benchmark's tests"}


def requirements(extra: str) -> list[str]:
    """Return an extra's requirements without nested extras; "" is the package itself."""
    folder = ROOT / BENCHMARK if extra == BENCHMARK else ROOT
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    whole = extra in ("", BENCHMARK)
    found = project["dependencies"] if whole else project["optional-dependencies"][extra]
    return [need for need in found if not need.startswith("stormplus[")]


def floor(need: str) -> str:
    """Return torch==2.4 for torch>=2.4."""
    return need.replace(">=", "==")


def interpreter(version: str) -> str | None:
    """Return a Python of this version from the path or pyenv, else None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}")]
    candidates += sorted(str(path) for path in pyenv.glob(f"{version}.*/bin/python"))
    for candidate in filter(None, candidates):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return candidate
    return None


def make(name: str, environment: Environment, python: str) -> Path:
    """Return the environment's interpreter; create it unless it is up to date."""
    inside = FOLDER / name / "bin" / "python"
    needs = [need for extra in LIBRARY for need in requirements(extra)]
    if environment.benchmark:
        needs = list(map(floor, requirements(BENCHMARK)))
    if environment.oldest:
        needs = list(map(floor, needs))
    needs += [floor(need) for extra in environment.trainers for need in requirements(extra)]
    needs += [*environment.pins, *TOOLS]
    alone = [floor(need) for extra in environment.alone for need in requirements(extra)]
    wanted = "\n".join([python, *needs, *alone])
    ready = FOLDER / name / "ready.txt"
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        run(python, "-m", "venv", FOLDER / name)
        pip: tuple[object, ...] = (inside, "-m", "pip", "install", "--quiet")
        run(*pip, "--upgrade", "pip")
        if uv := shutil.which("uv"):  # faster
            pip = (uv, "pip", "install", "--quiet", "--no-config", "--python", inside)
        run(*pip, *needs)
        if alone:
            run(*pip, "--no-deps", *alone)
        ready.write_text(wanted)
    return inside


def install(inside: Path, wheels: Path, *folders: Path) -> None:
    """Build wheels in this environment and install them without dependencies."""
    shutil.rmtree(wheels, ignore_errors=True)
    pip = (inside, "-m", "pip")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, *folders)
    run(*pip, "install", "--quiet", "--no-deps", "--force-reinstall", *wheels.glob("*.whl"))


def run(*command: object, check: bool = True) -> int:
    print("+", *command, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment.pop("PYTHONPATH", None)  # test the wheel
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, check=False)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}")
    return done.returncode


def test(inside: Path, name: str, marks: str, *tests: str) -> dict[str, int]:
    """Run tests and return how many passed, were skipped and failed."""
    report = FOLDER / f"{name}.xml"
    report.unlink(missing_ok=True)
    where = [f"tests/{path}" for path in tests]
    run(inside, "-m", "pytest", "-m", marks, f"--junitxml={report}", *where, check=False)
    if not report.exists():
        raise SystemExit(f"{name}: pytest wrote no report")
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {"passed": total - skipped - failed, "skipped": skipped, "failed": failed}


def versions(inside: Path, names: list[str]) -> dict[str, str]:
    code = (
        "import json, platform, sys; from importlib.metadata import version;"
        "print(json.dumps({'python': platform.python_version()}"
        " | {name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [str(inside), "-c", code, *names], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def names_of(extras: tuple[str, ...]) -> list[str]:
    return [re.split(r"[>=<[]", need)[0] for extra in extras for need in requirements(extra)]


def commit() -> str:
    """Return the commit, with "changed" if the tested files differ from it."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmark", "tests", "pyproject.toml")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" changed" if changed else "")


def table(rows: dict[str, dict[str, dict[str, object]]]) -> str:
    """Return Markdown: a table for the library, a line each for trainers and benchmark.

    The rows have the versions of what they use, and how many tests passed.
    """
    order = [name for name in ENVIRONMENTS if name in rows]
    head = ["environment", "python", *SHOWN, "failed", "commit"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in (name for name in order if "library" in rows[name]):
        cells = rows[name]["library"]
        lines.append("| " + " | ".join([name, *(str(cells[key]) for key in head[1:])]) + " |")
    for name, part in product(order, BESIDE):
        if cells := rows[name].get(part, {}):
            lines += ["", f"{BESIDE[part]}, in *{name}*: {cells['failed']} failed."]
    return "\n".join(lines) + "\n"


def write(rows: dict[str, dict[str, dict[str, object]]]) -> None:
    ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    begin, end = "<!-- versions:begin -->\n", "<!-- versions:end -->\n"
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(before + begin + "\n" + table(rows) + "\n" + end + rest.split(end)[1])


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    bad = 0
    for name in names or list(ENVIRONMENTS):
        environment = ENVIRONMENTS[name]
        python = interpreter(environment.python)
        if python is None:
            message = f"{name}: no Python {environment.python} on the path or in pyenv"
            if not environment.optional:
                raise SystemExit(message)
            print(message + ": skipped")
            continue
        inside = make(name, environment, python)
        folders = [ROOT, ROOT / BENCHMARK] if environment.benchmark else [ROOT]
        install(inside, FOLDER / f"{name}-wheel", *folders)
        seen = versions(inside, names_of((BENCHMARK,) if environment.benchmark else LIBRARY))
        seen["commit"] = commit()
        kind, tests = (BENCHMARK, ("bench",)) if environment.benchmark else ("library", TESTS)
        row: dict[str, dict[str, object]] = {
            kind: {**seen, **test(inside, name, "not long", *tests)}
        }
        if environment.trainers:
            found = versions(inside, names_of(environment.trainers + environment.alone))
            found.pop("python")
            row["trainers"] = {**found, **test(inside, f"{name}-trainers", "long", "integrations")}
        rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
        write(rows | {name: row})
        bad += sum(int(str(part["failed"])) for part in row.values())
        print(json.dumps(row, indent=1))
    sys.exit(f"{bad} failed" if bad else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
