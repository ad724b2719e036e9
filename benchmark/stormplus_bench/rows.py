"""Rows: the record of each run, the journal that holds them, and the flat frame for scores.

A journal is JSON lines. The first line is `{"format": "stormplus-rows", "version": 1}`, every
other one is a row. A row is written when its run ends, so a benchmark that is stopped loses the
runs in progress and nothing else.
"""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus.files import named

Key = tuple[str, str, float, int]
KEY = ("workload", "method", "lr", "seed")
CURVE = (
    "evaluations",
    "samples",
    "seconds",
    "train_loss",
    "valid_loss",
    "train_accuracy",
    "valid_accuracy",
    "grad_norm",
)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "workload": str,
    "method": str,
    "lr": (int, float),
    "default": bool,
    "seed": int,
    "status": str,
    "budget": (int, float),
    "batch_size": int,
    "curve": dict,
}
STATUSES = ("done", "diverged")
COLUMNS = (
    *("workload", "method", "lr", "default", "seed", "status", "budget", "batch_size"),
    *CURVE,
    *("peak_memory_mb", "state_mb", "measured", "versions", "machine"),
)
OPTIONAL = ("peak_memory_mb", "state_mb", "measured", "versions", "machine")
FORMAT, VERSION = "stormplus-rows", 1
HEADER = json.dumps({"format": FORMAT, "version": VERSION})
OnCut = str | Callable[[Path, int], None]


def append(path: str | os.PathLike[str], row: dict[str, Any]) -> None:
    """Add a row to the journal; the file is made, with its header, if it is not there.

    Several processes may append to one file: each holds a lock while it writes one line. A
    line that an interrupted process left halfway is removed first. Numbers that are not
    finite are written as null.

    Args:
        path: The journal.
        row: The record of a run.

    Raises:
        ValueError: The row lacks something, or the file is not such a journal.
        OSError: The file cannot be written; the error names it.
    """
    import fcntl  # reading works where there is no such module

    check(row, "the row")
    line = json.dumps(finite(row), allow_nan=False, sort_keys=False) + "\n"
    with named(Path(path)):
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            data = (_mend(handle, Path(path)) + line).encode()
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, "the disk took only a part of the line; is it full?")
            os.fsync(handle)
        finally:
            os.close(handle)  # which gives the lock back


def _mend(handle: int, path: Path) -> str:
    """Make the file ready for a line; return what has to be written before it."""
    content = os.pread(handle, 4096, 0)
    if not content or HEADER.encode().startswith(content):
        os.ftruncate(handle, 0)
        return HEADER + "\n"
    _check_header(path, content.split(b"\n", 1)[0])
    if os.pread(handle, 1, os.fstat(handle).st_size - 1) == b"\n":
        return ""
    content = path.read_bytes()
    start = content.rfind(b"\n") + 1
    if not _is_json(content[start:]):
        os.ftruncate(handle, start)
        return ""
    return "\n"  # only the end of the line is missing


def load(path: str | os.PathLike[str], on_cut: OnCut = "raise") -> pd.DataFrame:
    """The journal as a flat frame: one line for each measurement of each run.

    A later row of the same workload, method, lr and seed takes the place of an earlier one.
    A run without any measurement has one line, at 0 evaluations, without values. The columns are
    `COLUMNS`; `versions` is JSON text.

    Args:
        path: The journal.
        on_cut: What to do with a last line that is not complete, because its writer was
            interrupted: "raise", or "drop" it. A function drops it too, and is called with the
            path and the line's number.

    Raises:
        ValueError: The file is empty, of another format or version, or has a line that is not
            a row; the message names the file and the line.
    """
    return load_all([path], on_cut)


def load_all(paths: Iterable[str | os.PathLike[str]], on_cut: OnCut = "raise") -> pd.DataFrame:
    """`load` for several journals; later files replace rows of earlier ones."""
    if not callable(on_cut) and on_cut not in ("raise", "drop"):
        raise ValueError(f"on_cut must be 'raise' or 'drop', got {on_cut!r}")
    return frame_of(row for path in paths for row in _rows(Path(path), on_cut))


def read(path: str | os.PathLike[str], on_cut: OnCut = "raise") -> list[dict[str, Any]]:
    """The journal's rows as they are, with what the frame has no column for; see `load`."""
    return list({key_of(row): row for row in _rows(Path(path), on_cut)}.values())


def frame_of(found: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """The flat frame of these rows; of several rows of one run the last counts."""
    last = {key_of(row): row for row in found}
    lines = [line for row in last.values() for line in lines_of(row)]
    return typed(pd.DataFrame(lines, columns=list(COLUMNS)))


def keys(path: str | os.PathLike[str]) -> set[Key]:
    """(workload, method, lr, seed) of the runs that are there: what need not be run again."""
    path = Path(path)
    if not path.exists() or not path.stat().st_size:
        return set()
    return {key_of(row) for row in _rows(path, "drop")}


def versions_of(path: str | os.PathLike[str], kind: str, name: str) -> set[str]:
    """Of which versions of a file of one's own the rows of a method or a workload are.

    "" is a row of no file.

    Args:
        path: The journal.
        kind: "method" or "workload".
        name: Its name.
    """
    path = Path(path)
    if not path.exists() or not path.stat().st_size:
        return set()
    found = [row.get("files") for row in _rows(path, "drop") if row[kind] == name]
    return {str(files.get(kind, "")) if isinstance(files, dict) else "" for files in found}


def _cut(lines: list[bytes]) -> int | None:
    """The number of the last line if it is not complete, else None."""
    return len(lines) if lines[-1] and not _is_json(lines[-1]) else None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def from_benchopt(frame: pd.DataFrame) -> pd.DataFrame:
    """Turn benchopt's result frame into the frame that `load` gives."""
    names = {name: f"objective_{name}" for name in COLUMNS}
    names |= {"train_loss": "objective_value", "seconds": "time"}
    missing = [names[name] for name in COLUMNS if name not in OPTIONAL and names[name] not in frame]
    if missing:
        raise ValueError(
            f"benchopt's frame has no column {', '.join(missing)}: it must come from this "
            f"project's benchmark; its columns are {', '.join(map(str, frame.columns))}"
        )
    new = pd.DataFrame({name: frame.get(names[name]) for name in COLUMNS}, index=frame.index)
    versions = {
        str(column).removeprefix("version-"): str(frame[column].iloc[0])
        for column in frame.columns
        if str(column).startswith("version-") and len(frame)
    }
    if "objective_versions" not in frame:
        new["versions"] = json.dumps(versions, sort_keys=True)
    if "objective_machine" not in frame:
        new["machine"] = frame["platform"].astype(str) if "platform" in frame else ""
    new = typed(new)
    # benchopt has the status at each measurement; a run that ends badly was bad throughout.
    bad = (new["status"] == "diverged").groupby([new[name] for name in KEY]).transform("any")
    new["status"] = new["status"].where(~bad, "diverged")
    return new.sort_values([*KEY, "evaluations"], kind="stable", ignore_index=True)


def _content(path: Path) -> bytes:
    """The file's bytes; a journal that is kept, rather than written to, may be compressed."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be decompressed ({error}): fetch or pack it anew"
        ) from error


def _rows(path: Path, on_cut: OnCut) -> Iterator[dict[str, Any]]:
    lines = _content(path).split(b"\n")
    if lines == [b""]:
        raise ValueError(f"{path} is empty: no benchmark has written to it yet")
    cut = _cut(lines)  # of what was read: a writer may have ended the line by now
    _check_header(path, lines[0])
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        if number == cut:
            if callable(on_cut):
                on_cut(path, number)
            if on_cut != "raise":
                return
            raise ValueError(
                f"{path}, line {number}: the last line is cut short, its run was interrupted "
                "while it was written: continue the benchmark, which runs it again, or load "
                "with on_cut='drop'"
            )
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where} is not JSON ({error}): delete this line, its run will be made again "
                "when the benchmark continues"
            ) from error
        check(row, where)
        yield row


def _check_header(path: Path, line: bytes) -> None:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(
            f"{path}, line 1: not a journal of stormplus runs; its first line should be "
            f"{HEADER}, got {line[:60]!r}"
        )
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path}, line 1: rows of format version {header.get('version')!r}, this stormplus "
            f"reads and writes version {VERSION}: use the stormplus that wrote the file, or "
            "write to a new one"
        )


def check(row: Any, where: str) -> None:
    """Raise a ValueError that says what is wrong with a row, and where it is."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} should be a row (a JSON object), got {str(row)[:60]!r}")
    for name, kind in _TYPES.items():
        value = row.get(name)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(f"{where}: {name!r} should be {_name(kind)}, got {_cut_short(value)}")
    for name in ("workload", "method"):
        if not row[name].isprintable() or not row[name]:
            raise ValueError(
                f"{where}: {name!r} should be a text of one line, got {_cut_short(row[name])}"
            )
    if row["status"] not in STATUSES:
        raise ValueError(f"{where}: 'status' should be one of {STATUSES}, got {row['status']!r}")
    _check_numbers(row, where)
    if not isinstance(row.get("versions") or {}, dict):
        raise ValueError(f"{where}: 'versions' should be a JSON object of versions by name")
    for name in CURVE:
        values = row["curve"].get(name)
        if not isinstance(values, list) or not all(map(_number_or_none, values)):
            raise ValueError(f"{where}: curve's {name!r} should be a list of numbers and nulls")
    if not all(value is not None and math.isfinite(value) for value in row["curve"]["evaluations"]):
        raise ValueError(f"{where}: curve's 'evaluations' should all be numbers")
    lengths = {name: len(row["curve"][name]) for name in CURVE}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: the parts of 'curve' should have one length, got {lengths}")


def _check_numbers(row: dict[str, Any], where: str) -> None:
    for name in ("lr", "budget"):
        if not math.isfinite(_as_float(row[name])):
            raise ValueError(f"{where}: {name!r} should be finite, got {_cut_short(row[name])}")
    for name in ("seed", "batch_size"):
        if abs(row[name]) >= 2**63:
            raise ValueError(f"{where}: {name!r} is too large, got {_cut_short(row[name])}")
    for name in ("peak_memory_mb", "state_mb"):
        if not _number_or_none(row.get(name)):
            raise ValueError(f"{where}: {name!r} should be a number, got {_cut_short(row[name])}")
    measured = row.get("measured")  # on how many examples the losses are measured, if told
    if measured is not None and (type(measured) is not int or not 1 <= measured < 2**63):
        raise ValueError(
            f"{where}: 'measured' should be a positive int, got {_cut_short(measured)}"
        )


def _number_or_none(value: Any) -> bool:
    if value is None or isinstance(value, float):
        return True
    return type(value) is int and math.isfinite(_as_float(value))


def _as_float(value: float) -> float:
    """The number as a float; inf for an int that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _cut_short(value: Any) -> str:
    """A value for a message, which a damaged line may have made very long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _name(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))


def finite(value: Any) -> Any:
    """The value with None for every number that is not finite: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def key_of(row: dict[str, Any]) -> Key:
    """Which run the row is the record of."""
    return row["workload"], row["method"], float(row["lr"]), row["seed"]


def lines_of(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The row's lines in the flat frame: one for each measurement, one if there was none."""
    same = {name: row.get(name) for name in COLUMNS if name not in CURVE}
    same["versions"] = json.dumps(row.get("versions") or {}, sort_keys=True)
    same["machine"] = str(row.get("machine") or "")
    measurements = list(zip(*(row["curve"][name] for name in CURVE)))
    for values in measurements or [(0, *[None] * (len(CURVE) - 1))]:
        yield same | dict(zip(CURVE, values))


def typed(frame: pd.DataFrame) -> pd.DataFrame:
    texts = ("workload", "method", "status", "versions", "machine")
    kinds = dict.fromkeys(COLUMNS, "float64") | dict.fromkeys(texts, "str")
    kinds |= {"default": "bool", "seed": "int64", "batch_size": "int64"}
    return frame.astype(kinds)
