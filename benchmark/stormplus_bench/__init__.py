"""The benchmark of stormplus: what runs, stores, scores, draws and reports it.

`benchmark_stormplus/` is the folder that benchopt runs. It imports this package; this package
only names its path.
"""

__version__ = "0.1.0"
