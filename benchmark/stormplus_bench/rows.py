"""The journal of a benchmark: one row per run, and the flat frame that scores are computed from.

A journal is JSON lines. The first line is `{"format": "stormplus-rows", "version": 1}`, every
other line is a row. A row is written when its run ends, so stopping a benchmark loses only the
runs in progress.
"""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench.files import named

Key = tuple[str, str, float, int]
KEY = ("workload", "method", "lr", "seed")
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
FORMAT, VERSION = "stormplus-rows", 1
HEADER = json.dumps({"format": FORMAT, "version": VERSION})
OnCut = str | Callable[[Path, int], None]


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
    """Remove an incomplete last line; return what must be written before the next row."""
    start = os.pread(handle, 4096, 0)
    if not start or HEADER.encode().startswith(start):
        os.ftruncate(handle, 0)
        return HEADER + "\n"
    _check_header(path, start.split(b"\n", 1)[0])
    if os.pread(handle, 1, os.fstat(handle).st_size - 1) == b"\n":
        return ""
    content = path.read_bytes()
    last = content.rfind(b"\n") + 1
    if _is_json(content[last:]):
        return "\n"  # only the line break is missing
    os.ftruncate(handle, last)
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
    return _typed(pd.DataFrame(lines, columns=list(COLUMNS)))


def keys(path: str | os.PathLike[str]) -> set[Key]:
    """Return (workload, method, lr, seed) of the runs in the journal; empty if there is none."""
    return {key_of(row) for row in _existing(Path(path))}


def versions_of(path: str | os.PathLike[str], kind: str, name: str) -> set[str]:
    """Return the fingerprints of the user file that produced the rows of `name`.

    `kind` is "method" or "workload". Rows of the benchmark's own have the fingerprint "".
    """
    found = [row.get("files") for row in _existing(Path(path)) if row[kind] == name]
    return {str(files.get(kind, "")) if isinstance(files, dict) else "" for files in found}


def _existing(path: Path) -> Iterator[dict[str, Any]]:
    return _rows(path, "drop") if path.exists() and path.stat().st_size else iter(())


def key_of(row: dict[str, Any]) -> Key:
    """Return the workload, method, lr and seed of the row's run."""
    return row["workload"], row["method"], float(row["lr"]), row["seed"]


def finite(value: Any) -> Any:
    """Replace non-finite numbers, which JSON cannot represent, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def _rows(path: Path, on_cut: OnCut) -> Iterator[dict[str, Any]]:
    lines = _content(path).split(b"\n")
    if lines == [b""]:
        raise ValueError(f"{path} is empty: no benchmark has written to it yet")
    _check_header(path, lines[0])
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if not _is_json(line):
            if number < len(lines):
                raise ValueError(f"{where} is not JSON: delete it, and run the benchmark again")
            if callable(on_cut):
                on_cut(path, number)
            if on_cut == "raise":
                raise ValueError(f"{where} is incomplete: run the benchmark again to repeat it")
            return
        row = json.loads(line)
        check(row, where)
        yield row


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be decompressed: {error}") from error


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _check_header(path: Path, line: bytes) -> None:
    header = json.loads(line) if _is_json(line) else None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path}, line 1: not a journal of stormplus runs, got {line[:60]!r}")
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path}, line 1: format version {_short(header.get('version'))}, but this stormplus "
            f"reads and writes version {VERSION}"
        )


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "workload": (_is_name, "a text of one line"),
    "method": (_is_name, "a text of one line"),
    "lr": (_is_number, "a finite number"),
    "default": (lambda v: isinstance(v, bool), "true or false"),
    "seed": (_is_integer, "a 64-bit integer"),
    "status": (lambda v: v in STATUSES, f"one of {STATUSES}"),
    "budget": (_is_number, "a finite number"),
    "batch_size": (_is_integer, "a 64-bit integer"),
    "curve": (lambda v: isinstance(v, dict), "a JSON object"),
    "peak_memory_mb": (lambda v: v is None or _is_number(v), "a finite number"),
    "state_mb": (lambda v: v is None or _is_number(v), "a finite number"),
    "measured": (lambda v: v is None or (_is_integer(v) and v > 0), "a positive integer"),
    "versions": (lambda v: v is None or isinstance(v, dict), "a JSON object"),
}


def check(row: Any, where: str) -> None:
    """Raise a ValueError that says what is wrong with a row, and where it is."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} should be a row (a JSON object), got {_short(row)}")
    for name, (valid, wanted) in _FIELDS.items():
        if not valid(row.get(name)):
            raise ValueError(f"{where}: {name!r} should be {wanted}, got {_short(row.get(name))}")
    for name in CURVE:
        values = row["curve"].get(name)
        if not isinstance(values, list) or not all(map(_is_measured, values)):
            raise ValueError(f"{where}: curve's {name!r} should be a list of numbers and nulls")
    if not all(map(_is_number, row["curve"]["evaluations"])):
        raise ValueError(f"{where}: curve's 'evaluations' should be finite numbers")
    if len({len(row["curve"][name]) for name in CURVE}) > 1:
        raise ValueError(f"{where}: the lists of 'curve' should have the same length")


def _is_measured(value: Any) -> bool:
    return value is None or isinstance(value, float) or _is_number(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _lines(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    same = {name: row.get(name) for name in COLUMNS if name not in CURVE}
    same["versions"] = json.dumps(row.get("versions") or {}, sort_keys=True)
    same["machine"] = str(row.get("machine") or "")
    measurements = list(zip(*(row["curve"][name] for name in CURVE)))
    for values in measurements or [(0, *[None] * (len(CURVE) - 1))]:
        yield same | dict(zip(CURVE, values))


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    texts = ("workload", "method", "status", "versions", "machine")
    kinds = dict.fromkeys(COLUMNS, "float64") | dict.fromkeys(texts, "str")
    kinds |= {"default": "bool", "seed": "int64", "batch_size": "int64"}
    return frame.astype(kinds)
