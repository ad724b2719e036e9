from typing import Any

import numpy as np
from benchopt import BasePlot

from stormplus_bench import finals, rows
from stormplus_bench.methods import ordered
from stormplus_bench.style import style_of

MEASURES = {
    "final training loss": ("loss", "low", "high"),
    "final gradient norm": ("grad_norm", "grad_low", "grad_high"),
}


class Plot(BasePlot):
    """Final loss and gradient norm against lr: the flat part is what a user gains."""

    name = "Learning-rate sensitivity"
    type = "scatter"
    options = {
        "workload": lambda df: sorted(df["objective_workload"].unique().tolist()),
        "measure": list(MEASURES),
    }

    def plot(self, df: Any, workload: str, measure: str) -> list[dict[str, Any]]:
        middle, low, high = MEASURES[measure]
        table = finals.per_rate(rows.from_benchopt(df))
        table = table[(table["workload"] == workload) & np.isfinite(table[middle])]
        table[high] = table[high].where(np.isfinite(table[high]), table[middle])
        return [
            {
                "x": line["lr"].to_list(),
                "y": line[middle].to_list(),
                "y_low": line[low].to_list(),
                "y_high": line[high].to_list(),
                "label": method,
                "color": style_of(method).colour,
                "marker": style_of(method).marker,
            }
            for method in ordered(table["method"])
            for line in [table[table["method"] == method].sort_values("lr")]
        ]

    def get_metadata(self, df: Any, workload: str, measure: str) -> dict[str, Any]:
        return {
            "title": f"{workload}\nruns that diverge are left out",
            "xlabel": "learning rate",
            "ylabel": measure,
        }
