"""Fill the tables of the long runs into docs/benchmark.md: `make long`.

`python benchmark/scripts/long.py ROWS...` prints the tables of other rows instead.
"""

import sys
from pathlib import Path

import pandas as pd

from stormplus_bench import finals, rows, scores, tables

PAGE = Path("docs/benchmark.md")
NAMES = ("long", "long-held-out")
ROWS = [Path(f"docs/results/{name}.jsonl.gz") for name in NAMES]


def main(paths: list[str]) -> None:
    blocks = tables_of(rows.load(*(paths or ROWS)))
    if not paths:
        PAGE.write_text(tables.fill(PAGE.read_text("utf-8"), blocks, str(PAGE)), "utf-8")
    sys.stdout.write("\n\n".join(blocks.values()) + "\n")


def tables_of(frame: pd.DataFrame) -> dict[str, str]:
    """Return gaps and validation results, each method at the lr with the lowest training loss."""
    ends = finals.tuned(frame)
    gaps = scores.gap_map(scores.gap(frame, ends))
    formats = dict.fromkeys(gaps.columns, tables.percent)
    return {
        "long": tables.Table("long", "", gaps, formats).markdown(),
        "long-validation": tables.validation_table(ends).markdown(),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
