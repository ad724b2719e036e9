"""The paper's rates, measured: `stormplus rates`."""

from stormplus.rates.experiment import METHODS, Plan, Result, run_method
from stormplus.rates.fit import Slope, slope
from stormplus.rates.report import slopes, summary, table, write

__all__ = [
    "METHODS",
    "Plan",
    "Result",
    "Slope",
    "run_method",
    "slope",
    "slopes",
    "summary",
    "table",
    "write",
]
