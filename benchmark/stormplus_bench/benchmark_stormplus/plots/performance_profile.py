from typing import Any

import numpy as np
from benchopt import BasePlot

from stormplus_bench import rows
from stormplus_bench.finals import ONE_LR, any_left_out
from stormplus_bench.methods import ordered
from stormplus_bench.profiles import performance_profile
from stormplus_bench.style import style_of


class Plot(BasePlot):
    """Share of the workloads whose target a method reaches within tau times the fastest."""

    name = "Performance profile"
    type = "scatter"
    options = {"lr": ["default", "best"]}

    def plot(self, df: Any, lr: str) -> list[dict[str, Any]]:
        profile = performance_profile(rows.from_benchopt(df), best_lr=lr == "best")
        taus = profile.rho.columns.to_numpy()
        return [
            {
                # A staircase: each level is kept until the next tau.
                "x": np.repeat(taus, 2)[1:].tolist(),
                "y": np.repeat(profile.rho.loc[method].to_numpy(), 2)[:-1].tolist(),
                "label": f"{profile.scores[method]:.2f} {method}",
                "color": style_of(method).colour,
                "marker": style_of(method).marker,
            }
            for method in ordered(profile.rho.index)
        ]

    def get_metadata(self, df: Any, lr: str) -> dict[str, Any]:
        left_out = lr == "best" and any_left_out(rows.from_benchopt(df))
        title = f"each method at its {lr} learning rate; before the name: the score"
        return {
            "title": f"{title}\n{ONE_LR}" if left_out else title,
            "xlabel": "times the gradient evaluations of the fastest method",
            "ylabel": "share of the workloads",
            "scale": "linear",
        }
