"""The paper's rates, measured: `stormplus rates`."""

from stormplus.theory.rates.experiment import METHODS, Plan, Result, run_method, versions
from stormplus.theory.rates.report import Slope, slope, slopes, summary, table
from stormplus.theory.rates.store import write

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
    "versions",
    "write",
]
