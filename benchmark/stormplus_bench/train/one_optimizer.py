"""The methods that are one optimizer, in a table: benchopt wants a file for each of them."""

from functools import partial
from typing import Any

from dadaptation import DAdaptAdam  # type: ignore[import-untyped, unused-ignore]
from mechanic_pytorch import mechanize  # type: ignore[import-untyped, unused-ignore]
from prodigyopt import Prodigy  # type: ignore[import-untyped, unused-ignore]
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from stormplus import SimplifiedStormPlus, Storm, StormPlus
from stormplus.torch import PairedOptimizer
from stormplus_bench.train.optimizers import AdamPlusPlus
from stormplus_bench.train.solver import OneGradientSolver, StormSolver, TorchSolver

# By name in suites: name in tables, optimizer, documented learning rate.
TABLE: dict[str, tuple[str, Any, float]] = {
    "adagrad": ("AdaGrad", Adagrad, 1e-2),
    "adam": ("Adam", Adam, 1e-3),
    "adam-plus-plus": ("Adam++", AdamPlusPlus, 1.0),
    "adamw": ("AdamW", AdamW, 1e-3),
    "dadaptation": ("D-Adaptation", DAdaptAdam, 1.0),  # Defazio and Mishchenko 2023
    "mechanic": ("Mechanic", mechanize(AdamW), 1.0),  # Cutkosky et al. 2023
    "prodigy": ("Prodigy", Prodigy, 1.0),  # Mishchenko and Defazio 2024
    "rmsprop": ("RMSprop", RMSprop, 1e-2),
    "sgd": ("SGD", SGD, 1e-3),
    "sgd-momentum": ("SGD momentum", partial(SGD, momentum=0.9), 1e-3),
    "simplified-storm-plus": ("simplified STORM+", SimplifiedStormPlus, 1.0),  # Levy et al. 2021
    "storm": ("STORM", Storm, 1.0),  # Cutkosky and Orabona 2019
    "storm-plus": ("STORM+", StormPlus, 1.0),
}


def solver(name: str) -> type[TorchSolver]:
    """Return the benchopt solver of a line of the table."""
    label, optimizer, default_lr = TABLE[name]
    paired = isinstance(optimizer, type) and issubclass(optimizer, PairedOptimizer)
    base: Any = StormSolver if paired else OneGradientSolver
    about = {"name": name, "label": label, "default_lr": default_lr}
    return type("Solver", (base,), about | {"optimizer": staticmethod(optimizer)})
