"""The paper's theory, running: its lemmas, bounds and error dynamics, and an observer."""

from stormplus.theory.bounds import (
    MainConstants,
    Trace,
    error_dynamics,
    main_theorem_constants,
    offline_sum_bound,
    remembered,
    square_sums,
    sum_of_gradients,
    trace_run,
)
from stormplus.theory.lemmas import (
    Inequality,
    ats_tau_star,
    beta,
    const_sum,
    const_sum_delayed,
    gains,
    shifted_technical_1,
    shifted_technical_1_line_3,
    shifted_technical_1_sharp,
    tau_star,
    technical_1,
    young,
)
from stormplus.theory.observer import Attachment, Observer

__all__ = [
    "Attachment",
    "Inequality",
    "MainConstants",
    "Observer",
    "Trace",
    "ats_tau_star",
    "beta",
    "const_sum",
    "const_sum_delayed",
    "error_dynamics",
    "gains",
    "main_theorem_constants",
    "offline_sum_bound",
    "remembered",
    "shifted_technical_1",
    "shifted_technical_1_line_3",
    "shifted_technical_1_sharp",
    "square_sums",
    "sum_of_gradients",
    "tau_star",
    "technical_1",
    "trace_run",
    "young",
]
