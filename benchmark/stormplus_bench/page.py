"""The report as one HTML page with interactive figures, which opens without a network."""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import plotly.graph_objects as go  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench import finals
from stormplus_bench.methods import headline, ordered
from stormplus_bench.profiles import CLASSICS, TARGET_AT, curves, performance_profile
from stormplus_bench.style import style_of
from stormplus_bench.tables import Table

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
CONFIG = {"responsive": True, "displaylogo": False, "modeBarButtons": [["toImage"]]}
CSS = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1rem; }
table { border-collapse: collapse; font-size: 0.8rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: 0.2rem 0.5rem; text-align: right; }
tr > :first-child { background: white; left: 0; position: sticky; text-align: left; }
td { white-space: nowrap; }
.scroll { max-height: 40rem; overflow: auto; }
a { color: #087f5b; }
h1, h2 { font-size: 1.3rem; margin: 1rem 0 0; }
"""
CURVES = (
    "Training loss, median over seeds; each method at its default lr unless the menu says best. "
    "A click on a method in the legend shows or hides it; a double click shows it alone."
)
RATES = "Final training loss against the learning rate, median over seeds; diverged runs left out."
PROFILE = (
    "Share of the workloads whose target is reached within τ times the evaluations of the fastest "
    f"method, at default lr. The target: the training loss of the best of {', '.join(CLASSICS)}, "
    f"tuned, at {TARGET_AT:.0%} of the budget. Before the name: the score, the area under the line."
)


def build(frame: pd.DataFrame, tables: Sequence[Table], home: str | None = None) -> str:
    """Return the page, with the tables below the figures and a link to `home` at the top."""
    link = f'<a href="{html.escape(home, quote=True)}">← stormplus</a>' if home else ""
    figures = (
        ("Training curves", CURVES, curves_figure(frame)),
        ("Learning rates", RATES, rates_figure(frame)),
        ("Performance profile", PROFILE, profile_figure(frame)),
    )
    parts = []
    for number, (title, caption, figure) in enumerate(figures):
        drawn = figure.to_html(full_html=False, include_plotlyjs=number == 0, config=CONFIG)
        parts.append(f"<h2>{title}</h2>\n{drawn}\n<p>{html.escape(caption)}</p>")
    parts += [f"<h2>{table.name.capitalize()}</h2>\n{table.html()}" for table in tables]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>stormplus benchmark</title><style>{CSS}</style></head><body>
<nav>{link}</nav>
<h1>stormplus benchmark</h1>
{"".join(parts)}
</body></html>
"""


def curves_figure(frame: pd.DataFrame) -> Any:
    """Return the training loss against gradient evaluations, with a menu of workloads."""
    tables: dict[str, pd.DataFrame] = {}
    tuned = finals.tuned(frame)
    tuned = tuned[tuned["rates"] > 1]
    for ends, note in ((finals.defaults(frame), ""), (tuned, ", best lr")):
        found = curves(frame).merge(ends[finals.SETTING], on=finals.SETTING)
        found = found.rename(columns={"evaluations": "x", "median": "y"})
        tables |= {f"{workload}{note}": part for workload, part in found.groupby("workload")}
    return _with_menu(tables, ordered(frame["method"]), "gradient evaluations")


def rates_figure(frame: pd.DataFrame) -> Any:
    """Return the final loss against the learning rate, with a menu of workloads."""
    found = finals.per_rate(frame).rename(columns={"lr": "x", "loss": "y"})
    tables = dict(list(found.groupby("workload")))
    return _with_menu(tables, ordered(frame["method"]), "learning rate").update_xaxes(type="log")


def _with_menu(tables: dict[str, pd.DataFrame], methods: list[str], x_title: str) -> Any:
    """Return one line per method; the menu replaces the points and keeps the ticked methods."""
    choices = {name: _points(table, methods) for name, table in sorted(tables.items())}
    first = next(iter(choices.values()))
    figure, ticked = go.Figure(), headline(methods) or methods
    for method, x, y, spread in zip(methods, *first.values()):
        figure.add_scatter(
            x=x,
            y=y,
            customdata=spread,
            name=html.escape(method),
            mode="lines+markers",
            line=_line(method),
            visible=True if method in ticked else "legendonly",
            hovertemplate="%{y:.4g} (%{customdata[0]:.4g} to %{customdata[1]:.4g})",
        )
    buttons = [
        {"method": "restyle", "label": html.escape(name), "args": [points]}
        for name, points in choices.items()
    ]
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    _layout(figure, x_title, "training loss").update_layout(updatemenus=[menu])
    nonnegative = all(y >= 0 for points in choices.values() for line in points["y"] for y in line)
    return figure.update_yaxes(type="log" if nonnegative else "linear", exponentformat="power")


def _points(table: pd.DataFrame, methods: list[str]) -> dict[str, list[Any]]:
    known = table[np.isfinite(table["y"])]
    lines = [known[known["method"] == method] for method in methods]
    return {
        "x": [line["x"].tolist() for line in lines],
        "y": [line["y"].tolist() for line in lines],
        "customdata": [line[["low", "high"]].to_numpy().tolist() for line in lines],
    }


def profile_figure(frame: pd.DataFrame) -> Any:
    """Return the performance profile at the default learning rates."""
    profile, figure = performance_profile(frame), go.Figure()
    for method, score in profile.scores.items():
        rho = profile.rho.loc[method]
        line = _line(method) | {"shape": "hv"}
        name = f"{score:.2f} {html.escape(method)}"
        figure.add_scatter(x=rho.index.tolist(), y=rho.tolist(), name=name, mode="lines", line=line)
    return _layout(figure, "τ", "share of the workloads")


def _line(method: str) -> dict[str, Any]:
    style = style_of(method)
    dash = ",".join(f"{length}px" for length in style.dash) or "solid"
    return {"color": style.colour, "dash": dash, "width": style.width}


def _layout(figure: Any, x_title: str, y_title: str) -> Any:
    return figure.update_layout(
        template="plotly_white",
        height=640,
        margin={"l": 60, "r": 10, "t": 60, "b": 40},
        legend={"orientation": "h", "y": -0.15, "yanchor": "top"},
        hovermode="x unified",
        xaxis_title=x_title,
        yaxis_title=y_title,
    )
