from typing import Any

from benchopt import BasePlot

from stormplus_bench import page, rows, scores

RATES = ("learning rates", "best lr at an end")


class Plot(BasePlot):
    """One line for each workload and method; the columns are those of `stormplus report`."""

    name = "All results"
    type = "table"
    options = {}

    def plot(self, df: Any) -> list[list[Any]]:
        table = scores.table(rows.from_benchopt(df))
        columns = [*(key for key, _, _ in page.COLUMNS), "rates", "at_end"]
        # JSON has neither nan nor inf; the page shows the empty cell as such.
        usable = table[columns].astype(object).where(table[columns].notna(), None)
        return [[_cell(value) for value in line] for line in usable.to_numpy().tolist()]

    def get_metadata(self, df: Any) -> dict[str, Any]:
        return {
            "title": "All results",
            "columns": [*(title for _, title, _ in page.COLUMNS), *RATES],
            "default_order_ascending": True,
            "default_order_column": 0,
        }


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "inf" if value == float("inf") else value
