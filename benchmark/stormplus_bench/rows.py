"""The journal of a benchmark: one row per run, and the flat frame that scores are computed from.

A journal is JSON lines. The first line is `{"format": "stormplus-rows", "version": 1}`, every
other line is a row. A row is written when its run ends, so stopping a benchmark loses only the
runs in progress.
"""

import errno
import gzip
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench.files import named

CURVE = (
    *("evaluations", "samples", "seconds", "train_loss", "valid_loss"),
    *("train_accuracy", "valid_accuracy", "grad_norm"),
)
COLUMNS = (
    *("workload", "method", "lr", "default", "seed", "status", "budget", "batch_size"),
    *CURVE,
    *("peak_memory_mb", "state_mb", "measured", "versions", "machine"),
)
STATUSES = ("done", "diverged")
HEADER = json.dumps({"format": "stormplus-rows", "version": 1})
OnCut = str | Callable[[Path, int], None]


class Key(NamedTuple):
    """What distinguishes one run from another."""

    workload: str
    method: str
    lr: float
    seed: int


KEY = list(Key._fields)


def append(path: str | os.PathLike[str], row: dict[str, Any]) -> None:
    """Add a row to the journal, which is created with its header if it does not exist.

    Several processes may append to one file: each locks it while it writes a line. An incomplete
    last line, left by an interrupted process, is removed first. Non-finite numbers are written
    as null.

    Raises:
        ValueError: The row is incomplete, or the file is not a journal.
        OSError: The file cannot be written; the error names it.
    """
    import fcntl  # POSIX only; reading works without it

    check(row, "the row")
    line = json.dumps(finite(row), allow_nan=False) + "\n"
    with named(Path(path)):
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            data = (_repair(handle, Path(path)) + line).encode()
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, "only part of the line was written; is the disk full?")
            os.fsync(handle)
        finally:
            os.close(handle)  # releases the lock


def _repair(handle: int, path: Path) -> str:
    """Remove an incomplete last line; return the header if it must be written."""
    start = os.pread(handle, len(HEADER), 0)
    if HEADER.encode().startswith(start) and os.fstat(handle).st_size <= len(HEADER):
        os.ftruncate(handle, 0)
        return HEADER + "\n"
    _check_header(path, os.pread(handle, 4096, 0).split(b"\n", 1)[0])
    if os.pread(handle, 1, os.fstat(handle).st_size - 1) != b"\n":
        os.ftruncate(handle, path.read_bytes().rfind(b"\n") + 1)
    return ""


def load(*paths: str | os.PathLike[str], on_cut: OnCut = "raise") -> pd.DataFrame:
    """Return journals as a flat frame with `COLUMNS`, one line per measurement of each run.

    A later row of the same workload, method, lr and seed replaces an earlier one. A run without
    measurements has one line, at 0 evaluations. `versions` is JSON text.

    Args:
        paths: The journals; `.gz` is decompressed.
        on_cut: What to do if the last line is incomplete because its writer was interrupted:
            "raise", "drop" it, or call this function with the path and the line number.

    Raises:
        ValueError: The file is no journal or has an invalid line; the message names file and line.
    """
    return frame_of(row for path in paths for row in _rows(Path(path), on_cut))


def frame_of(found: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return the flat frame of these rows; the last row of a run counts."""
    last = {key_of(row): row for row in found}
    lines = [line for row in last.values() for line in _lines(row)]
    texts = ("workload", "method", "status", "versions", "machine")
    kinds = dict.fromkeys(COLUMNS, "float64") | dict.fromkeys(texts, "str")
    kinds |= {"default": "bool", "seed": "int64", "batch_size": "int64"}
    return pd.DataFrame(lines, columns=list(COLUMNS)).astype(kinds)


def _lines(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    same = {name: row.get(name) for name in COLUMNS if name not in CURVE}
    same["versions"] = json.dumps(row.get("versions") or {}, sort_keys=True)
    same["machine"] = str(row.get("machine") or "")
    measurements = list(zip(*(row["curve"][name] for name in CURVE)))
    for values in measurements or [(0, *[None] * (len(CURVE) - 1))]:
        yield same | dict(zip(CURVE, values))


def keys(path: str | os.PathLike[str]) -> set[Key]:
    """Return (workload, method, lr, seed) of the runs in the journal; empty if there is none."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return set()
    return {key_of(row) for row in _rows(Path(path), "drop")}


def key_of(row: dict[str, Any]) -> Key:
    """Return the workload, method, lr and seed of the row's run."""
    return Key(row["workload"], row["method"], float(row["lr"]), row["seed"])


def finite(value: Any) -> Any:
    """Replace non-finite numbers, which JSON cannot represent, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def _rows(path: Path, on_cut: OnCut) -> Iterator[dict[str, Any]]:
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} cannot be decompressed: {error}") from error
    if not content:
        raise ValueError(f"{path} is empty: no benchmark has written to it yet")
    header, _, body = content.partition(b"\n")
    *lines, rest = body.split(b"\n")
    _check_header(path, header)
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        where, row = f"{path}, line {number}", _json(line)
        if row is None:
            raise ValueError(f"{where} is not JSON: delete it, and run the benchmark again")
        check(row, where)
        yield row
    if not rest:
        return
    number = len(lines) + 2
    if callable(on_cut):
        on_cut(path, number)
    elif on_cut == "raise":
        raise ValueError(
            f"{path}, line {number} is incomplete: run the benchmark again to repeat it"
        )


def _json(line: bytes) -> Any:
    """Return the value of a line, None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _check_header(path: Path, line: bytes) -> None:
    header = _json(line)
    if not isinstance(header, dict) or header.get("format") != "stormplus-rows":
        raise ValueError(f"{path}, line 1: not a journal of stormplus runs, got {line[:60]!r}")
    if header != json.loads(HEADER):
        raise ValueError(
            f"{path}, line 1: format version {_short(header.get('version'))}, but this stormplus "
            "reads and writes version 1"
        )


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_measurement(value: Any) -> bool:
    return value is None or isinstance(value, float) or _is_number(value)


NAME, NUMBER = (_is_name, "a text of one line"), (_is_number, "a finite number")
INTEGER = (_is_integer, "a 64-bit integer")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "workload": NAME,
    "method": NAME,
    "lr": NUMBER,
    "default": (lambda v: isinstance(v, bool), "true or false"),
    "seed": INTEGER,
    "status": (lambda v: v in STATUSES, f"one of {STATUSES}"),
    "budget": NUMBER,
    "batch_size": INTEGER,
    "curve": (lambda v: isinstance(v, dict), "a JSON object"),
}
_OPTIONAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "peak_memory_mb": NUMBER,
    "state_mb": NUMBER,
    "measured": (lambda v: _is_integer(v) and v > 0, "a positive integer"),
    "versions": (lambda v: isinstance(v, dict), "a JSON object"),
}


def check(row: Any, where: str) -> None:
    """Raise a ValueError that says what is wrong with a row, and where it is."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} should be a row (a JSON object), got {_short(row)}")
    present = {name: rule for name, rule in _OPTIONAL.items() if row.get(name) is not None}
    for name, (valid, wanted) in (_FIELDS | present).items():
        if not valid(row.get(name)):
            raise ValueError(f"{where}: {name!r} should be {wanted}, got {_short(row.get(name))}")
    for name in CURVE:
        values, valid = row["curve"].get(name), _is_measurement
        if name == "evaluations":
            valid = _is_number
        if not isinstance(values, list) or not all(map(valid, values)):
            raise ValueError(f"{where}: curve's {name!r} should be a list of numbers")
    if len({len(row["curve"][name]) for name in CURVE}) > 1:
        raise ValueError(f"{where}: the lists of 'curve' should have the same length")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
