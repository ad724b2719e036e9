"""The results on disk: `FOLDER/methods/NAME.json`, one file a method, written when it ends.

These files are what an experiment that was interrupted goes on from, and what is drawn. A file
has its name only when it is whole. One folder holds one plan: other results are refused, not
mixed in.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from stormplus.files import write_whole
from stormplus.theory.problems.base import Array
from stormplus.theory.rates.experiment import METHODS, Plan, Result
from stormplus.theory.rates.report import summary, table

FORMAT, VERSION = "stormplus-rates", 1
WRITTEN = ("rates.json", "rates_summary.json", "rates.md", "rates.png")
# What a damaged file may do to those who read it.
_BROKEN = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)


def part(folder: Path, name: str) -> Path:
    """Where a method's result is."""
    return folder / "methods" / f"{name}.json"


def save(result: Result, plan: Plan, folder: Path) -> None:
    """Write one method's result. Numbers are read back bit by bit."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "plan": asdict(plan),
        **asdict(result),
        "mean": result.mean.tolist(),
        "square": result.square.tolist(),
    }
    write_whole(part(folder, result.method), json.dumps(content) + "\n")


def load(folder: Path, plan: Plan) -> dict[str, Result]:
    """The results that are there, in the order of `METHODS`; none is fine.

    Raises:
        ValueError: A file is damaged, or of another plan or version; the message says what to do.
    """
    found = {}
    for name in METHODS:
        file = part(folder, name)
        if file.exists():
            found[name], there = _load_part(file, name)
            if there != plan:
                raise ValueError(
                    f"{file} is of another plan, it differs in {_differences(there, plan)}. Plans "
                    f"are not mixed: give another --output, or delete {file.parent} to start anew"
                )
    return found


def read(folder: Path) -> tuple[dict[str, Result], Plan]:
    """All that a folder holds, to draw it again without running it again.

    Without files of single methods, `rates.json` and `rates_summary.json` do as well.

    Raises:
        ValueError: Nothing is there, or what is there cannot be used.
    """
    for name in METHODS:
        if part(folder, name).exists():
            plan = _load_part(part(folder, name), name)[1]
            return load(folder, plan), plan
    files = folder / "rates.json", folder / "rates_summary.json"
    if not all(file.exists() for file in files):
        raise ValueError(
            f"no results in {folder}: give --output the folder that has them, or leave out "
            "--redraw to run the methods"
        )
    rows, told = (_json(file) for file in files)
    try:
        return _from_rows(rows, told)
    except _BROKEN as error:
        raise ValueError(
            f"{files[0]} and {files[1].name} are damaged or do not fit each other "
            f"({_reason(error)}): delete them and run the methods again"
        ) from error


def raw_rows(results: Mapping[str, Result], plan: Plan) -> list[dict[str, Any]]:
    """One flat row a method, sigma and seed; `mean` and `square` are over the checkpoints."""
    return [
        {
            "method": name,
            "sigma": sigma,
            "seed": seed,
            "T": plan.checkpoints.tolist(),
            "mean": result.mean[:, j, k].tolist(),
            "square": result.square[:, j, k].tolist(),
        }
        for name, result in results.items()
        for j, sigma in enumerate(plan.sigmas)
        for k, seed in enumerate(plan.seeds)
    ]


def write(results: dict[str, Result], plan: Plan, folder: Path) -> list[Path]:
    """Write `rates.json` (raw rows), `rates_summary.json`, `rates.md` and `rates.png`."""
    files = [folder / name for name in WRITTEN]
    write_whole(files[0], json.dumps(raw_rows(results, plan)) + "\n")
    write_whole(files[1], json.dumps(summary(results, plan), indent=1) + "\n")
    write_whole(files[2], table(results, plan) + "\n")
    from stormplus.theory.rates.figure import draw  # without matplotlib the rest is written

    picture = io.BytesIO()
    draw(results, plan).savefig(picture, format="png", dpi=130)
    write_whole(files[3], picture.getvalue())
    return files


def _load_part(file: Path, name: str) -> tuple[Result, Plan]:
    content = _json(file)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{file} was not written by `stormplus rates`: delete it or move it away")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{file} has format version {content.get('version')!r}, this stormplus reads and "
            f"writes version {VERSION}: use the stormplus that wrote it, or give another --output"
        )
    try:
        if content["method"] != name:
            raise ValueError(f"it has the results of {content['method']}")
        plan = _plan(content["plan"])
        shape = (len(plan.checkpoints), len(plan.sigmas), len(plan.seeds))
        mean, square = (np.array(content[key], np.float64) for key in ("mean", "square"))
        if not mean.shape == square.shape == shape:
            raise ValueError(f"numbers of shape {mean.shape}, {square.shape}, not {shape}")
        _require_numbers(mean, square)
        seconds, tuning = float(content["seconds"]), dict(content["tuning"])
        return Result(name, mean, square, seconds, tuning, dict(content["versions"])), plan
    except _BROKEN as error:
        raise _damaged(file, _reason(error)) from error


def _from_rows(rows: Any, told: Any) -> tuple[dict[str, Result], Plan]:
    plan = _plan(told["plan"])
    shape = (len(plan.sigmas), len(plan.seeds), len(plan.checkpoints))
    results = {}
    for name in (name for name in METHODS if name in told["seconds"]):
        mean, square = (
            np.array([row[key] for row in rows if row["method"] == name], np.float64).reshape(shape)
            for key in ("mean", "square")
        )
        _require_numbers(mean, square)
        results[name] = Result(
            name,
            np.moveaxis(mean, -1, 0),
            np.moveaxis(square, -1, 0),
            float(told["seconds"][name]),
            told["tuning"].get(name, {}),
            dict(told["versions"]),
        )
    if not results:
        raise ValueError("they name no method")
    return results, plan


def _require_numbers(*values: Array) -> None:
    """Divergence is inf; nothing that was measured is nan."""
    if any(np.isnan(array).any() for array in values):
        raise ValueError("a value is not a number")


def _plan(settings: dict[str, Any]) -> Plan:
    """A plan from JSON, which has lists for tuples."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
    }
    return Plan(**values)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"not JSON: {error}") from error


def _damaged(file: Path, reason: str) -> ValueError:
    return ValueError(
        f"{file} is cut short or damaged ({reason}): delete it, and the command that wrote it "
        "runs what is missing"
    )


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, LookupError) else str(error)


def _differences(there: Plan, here: Plan) -> str:
    """What differs: a number with both values, a list by its name."""
    told = []
    for name in (field.name for field in fields(Plan)):
        old, new = getattr(there, name), getattr(here, name)
        if old != new:
            values = "" if isinstance(old, tuple) else f" ({old}, not {new})"
            told.append(name + values)
    return ", ".join(told)
