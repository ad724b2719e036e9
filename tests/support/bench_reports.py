"""Calling `stormplus report` in a test."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from bench_rows import hand_made
from click.testing import CliRunner, Result

from stormplus.bench import rows, statements
from stormplus.bench.report_command import report

README = f"# Title\n\nBefore.\n\n{statements.BEGIN}\nold\n{statements.END}\n\nAfter.\n"


def write_rows(path: Path, runs: Iterable[dict[str, Any]]) -> Path:
    for run in runs:
        rows.append(path, run)
    return path


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(report, [str(a) for a in arguments])


@cache  # for all modules of a session: it takes seconds
def finished(root: Path) -> tuple[Path, Result]:
    """One report of the hand-made rows; the journal ends in the middle of a line."""
    folder = root / "finished-report"
    folder.mkdir()
    path = write_rows(folder / "rows.jsonl", hand_made())
    with path.open("a") as file:
        file.write('{"workload": "a", "met')
    (folder / "README.md").write_text(README)
    result = call(path, "--output", folder / "docs" / "r", "--readme", folder / "README.md")
    assert result.exit_code == 0, result.output
    return folder, result
