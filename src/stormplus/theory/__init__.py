"""The paper's theory, executable: lemmas, bounds on whole runs, and an observer of runs.

`stormplus.theory.lemmas` has the inequalities on sequences, `stormplus.theory.bounds` those on
runs, and `stormplus.theory.problems` problems with known constants.
"""

from stormplus.theory.bounds import Trace, trace_run
from stormplus.theory.lemmas import Inequality
from stormplus.theory.observer import Attachment, Observer

__all__ = ["Attachment", "Inequality", "Observer", "Trace", "trace_run"]
