"""Tables and figures of docs/paper-experiment.md from the committed rows: `make paper-page`."""

from __future__ import annotations

from pathlib import Path

from stormplus_bench import course, markdown, paper, paper_panels, rows

FOLDER = Path("docs")
ROWS = FOLDER / "results" / "paper.jsonl"
COURSE_ROWS = FOLDER / "results" / "course.jsonl"
FIGURES = {
    "course": "paper_course.png",
    "estimator": "paper_estimator.png",
    "paper": "paper.png",
    "sweep": "paper_sweep.png",
}


def main() -> None:
    end = course.report(rows.read(COURSE_ROWS), course.COURSES["course"])
    drawn, start = paper.report(rows.load(ROWS), paper.SCALES["cpu"])
    page = FOLDER / "paper-experiment.md"
    content = page.read_text(encoding="utf-8")
    for name, text in (("summary", end.summary), ("course", end.text), ("paper", start)):
        content = markdown.replace(content, text, name, str(page))
    for name, picture in (end.figures() | drawn).items():
        paper_panels.save(picture, FOLDER / "figures" / FIGURES[name])
    page.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
