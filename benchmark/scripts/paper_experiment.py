"""Tables and figures of docs/paper-experiment.md from the committed rows: `make paper-page`."""

from __future__ import annotations

from pathlib import Path

from stormplus_bench import markdown, rows
from stormplus_bench.paper import SCALES, report, save

FOLDER = Path("docs")
ROWS = FOLDER / "results" / "paper.jsonl"
FIGURES = {"paper": "paper.png", "sweep": "paper_sweep.png"}


def main() -> None:
    drawn, text = report(rows.load(ROWS), SCALES["cpu"])
    page = FOLDER / "paper-experiment.md"
    old = page.read_text(encoding="utf-8")
    content = markdown.replace(old, text, "paper", str(page))
    for name, picture in drawn.items():
        save(picture, FOLDER / "figures" / FIGURES[name])
    page.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
