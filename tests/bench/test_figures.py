"""The figures are drawn from the frame alone, also from odd frames."""

import io
import math

import numpy as np
import pandas as pd
import pytest
from bench_rows import frame_of, hand_made, make_row
from matplotlib.colors import to_hex, to_rgb

from stormplus_bench import figures
from stormplus_bench.methods import HEADLINE, METHODS, OURS
from stormplus_bench.style import PALETTE, style_of


@pytest.fixture(scope="module")
def frame():
    return frame_of(hand_made())


def line_of(axis, method):
    return next((line for line in axis.get_lines() if line.get_label() == method), None)


def texts(axis):
    return [text.get_text() for text in axis.texts]


def test_every_method_has_a_style_and_unknown_ones_a_lasting_one():
    assert all(style_of(name).colour == PALETTE[name] for name in METHODS)
    assert len({style_of(name) for name in METHODS}) == len(METHODS)
    assert style_of("Lion") == style_of("Lion") != style_of("Tiger")
    assert style_of("Lion").colour not in PALETTE.values()


@pytest.mark.parametrize("names", [OURS, HEADLINE], ids=["ours", "headline"])
def test_colours_stay_apart_for_colour_blind_readers(names):
    # Viénot, Brettel and Mollon (1999), linear RGB; protanopia and deuteranopia.
    protan = [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]
    deutan = [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]
    for matrix in (protan, deutan):
        seen = [np.array(matrix) @ np.array(to_rgb(PALETTE[name])) ** 2.2 for name in names]
        seen = [np.clip(c, 0, 1) ** (1 / 2.2) for c in seen]
        assert min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]) > 0.1


def test_curves_show_the_median_at_the_default_or_at_the_best_lr(frame):
    a, b = figures.curves_grid(frame, methods=["STORM+", "Adam"]).axes
    assert [a.get_title(), b.get_title()] == ["a", "b"]
    assert list(line_of(a, "STORM+").get_xdata()) == [0, 25, 50, 75, 100]
    assert list(line_of(a, "STORM+").get_ydata()) == [10, 6, 4, 2, 2]  # ends at 1 and 3
    assert to_hex(line_of(a, "STORM+").get_color()) == PALETTE["STORM+"]
    assert line_of(a, "SGD") is None
    assert [line.get_marker() for line in b.get_lines()].count("x") == 1  # Adam diverged
    a, b = figures.curves_grid(frame, best_lr=True).axes
    assert list(line_of(a, "SGD").get_ydata()) == [10, 5, 2, 1, 0.5]  # at lr 1
    assert line_of(a, "Adam") is None  # ran one lr
    assert texts(b) == ["no run"]


def test_the_map_of_gaps_prints_its_numbers(frame):
    (axis,) = figures.gap_at_defaults(frame).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["SGD", "STORM+", "Adam"]
    # SGD: 3.5 / 9.5 and 0; STORM+: 1.5 / 9.5 and 0.5 / 1.5; Adam diverged on both.
    assert texts(axis) == ["37", "0", "18", "16", "33", "25", "div.", "div.", "100"]
    grid = pd.DataFrame([[0.2, math.nan]], ["Untuned"], ["a", "b"])
    (axis,) = figures.heat_maps({"title": grid}, str, lambda share: 1 - share, "Blues").axes
    assert texts(axis) == ["0.2", "nan"]


ODD = {
    "all diverged": [make_row([5, None], status="diverged")],
    "no measurement": [make_row([], status="diverged")],
    "one measurement": [make_row([1])],
    "zero": [make_row([1, 0])],
    "extremes": [make_row([1e20, 1e-20])],
    "huge": [make_row([1e-20, 1e20])],
    "nothing measured": [make_row([None, None])],
    "names": [make_row([2, 1], method=name) for name in (r"$\frac{$", "_hidden", "long" * 50)],
    "long": [make_row([1 / (1 + i) for i in range(500)], evaluations=range(500))],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_frames_can_be_drawn(name):
    frame = frame_of(ODD[name])
    for draw in (figures.curves_grid, figures.gap_at_defaults):
        draw(frame).savefig(drawn := io.BytesIO(), format="svg")
        assert b"</svg>" in drawn.getvalue()
