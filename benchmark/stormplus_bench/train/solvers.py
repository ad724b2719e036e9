"""The methods of the benchmark, in a table: benchopt wants a file for each of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from dadaptation import DAdaptAdam  # type: ignore[import-untyped, unused-ignore]
from dog import DoG, LDoG, PolynomialDecayAverager  # type: ignore[import-untyped, unused-ignore]
from mechanic_pytorch import mechanize  # type: ignore[import-untyped, unused-ignore]
from prodigyopt import Prodigy  # type: ignore[import-untyped, unused-ignore]
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped, unused-ignore]
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, RMSprop

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from stormplus.torch import PairedOptimizer
from stormplus_bench.train import steppers
from stormplus_bench.train.optimizers import AdamPlusPlus, NadamW, ScheduleFreePlus
from stormplus_bench.train.solver import OneGradientSolver, StormSolver, TorchSolver
from stormplus_bench.train.steppers import AtAverage, Stepper
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Workload

# By name in suites: name in tables, optimizer, documented learning rate.
OPTIMIZERS: dict[str, tuple[str, Any, float]] = {
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


def untuned(training: Training, lr: float) -> Stepper:
    return AtAverage(Untuned(training.parameters))


def dog(training: Training, lr: float, optimizer: Any = DoG) -> Stepper:
    """DoG (Ivgi et al. 2023) with the averager that its documentation calls crucial.

    `reps_rel` as documented: 1e-6, or 1e-4 with BatchNorm.
    """
    reps_rel = 1e-4 if training.workload.batch_norm else 1e-6
    made = optimizer(training.parameters, reps_rel, lr)
    return steppers.Averaged(made, PolynomialDecayAverager(training.model))


def schedule_free(training: Training, lr: float, warmup: float = 0.0) -> Stepper:
    """AdamW (Defazio et al. 2024); `warmup` is the share of the budget in which its rate rises."""
    rising = round(warmup * training.workload.budget)
    return AtAverage(AdamWScheduleFree(training.parameters, lr=lr, warmup_steps=rising))


def schedule_free_plus(training: Training, lr: float) -> Stepper:
    return steppers.AtAverageWithLoss(ScheduleFreePlus(training.parameters, lr=lr))


def nadamw(training: Training, lr: float) -> Stepper:
    """As AlgoPerf's self-tuning baseline has it: calibrated constants, warm-up, cosine."""
    optimizer = NadamW(training.parameters, lr=lr)
    return steppers.Scheduled(optimizer, training.workload.budget, NadamW.WARMUP)


def muon(training: Training, lr: float) -> Stepper:
    """Muon on hidden matrices, AdamW on the rest; Muon's rate is scaled to match AdamW's."""
    hidden = hidden_matrices(training.model)
    ids = set(map(id, hidden))
    rest = [p for p in training.parameters if id(p) not in ids]
    return steppers.TwoOptimizers(AdamW(rest, lr), Muon(hidden, lr, adjust_lr_fn="match_rms_adamw"))


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices except embeddings and the last one, the output layer's."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]
    return [p for p in matrices[:-1] if id(p) not in embeddings]


def no_hidden_matrix(workload: Workload) -> str | None:
    return None if hidden_matrices(workload.model(0)) else "the model has no hidden matrix"


def no_matrix(workload: Workload) -> str | None:
    found = any(p.ndim == 2 for p in workload.model(0).parameters())
    return None if found else "the model has no matrix"


def no_budget(workload: Workload) -> str | None:
    enough = workload.batches * 4 <= workload.budget
    return None if enough else "a full gradient takes more than a quarter of the budget"


class Method(NamedTuple):
    label: str
    default_lr: float
    stepper: Callable[[Training, float], Stepper]
    unsuited: Callable[[Workload], str | None] = lambda workload: None


# Methods that are more than one optimizer with the usual loop, by name in suites.
STEPPERS: dict[str, Method] = {
    "dog": Method("DoG", 1.0, dog),
    "l-dog": Method("L-DoG", 1.0, partial(dog, optimizer=LDoG)),
    # Yuan et al. 2024; approximate is its authors' default, with one gradient per step.
    "mars": Method("MARS", 3e-3, lambda run, lr: steppers.Mars(run.model, lr)),
    "mars-approximate": Method(
        "MARS approximate",
        3e-3,
        lambda run, lr: steppers.MarsApproximate(run.model, lr),
        no_matrix,
    ),
    "muon": Method("Muon", 1e-3, muon, no_hidden_matrix),
    "nadamw": Method("NadamW", NadamW.LR, nadamw),
    "schedule-free": Method("Schedule-Free", 0.0025, schedule_free),
    "schedule-free-warmup": Method(
        "Schedule-Free warm-up", 0.0025, partial(schedule_free, warmup=0.05)
    ),
    # Defazio 2026: no learning rate; lr 1 multiplies its step, as documented.
    "schedule-free-plus": Method("ScheduleFree+", 1.0, schedule_free_plus),
    # Johnson and Zhang 2013: no package documents a default.
    "svrg": Method("SVRG", 0.1, lambda run, lr: steppers.Svrg(run.model, lr), no_budget),
    "untuned": Method("Untuned", 1.0, untuned),
}


def solver(name: str) -> type[TorchSolver]:
    """Return the benchopt solver of a line of the tables."""
    if name in OPTIMIZERS:
        label, optimizer, default_lr = OPTIMIZERS[name]
        paired = isinstance(optimizer, type) and issubclass(optimizer, PairedOptimizer)
        base: Any = StormSolver if paired else OneGradientSolver
        about = {"label": label, "default_lr": default_lr, "optimizer": staticmethod(optimizer)}
    else:
        method, base = STEPPERS[name], TorchSolver
        about = {
            "label": method.label,
            "default_lr": method.default_lr,
            "stepper": lambda self, training, lr: method.stepper(training, lr),
            "unsuited": staticmethod(method.unsuited),
            "test_config": {"dataset": {"name": "digits"}},  # has matrices
        }
    return type("Solver", (base,), about | {"name": name})
