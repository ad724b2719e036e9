"""The journal of a benchmark: one row per run, and the flat frame that scores are computed from.

A journal is JSON lines. The first line is `{"format": "stormplus-rows", "version": 1}`, every
other line is a row. A row is written when its run ends, so stopping a benchmark loses only the
runs in progress.
"""

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

CURVE = ["evaluations", "samples", "seconds", "train_loss", "valid_loss"]
CURVE += ["train_accuracy", "valid_accuracy", "grad_norm"]
REQUIRED = ["workload", "method", "lr", "default", "seed", "status", "budget", "batch_size"]
COLUMNS = [*REQUIRED, *CURVE, "state_mb", "measured", "versions", "machine"]
HEADER = json.dumps({"format": "stormplus-rows", "version": 1})


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
        OSError: The file cannot be written.
    """
    import fcntl  # POSIX only; reading works without it

    check(row, "the row")
    line = json.dumps(finite(row), allow_nan=False) + "\n"
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        file.seek(0)
        content = file.read()
        if content:
            _check_header(Path(path), content)
            file.truncate(content.rfind(b"\n") + 1)
        else:
            line = f"{HEADER}\n{line}"
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def load(*paths: str | os.PathLike[str]) -> pd.DataFrame:
    """Return journals as a flat frame with `COLUMNS`, one line per measurement of each run.

    A later row of the same workload, method, lr and seed replaces an earlier one. A run without
    measurements has one line, at 0 evaluations. An incomplete last line, left by an interrupted
    process, is skipped. `versions` is JSON text. A path that ends with `.gz` is decompressed.

    Raises:
        ValueError: The file is no journal or has an invalid line; the message names file and line.
    """
    return frame_of(row for path in paths for row in _rows(Path(path)))


def frame_of(found: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return the flat frame of these rows; the last row of a run counts."""
    last = {key_of(row): row for row in found}
    texts = ("workload", "method", "status", "versions", "machine")
    kinds = dict.fromkeys(COLUMNS, "float64") | dict.fromkeys(texts, "str")
    kinds |= {"default": "bool", "seed": "int64", "batch_size": "int64"}
    lines = [line for row in last.values() for line in _lines(row)]
    return pd.DataFrame(lines, columns=COLUMNS).astype(kinds)


def _lines(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    versions = json.dumps(row.get("versions") or {}, sort_keys=True)
    same = row | {"versions": versions, "machine": str(row.get("machine") or "")}
    measurements = list(zip(*(row["curve"][name] for name in CURVE)))
    for values in measurements or [(0,)]:
        yield same | dict(zip(CURVE, values))


def keys(path: str | os.PathLike[str]) -> set[Key]:
    """Return (workload, method, lr, seed) of the runs in the journal; empty if there is none."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return set()
    return {key_of(row) for row in _rows(Path(path))}


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


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} cannot be decompressed: {error}") from error
    if not content:
        raise ValueError(f"{path} is empty: no benchmark has written to it yet")
    _check_header(path, content)
    for number, line in enumerate(content.split(b"\n")[1:-1], start=2):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = line
            check(row, f"{path}, line {number}")
            yield row


def _check_header(path: Path, content: bytes) -> None:
    line = content.partition(b"\n")[0]
    if line.strip() != HEADER.encode():
        raise ValueError(f"{path}, line 1: expected {HEADER}, got {line[:60]!r}")


def check(row: Any, where: str) -> None:
    """Raise a ValueError that says what is wrong with a row, and where it is."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} should be a row (a JSON object), got {repr(row)[:80]}")
    if missing := [name for name in (*REQUIRED, "curve") if name not in row]:
        raise ValueError(f"{where}: the row has no {', '.join(missing)}")
    if row["status"] not in ("done", "diverged"):
        raise ValueError(f"{where}: 'status' should be done or diverged, got {row['status']!r}")
    columns = [row["curve"].get(name) for name in CURVE]
    if not all(isinstance(values, list) for values in columns) or len(set(map(len, columns))) > 1:
        raise ValueError(f"{where}: 'curve' should have lists of one length: {', '.join(CURVE)}")
