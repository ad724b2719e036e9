from typing import Any

import numpy as np
from benchopt import BasePlot

from stormplus_bench import rows, scores
from stormplus_bench.style import style_of

MEAN = "mean over workloads"


class Plot(BasePlot):
    """What a default leaves on the table, in per cent of the possible decrease."""

    name = "Cost of not tuning"
    type = "bar_chart"
    options = {
        "workload": lambda df: [MEAN, *sorted(df["objective_workload"].unique().tolist())],
    }

    def plot(self, df: Any, workload: str) -> list[dict[str, Any]]:
        cost = scores.cost_of_not_tuning(rows.from_benchopt(df))
        if workload == MEAN:
            mean = scores.mean_lost(cost)
            lost, notes = mean["mean"], mean["note"].to_dict()
        else:
            lost = cost[cost["workload"] == workload].set_index("method")["lost"].sort_values()
            notes = {}
        return [
            {
                "y": [100 * min(float(value), 1.0)],  # divergence is as bad as no training
                "text": scores.per_cent(value),
                "label": method + notes.get(method, ""),
                "color": style_of(method).colour,
            }
            for method, value in lost.items()
            if not np.isnan(value)
        ]

    def get_metadata(self, df: Any, workload: str) -> dict[str, Any]:
        return {
            "title": f"Cost of not tuning: {workload}",
            "ylabel": "per cent of the possible decrease of the loss",
        }
