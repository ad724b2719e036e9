"""The paper's rates, measured: `stormplus rates`."""

from stormplus.theory.rates.experiment import METHODS, Plan, Result, run_method
from stormplus.theory.rates.fit import Slope, slope
from stormplus.theory.rates.report import slopes, summary, table, write

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
