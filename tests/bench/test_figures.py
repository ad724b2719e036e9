"""The figures are drawn from the frame alone, for odd frames too, each method in its style."""

import io
import math

import numpy as np
import pytest

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

from bench_rows import frame_of, hand_made, make_run, swept
from matplotlib.colors import to_hex, to_rgb

from stormplus.bench import figures, style
from stormplus.bench.drawing import slug
from stormplus.bench.svg import inline, to_svg


@pytest.fixture
def frame(tmp_path):
    return frame_of(tmp_path, hand_made())


def lines_of(axis, method):
    name = f"m--{slug(method)}--0"
    return [line for line in axis.get_lines() if line.get_gid() == name]


def test_no_two_methods_look_alike():
    looks = [(s.colour, s.dash, s.marker) for s in style.STYLES.values()]
    assert len(set(looks)) == len(looks)
    assert len({s.marker for s in style.STYLES.values()}) == len(looks)  # grey print
    labels = [
        *("STORM+", "STORM+ mean", "simplified STORM+", "simplified STORM+ mean", "Untuned"),
        *("STORM", "STORM mean", "SGD", "SGD momentum", "Adam", "AdamW", "AdaGrad", "RMSprop"),
        *("Schedule-Free", "Prodigy", "DoG", "D-Adaptation", "Mechanic", "MARS", "SVRG"),
    ]
    assert set(labels) == set(style.STYLES)
    assert len({slug(name) for name in labels}) == len(labels)


def test_an_unknown_method_has_a_lasting_style_of_its_own():
    # A pinned value: Python's own hash of a text is another one in each process.
    assert style.style_of("Lion") == style._SPARE[0xFFEFF301 % len(style._SPARE)]
    assert style.style_of("Lion").marker not in {s.marker for s in style.STYLES.values()}
    assert style.ordered(["Lion", "SGD", "STORM+", "SGD"]) == ["STORM+", "SGD", "Lion"]


def test_families_stay_apart_for_colour_blind_readers():
    # Viénot, Brettel and Mollon (1999), linear RGB; protanopia and deuteranopia.
    blind = {
        "protan": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
        "deutan": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
    }
    colours = sorted({s.colour for s in style.STYLES.values()})
    for matrix in blind.values():
        seen = [np.array(matrix) @ np.array(to_rgb(c)) ** 2.2 for c in colours]
        seen = [np.clip(c, 0, 1) ** (1 / 2.2) for c in seen]
        apart = min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i])
        assert apart > 0.1


def test_curves_show_the_median_the_band_and_where_a_method_diverged(frame):
    figure = figures.curves(frame, "a")
    default, best = figure.axes[:2]
    (line,) = lines_of(default, "STORM+")
    # Seeds 10 6 4 2 1 and 10 6 4 2 3.
    assert list(line.get_xdata()) == [0, 25, 50, 75, 100]
    assert list(line.get_ydata()) == [10, 6, 4, 2, 2]
    assert to_hex(line.get_color()) == style.VERMILLION.lower()
    (sgd,) = lines_of(best, "SGD")  # at lr 1
    assert list(sgd.get_ydata()) == [10, 5, 2, 1, 0.5]
    crosses = [line for line in default.get_lines() if line.get_gid() == "m--adam--2"]
    assert [list(cross.get_xdata()) for cross in crosses] == [[25]]


def test_the_band_is_the_range_over_seeds(frame):
    axis = figures.curves(frame, "a").axes[0]
    (band,) = [c for c in axis.collections if c.get_gid() == "m--stormplus--1"]
    y = band.get_paths()[0].vertices
    assert {float(v) for x, v in y if x == 100} == {1, 3}


def test_sensitivity_puts_divergence_on_a_shelf_and_rings_the_default(frame):
    axis = figures.sensitivity(frame, "a").axes[0]
    (sgd,) = lines_of(axis, "SGD")
    assert list(sgd.get_xdata()) == [0.1, 1]
    assert list(sgd.get_ydata()) == [4, 0.5]
    (adam,) = lines_of(axis, "Adam")
    assert 6 < adam.get_ydata()[0] < axis.get_ylim()[1]  # no run that ends is above 6
    (ring,) = [line for line in axis.get_lines() if line.get_gid() == "m--stormplus--2"]
    assert list(ring.get_xdata()) == [1.0]


def test_the_map_of_costs_prints_its_numbers(frame):
    axis = figures.cost_of_not_tuning(frame).axes[0]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["SGD", "STORM+", "Adam"]
    texts = [t.get_text() for t in axis.texts]
    # SGD: 3.5 / 9.5 and 0; STORM+: 1.5 / 9.5 and 0.5 / 1.5; Adam diverged on both.
    assert texts == ["37", "0", "18", "16", "33", "25", "div.", "div.", "100"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1e-9, "<0.1"), (0.0123, "1.2"), (0.0999, "10"), (1, "100"), (1e20, ">999")],
)
def test_per_cent(value, text):
    assert figures.per_cent(value) == text
    assert figures.per_cent(math.nan) == "n/a"
    assert figures.per_cent(math.inf) == "div."


def test_the_profile_is_a_staircase_with_scores_in_the_legend(tmp_path):
    frame = frame_of(tmp_path, swept())
    axis = figures.performance_profile(frame, fraction=0.5, setters=()).axes[1]
    (line,) = lines_of(axis, "STORM+")
    assert line.get_drawstyle() == "steps-post"
    assert list(line.get_xdata()) == [1, 1.5, 4]
    assert list(line.get_ydata()) == [0, 0.5, 0.5]
    assert [t.get_text() for t in axis.get_legend().get_texts()][:2] == ["1.00 SGD", "0.42 STORM+"]


def test_a_grid_has_a_panel_for_each_workload_and_only_the_methods_asked_for(frame):
    for draw in (figures.curves_grid, figures.sensitivity_grid):
        figure = draw(frame, methods=["STORM+", "SGD"])
        shown = [axis for axis in figure.axes if axis.get_visible()]
        assert [axis.get_title() for axis in shown] == ["a", "b"]
        assert [t.get_text() for t in figure.legends[0].get_texts()] == ["STORM+", "SGD"]


LEFT_OUT = "each at its best lr\n(methods with one learning rate are left out)"


def test_methods_with_one_lr_are_not_drawn_as_tuned_and_it_is_said(frame, tmp_path):
    for figure in (figures.curves(frame, "a"), figures.performance_profile(frame)):
        default, best = figure.axes[:2]
        assert lines_of(default, "Adam")
        assert not lines_of(best, "Adam")
        assert best.get_title().endswith(LEFT_OUT)
        assert default.get_title().endswith("each at its default lr")
    grid = figures.curves_grid(frame, best_lr=True)
    assert "methods with one learning rate are left out" in _title(grid)
    assert [t.get_text() for t in grid.legends[0].get_texts()] == ["STORM+", "SGD"]
    assert [t.get_text() for t in grid.axes[1].texts] == ["no method ran several lr"]
    (tmp_path / "all").mkdir()
    everyone = frame_of(tmp_path / "all", swept())
    assert figures.curves(everyone, "a").axes[1].get_title() == "a: each at its best lr"
    assert "left out" not in _title(figures.curves_grid(everyone, best_lr=True))


def _title(figure):
    return figure.legends[0].get_title().get_text().replace("\n", " ")


def test_a_panel_without_a_default_does_not_speak_of_divergence(tmp_path):
    runs = [make_run([4, 2, 1], lr=lr, default=False) for lr in (1, 2)]
    frame = frame_of(tmp_path, [*runs, make_run([5, None], workload="x", status="diverged")])
    default, best = figures.curves(frame, "w").axes[:2]
    assert [t.get_text() for t in default.texts] == ["no run at the default lr"]
    assert not best.texts
    assert lines_of(best, "SGD")
    panel = figures.curves_grid(frame).axes[0]
    assert [t.get_text() for t in panel.texts] == ["no run at the default lr"]
    # Validation was not measured; that is another thing.
    unmeasured = frame[frame["workload"] == "w"].assign(valid_loss=math.nan, default=True)
    unmeasured = unmeasured[unmeasured["lr"] == 1]
    panel = figures.curves_grid(unmeasured, column="valid_loss").axes[0]
    assert [t.get_text() for t in panel.texts] == ["not measured"]


@pytest.mark.parametrize("draw", [figures.curves_grid, figures.sensitivity_grid])
@pytest.mark.parametrize("workloads", ["a", "ab", "abc"])
def test_the_legend_fits_into_the_figure(tmp_path, draw, workloads):
    runs = [make_run([4, 2], method=m, workload=w) for m in style.STYLES for w in workloads]
    figure = draw(frame_of(tmp_path, runs))
    figure.savefig(io.BytesIO(), format="png", dpi=figure.dpi)
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert 0 <= box.y0 < box.y1 <= figure.bbox.height


def test_the_map_notes_who_did_not_run_every_workload(tmp_path):
    runs = [make_run([4, 1], workload=w) for w in "ab"]
    frame = frame_of(tmp_path, [*runs, make_run([4, 0], method="SVRG", workload="a")])
    axis = figures.cost_of_not_tuning(frame).axes[0]
    labels = [t.get_text() for t in axis.get_yticklabels()]
    assert labels == ["SGD", "SVRG (1 of 2 workloads)"]


ODD = {
    "all diverged": [make_run([5, None], status="diverged")],
    "no point": [make_run([], status="diverged")],
    "one point": [make_run([1])],
    "zero": [make_run([1, 0])],
    "extremes": [make_run([1e20, 1e-20])],
    "huge": [make_run([1e-20, 1e20])],
    "nothing measured": [make_run([None, None])],
    "worse than the start": [make_run([1, 4])],
    "unknown method": [make_run([2, 1], method="Lion")],
    "no gradient norm": [
        run := make_run([2, 1]),
        run["curve"].update(grad_norm=[None, None]) or make_run([2, 1], seed=1, method="Adam"),
    ],
    "long": [make_run([1 / (1 + i) for i in range(500)], evaluations=range(500))],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_frames_can_be_drawn(tmp_path, name):
    frame = frame_of(tmp_path, ODD[name])
    for figure in (
        figures.curves(frame, "w"),
        figures.sensitivity(frame, "w"),
        figures.cost_of_not_tuning(frame),
        figures.performance_profile(frame),
    ):
        figure.savefig(drawn := io.BytesIO(), format="svg")
        assert b"</svg>" in drawn.getvalue()


def test_svg_is_the_same_each_time_and_refers_to_itself_only(frame):
    one, two = (to_svg(figures.curves(frame, "a"), "f1") for _ in range(2))
    assert one == two
    other = to_svg(figures.curves(frame, "a"), "f2")
    ids = [{part.split('"')[0] for part in svg.split(' id="')[1:]} for svg in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for reference in one.split('href="#')[1:]:
        assert reference.split('"')[0] in ids[0]


def test_svg_keeps_the_text_as_it_is(tmp_path):
    frame = frame_of(tmp_path, swept())
    svg = to_svg(figures.performance_profile(frame, fraction=0.5, setters=()), "f1")
    assert "0.42 STORM+" in svg  # coordinates are rounded, words are not


def test_inline_svg_has_a_text_for_those_who_cannot_see_it(frame):
    text = inline(to_svg(figures.curves(frame, "a"), "f"), 'a "b" <c>')
    assert text.startswith("<svg")
    assert 'role="img" aria-label="a &quot;b&quot; &lt;c&gt;"' in text
    assert ' width="' not in text.split(">")[0]


def test_without_a_gradient_norm_or_a_second_seed_the_sensitivity_claims_neither(tmp_path):
    runs = [make_run([2, 1], lr=lr, default=False) for lr in (0.1, 1.0)]
    for run in runs:
        run["curve"]["grad_norm"] = [None, None]
    figure = figures.sensitivity(frame_of(tmp_path, runs), "w")
    assert len(figure.axes) == 1
    assert figure.legends[0].get_title().get_text() == ""
    both = figures.sensitivity(frame_of(tmp_path / "both", hand_made()), "a")
    assert len(both.axes) == 2
    assert "median over seeds" in both.legends[0].get_title().get_text()
