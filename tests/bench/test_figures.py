"""The figures are drawn from the frame alone, also from odd frames."""

import io
import math

import pandas as pd
import pytest
from tests.support.bench_rows import frame_of, hand_made, make_row

from stormplus_bench import figures, finals, page, tables


def line_of(axis, method):
    return next((line for line in axis.get_lines() if line.get_label() == method), None)


def texts(axis):
    return [text.get_text() for text in axis.texts]


def test_curves_show_the_median_at_the_default_or_at_the_best_lr():
    frame = frame_of(hand_made())
    a, b = figures.curves_grid(frame, finals.defaults(frame)).axes
    assert list(line_of(a, "STORM+").get_xdata()) == [0, 25, 50, 75, 100]
    assert list(line_of(a, "STORM+").get_ydata()) == [10, 6, 4, 2, 2]  # ends at 1 and 3
    assert list(line_of(a, "SGD").get_ydata()) == [10, 8, 6, 5, 4]
    crosses = [line for line in b.get_lines() if len(line.get_xdata()) == 1]
    assert [line.get_marker() for line in crosses] == ["x"]  # Adam diverged
    ends = finals.tuned(frame)
    a, b = figures.curves_grid(frame, ends[ends["rates"] > 1]).axes
    assert list(line_of(a, "SGD").get_ydata()) == [10, 5, 2, 1, 0.5]  # at lr 1
    assert line_of(a, "Adam") is None  # ran one lr
    assert texts(b) == ["no run"]


def test_the_map_of_gaps_prints_its_numbers():
    (axis,) = figures.gap_at_defaults(frame_of(hand_made())).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["SGD", "STORM+", "Adam"]
    # SGD: 3.5 / 9.5 and 0; STORM+: 1.5 / 9.5 and 0.5 / 1.5; Adam diverged on both.
    assert texts(axis) == ["37", "0", "18", "16", "33", "25", "div.", "div.", "100"]
    grid = pd.DataFrame([[0.2, math.nan]], ["Untuned"], ["a", "b"])
    (axis,) = figures.heat_maps({"title": grid}, str, lambda share: 1 - share, "Blues").axes
    assert texts(axis) == ["0.2", "nan"]


ODD = {
    "all diverged": [make_row([5, None], method=m, status="diverged") for m in ("SGD", "STORM+")],
    "no measurement": [make_row([1, 0]), make_row([], method="Adam", status="diverged")],
    "huge": [make_row([1e20, 1e-20], workload="a/b")],
    "nothing achieved": [make_row([1, 3], method="STORM+"), make_row([None, None])],
    "names": [make_row([2, 1], method=name) for name in (r"$\frac{$", "_hidden", "long" * 50)],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_rows_have_figures_tables_and_a_page(name):
    frame = frame_of(ODD[name])
    for figure in (
        figures.curves_grid(frame, finals.tuned(frame)),
        figures.gap_at_defaults(frame),
    ):
        figure.savefig(drawn := io.BytesIO(), format="svg")
        assert b"</svg>" in drawn.getvalue()
    found = tables.all_tables(frame, {})
    assert "tab:scores" in tables.printed(found, "latex")
    assert page.build(frame, found).endswith("</html>\n")
