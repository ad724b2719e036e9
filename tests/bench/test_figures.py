"""The figures are drawn from the frame alone, for odd frames too, each method in its style."""

import io
import math

import numpy as np
import pandas as pd
import pytest
from bench_rows import frame_of, hand_made, make_row, swept
from matplotlib.colors import rgb_to_hsv, to_hex, to_rgb

from stormplus.theory.palette import PALETTE, shade
from stormplus_bench import figures, style
from stormplus_bench.figures import slug
from stormplus_bench.methods import HEADLINE, METHODS, OURS, TIERS, few, in_figures, ordered
from stormplus_bench.svg import decoration, inline, to_svg
from stormplus_bench.train.catalogue import SMOOTH


@pytest.fixture(scope="module")
def frame():
    return frame_of(hand_made())


@pytest.fixture(scope="module")
def curves(frame):
    return figures.curves(frame, "a")


def artists(axis, method, number=0):
    name = f"m--{slug(method)}--{number}"
    return [part for part in (*axis.get_lines(), *axis.collections) if part.get_gid() == name]


def texts(axis):
    return [text.get_text() for text in axis.texts]


def title_of_legend(figure):
    return figure.legends[0].get_title().get_text().replace("\n", " ")


def names_in_legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_no_two_methods_look_alike():
    assert set(style.STYLES) == set(METHODS)
    assert {name: look.colour for name, look in style.STYLES.items()}.items() <= PALETTE.items()
    assert len(set(PALETTE.values())) == len(PALETTE)
    assert len({look.marker for look in style.STYLES.values()}) == len(METHODS)  # grey print
    assert len({slug(name) for name in METHODS}) == len(METHODS)
    assert {*OURS, *HEADLINE} <= set(METHODS)


def test_an_unknown_method_has_a_lasting_style_of_its_own():
    # A pinned value: Python's own hash of a text is another one in each process.
    assert style.style_of("Lion") == style._SPARE[0xFFEFF301 % len(style._SPARE)]
    assert style.style_of("Lion").marker not in {s.marker for s in style.STYLES.values()}
    assert style.style_of("Lion").width == style.style_of("STORM+").width  # the reader's own
    assert len(set(style._SPARE)) == len(style._SPARE) > 100
    assert not {look.colour for look in style._SPARE} & set(PALETTE.values())
    assert few(["Lion", "SGD", "Adam"]) == ["Adam", "Lion"]
    assert ordered(["Lion", "SGD", "STORM+", "SGD"]) == ["STORM+", "SGD", "Lion"]


@pytest.mark.parametrize("names", [OURS, HEADLINE], ids=["ours", "headline"])
def test_colours_stay_apart_for_colour_blind_readers(names):
    # Viénot, Brettel and Mollon (1999), linear RGB; protanopia and deuteranopia.
    protan = [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]
    deutan = [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]
    for matrix in (protan, deutan):
        seen = [np.array(matrix) @ np.array(to_rgb(PALETTE[name])) ** 2.2 for name in names]
        seen = [np.clip(c, 0, 1) ** (1 / 2.2) for c in seen]
        assert min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]) > 0.1


def test_curves_show_the_median_the_band_and_where_a_method_diverged(curves):
    default, best = curves.axes[:2]
    (line,) = artists(default, "STORM+")
    # Seeds 10 6 4 2 1 and 10 6 4 2 3.
    assert list(line.get_xdata()) == [0, 25, 50, 75, 100]
    assert list(line.get_ydata()) == [10, 6, 4, 2, 2]
    assert to_hex(line.get_color()) == PALETTE["STORM+"]
    (band,) = artists(default, "STORM+", 1)
    assert {float(v) for x, v in band.get_paths()[0].vertices if x == 100} == {1, 3}
    (sgd,) = artists(best, "SGD")  # at lr 1
    assert list(sgd.get_ydata()) == [10, 5, 2, 1, 0.5]
    assert [list(cross.get_xdata()) for cross in artists(default, "Adam", 2)] == [[25]]


def test_sensitivity_puts_divergence_on_a_shelf_and_rings_the_default(frame):
    figure = figures.sensitivity(frame, "a")
    axis = figure.axes[0]
    (sgd,) = artists(axis, "SGD")
    assert list(sgd.get_xdata()) == [0.1, 1]
    assert list(sgd.get_ydata()) == [4, 0.5]
    (adam,) = artists(axis, "Adam")
    assert 6 < adam.get_ydata()[0] < axis.get_ylim()[1]  # no run that ends is above 6
    (ring,) = artists(axis, "STORM+", 2)
    assert list(ring.get_xdata()) == [1.0]
    assert len(figure.axes) == 2
    assert "median over seeds" in title_of_legend(figure)


def test_without_a_gradient_norm_or_a_second_seed_the_sensitivity_claims_neither():
    found = [make_row([2, 1], lr=lr, default=False) for lr in (0.1, 1.0)]
    for row in found:
        row["curve"]["grad_norm"] = [None, None]
    figure = figures.sensitivity(frame_of(found), "w")
    assert len(figure.axes) == 1
    assert title_of_legend(figure) == ""


def test_the_map_of_costs_prints_its_numbers(frame):
    axis = figures.cost_of_not_tuning(frame).axes[0]
    labels = {t.get_text(): t.get_weight() for t in axis.get_yticklabels()}
    assert labels == {"SGD": "normal", "STORM+": "bold", "Adam": "normal"}
    # SGD: 3.5 / 9.5 and 0; STORM+: 1.5 / 9.5 and 0.5 / 1.5; Adam diverged on both.
    assert texts(axis) == ["37", "0", "18", "16", "33", "25", "div.", "div.", "100"]
    found = [make_row([4, 1], workload=w) for w in "ab"]
    part = frame_of([*found, make_row([4, 0], method="SVRG", workload="a")])
    assert figures.stands_out("Lion")  # not the benchmark's: the reader's
    axis = figures.cost_of_not_tuning(part).axes[0]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["SGD", "SVRG (1 of 2)"]
    assert "·" in texts(axis)


def test_the_profile_is_a_staircase_with_scores_in_the_legend():
    figure = figures.performance_profile(frame_of(swept()), fraction=0.5, setters=())
    axis = figure.axes[1]
    (line,) = artists(axis, "STORM+")
    assert line.get_drawstyle() == "steps-post"
    assert list(line.get_xdata()) == [1, 1.5, 4]
    assert list(line.get_ydata()) == [0, 0.5, 0.5]
    assert [t.get_text() for t in axis.get_legend().get_texts()][:2] == ["1.00 SGD", "0.42 STORM+"]
    assert "0.42 STORM+" in to_svg(figure, "f1")  # coordinates are rounded, words are not


def test_a_grid_has_a_panel_for_each_workload_and_only_the_methods_asked_for(frame):
    for draw in (figures.curves_grid, figures.sensitivity_grid):
        figure = draw(frame, methods=["STORM+", "SGD"])
        shown = [axis for axis in figure.axes if axis.get_visible()]
        assert [axis.get_title() for axis in shown] == ["a", "b"]
        assert names_in_legend(figure) == ["STORM+", "SGD"]


def test_methods_with_one_lr_are_not_drawn_as_tuned_and_it_is_said(frame, curves):
    for figure in (curves, figures.performance_profile(frame)):
        default, best = figure.axes[:2]
        assert artists(default, "Adam")
        assert not artists(best, "Adam")
        words = "each at its best lr\n(methods with one learning rate are left out)"
        assert best.get_title().endswith(words)
        assert default.get_title().endswith("each at its default lr")
    grid = figures.curves_grid(frame, best_lr=True)
    assert "methods with one learning rate are left out" in title_of_legend(grid)
    assert names_in_legend(grid) == ["STORM+", "SGD"]
    assert texts(grid.axes[1]) == ["no method ran several lr"]
    everyone = figures.curves_grid(frame_of(swept()), best_lr=True)
    assert title_of_legend(everyone).startswith("each at its best lr; ")


def test_a_panel_without_a_default_does_not_speak_of_divergence():
    found = [make_row([4, 2, 1], lr=lr, default=False) for lr in (1, 2)]
    frame = frame_of([*found, make_row([5, None], workload="x", status="diverged")])
    default, best = figures.curves(frame, "w").axes[:2]
    assert texts(default) == ["no run at the default lr"]
    assert not best.texts
    assert artists(best, "SGD")
    assert texts(figures.curves_grid(frame).axes[0]) == ["no run at the default lr"]
    # Validation was not measured; that is another thing.
    unmeasured = frame_of(found[:1]).assign(valid_loss=math.nan, default=True)
    assert texts(figures.curves_grid(unmeasured, column="valid_loss").axes[0]) == ["not measured"]


@pytest.mark.parametrize("draw", [figures.curves_grid, figures.sensitivity_grid])
@pytest.mark.parametrize("workloads", ["a", "abc"])
def test_the_legend_fits_into_the_figure(draw, workloads):
    figure = draw(
        frame_of(make_row([4, 2], method=m, workload=w) for m in METHODS for w in workloads)
    )
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert 0 <= box.y0 < box.y1 <= figure.bbox.height


def test_every_figure_fits_a_column_of_text_and_has_few_panels(frame, curves):
    drawn = [curves, figures.sensitivity(frame, "a"), figures.cost_of_not_tuning(frame)]
    drawn += [figures.performance_profile(frame), figures.curves_grid(frame)]
    assert {figure.get_figwidth() for figure in drawn} == {figures.WIDTH}
    networks, smooth = TIERS["networks"], TIERS["smooth"]
    assert {*SMOOTH} == {*smooth}
    found = in_figures(["mine", "nmf (60 evaluations)", *networks, *smooth])
    assert found == {
        "smooth": sorted([*smooth, "nmf (60 evaluations)"]),
        "networks": list(networks),
        "others": ["mine"],
    }
    many = in_figures(map(str, range(20)))
    assert [len(names) for names in many.values()] == [8, 8, 4]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01, "0.01"), (20, "20"), (1e-5, "10⁻⁵"), (2e-5, "2·10⁻⁵"), (1e10, "10¹⁰")],
)
def test_numbers_of_logarithmic_axes_are_plain_text(value, text):
    assert figures.power(value) == text


def test_the_earliest_is_the_strongest_colour_of_a_map_of_targets():
    grid = pd.DataFrame([[0.2, 0.6], [1.0, math.inf]], ["Untuned", "SGD"], ["a", "b"])
    (axis,) = figures.target_maps({"one": grid}).axes
    cells = axis.collections[0]
    cells.update_scalarmappable()
    light = cells.get_facecolors()[:, :3].sum(1)
    assert light[0] < light[1] < light[2]
    assert texts(axis) == ["0.20", "0.60", "1.00", "missed"]
    assert [t.get_weight() for t in axis.get_yticklabels()] == ["bold", "normal"]


def test_a_method_at_several_rates_has_one_hue():
    assert shade("#d9480f", 1) == "#d9480f"
    assert shade("#d9480f", 0) == "#ffffff"
    assert shade("#000000", 0.5) == "#808080"


def hue_of(method):
    return 360 * rgb_to_hsv(to_rgb(PALETTE[method]))[0]


def test_ours_are_not_all_in_one_orange():
    orange = [method for method in (*OURS, "STORM") if 10 <= hue_of(method) <= 40]
    assert orange == ["STORM+"]


def test_names_are_no_formulas_and_one_seed_is_not_called_a_median():
    found = [make_row([2, 1], method=m) for m in (r"$\frac{$", "_hidden", "long" * 50)]
    figure = figures.curves_grid(frame_of(found))
    assert "one seed" in title_of_legend(figure)
    assert "median" not in title_of_legend(figure)
    figure.savefig(io.BytesIO(), format="svg")
    names = names_in_legend(figure)
    assert len(names) == 3
    assert max(map(len, names)) == figures.LONGEST


def without_gradient_norm(row):
    row["curve"]["grad_norm"] = [None] * len(row["curve"]["train_loss"])
    return row


ODD = {
    "all diverged": [make_row([5, None], status="diverged")],
    "no measurement": [make_row([], status="diverged")],
    "one measurement": [make_row([1])],
    "zero": [make_row([1, 0])],
    "extremes": [make_row([1e20, 1e-20])],
    "huge": [make_row([1e-20, 1e20])],
    "nothing measured": [make_row([None, None])],
    "worse than the start": [make_row([1, 4])],
    "unknown method": [make_row([2, 1], method="Lion")],
    "no gradient norm": [
        without_gradient_norm(make_row([2, 1])),
        make_row([2, 1], seed=1, method="Adam"),
    ],
    "long": [make_row([1 / (1 + i) for i in range(500)], evaluations=range(500))],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_frames_can_be_drawn(name):
    frame = frame_of(ODD[name])
    for figure in (
        figures.curves(frame, "w"),
        figures.sensitivity(frame, "w"),
        figures.cost_of_not_tuning(frame),
        figures.performance_profile(frame),
    ):
        figure.set_layout_engine("none")  # it costs most of the time and changes no number
        figure.savefig(drawn := io.BytesIO(), format="svg")
        assert b"</svg>" in drawn.getvalue()


def test_svg_is_the_same_each_time_and_refers_to_itself_only(frame):
    one, two, other = (to_svg(figures.curves(frame, "a"), prefix) for prefix in ("f1", "f1", "f2"))
    assert one == two
    ids = [{part.split('"')[0] for part in svg.split(' id="')[1:]} for svg in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for reference in one.split('href="#')[1:]:
        assert reference.split('"')[0] in ids[0]
    text = inline(one, 'a "b" <c>')  # for those who cannot see it
    assert text.startswith("<svg")
    assert 'role="img" aria-label="a &quot;b&quot; &lt;c&gt;"' in text
    assert ' width="' not in text.split(">")[0]
    assert 'aria-hidden="true"' in decoration(one)
