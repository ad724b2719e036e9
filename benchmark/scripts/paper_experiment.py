"""Tables and figures of docs/paper-experiment.md from the committed rows: `make paper-page`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

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
SHOWN = (
    f"![Loss and accuracy along the course]({Path('figures', FIGURES['course'])})",
    f"![What STORM+ estimates along the course]({Path('figures', FIGURES['estimator'])})",
)
NONE = "No run of the course has been made yet."
ONLY_START = markdown.wrap(
    "So far only the start of the experiment has been run: an epoch or two, on two cores. Most of "
    "the paper's claims are about its end, and the runs that go there are still to be made."
)


def main() -> None:
    drawn, start = paper.report(rows.load(ROWS), paper.SCALES["cpu"])
    summary, end, more = whole_course()
    page = FOLDER / "paper-experiment.md"
    content = page.read_text(encoding="utf-8")
    for name, text in (("summary", summary), ("course", end), ("paper", start)):
        content = markdown.replace(content, text, name, str(page))
    for name, picture in (drawn | more).items():
        paper_panels.save(picture, FOLDER / "figures" / FIGURES[name])
    page.write_text(content, encoding="utf-8")


def whole_course() -> tuple[str, str, dict[str, Figure]]:
    """The first paragraph, the section and the figures, of as many runs as there are."""
    if not COURSE_ROWS.exists():
        return ONLY_START, NONE, {}
    made = course.report(rows.read(COURSE_ROWS), course.COURSES["course"])
    return made.summary, "\n\n".join([*SHOWN, made.text]), made.figures()


if __name__ == "__main__":
    main()
