"""The methods of the benchmark; benchopt wants a file for each, which imports it from here."""

import math
from functools import partial
from typing import Any

from dadaptation import DAdaptAdam  # type: ignore[import-untyped, unused-ignore]
from dog import DoG, LDoG  # type: ignore[import-untyped, unused-ignore]
from mechanic_pytorch import mechanize  # type: ignore[import-untyped, unused-ignore]
from prodigyopt import Prodigy  # type: ignore[import-untyped, unused-ignore]
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped, unused-ignore]
from torch import nn, optim

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from stormplus_bench.train import steppers
from stormplus_bench.train.optimizers import AdamPlusPlus, NadamW, ScheduleFreePlus
from stormplus_bench.train.solver import TorchSolver, solver
from stormplus_bench.train.steppers import AtAverage, Averaged, OneGradient, Scheduled, Stepper
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Workload


def one_gradient(name: str, label: str, default_lr: float, optimizer: Any) -> type[TorchSolver]:
    """Return the solver of an optimizer in the usual loop.

    Variants: "cosine" and "linear" schedules that end at zero, AdamW's after a warm-up; and
    "average", measured at DoG's average of the iterates, with weights like t^8.
    """

    def stepper(training: Training, lr: float, variant: str | None) -> Stepper:
        made = optimizer(training.parameters, lr=lr)
        if variant is None:
            return OneGradient(made)
        if variant == "average":
            return Averaged(made, training.model)
        warmup = 0.05 if label == "AdamW" else 0.0
        return Scheduled(made, training.workload.budget, warmup, linear=variant == "linear")

    return solver(name, label, default_lr, stepper, variant=None)


def paired(name: str, label: str, optimizer: Any) -> type[TorchSolver]:
    """Return the solver of an optimizer with two gradients per step.

    `unit` is the optimizer's, or "mean": the rule sees mean squares over the n coordinates instead
    of squared norms, as in the authors' code. The unit is sqrt(n), and lr is multiplied by it.
    """

    def stepper(training: Training, lr: float, unit: Any) -> Stepper:
        if unit == "mean":
            unit = math.sqrt(sum(p.numel() for p in training.parameters))
            lr *= unit
        return steppers.TwoGradients(optimizer(training.parameters, lr, unit=unit))

    return solver(name, label, 1.0, stepper, unit=1.0)


def _dog(training: Training, lr: float, optimizer: Any = DoG) -> Stepper:
    """DoG (Ivgi et al. 2023) with the averager that its documentation calls crucial.

    `reps_rel` as documented: 1e-6, or 1e-4 with BatchNorm.
    """
    reps_rel = 1e-4 if training.workload.batch_norm else 1e-6
    made = optimizer(training.parameters, reps_rel, lr)
    return Averaged(made, training.model)


def _schedule_free(training: Training, lr: float, warmup: float = 0.0) -> Stepper:
    """AdamW (Defazio et al. 2024); `warmup` is the share of the budget in which its rate rises."""
    rising = round(warmup * training.workload.budget)
    return AtAverage(AdamWScheduleFree(training.parameters, lr=lr, warmup_steps=rising))


def _nadamw(training: Training, lr: float) -> Stepper:
    """As AlgoPerf's self-tuning baseline has it: calibrated constants, warm-up, cosine."""
    optimizer = NadamW(training.parameters, lr=lr)
    return Scheduled(optimizer, training.workload.budget, NadamW.WARMUP)


def _muon(training: Training, lr: float) -> Stepper:
    """Muon on hidden matrices, AdamW on the rest; Muon's rate is scaled to match AdamW's."""
    hidden = hidden_matrices(training.model)
    ids = set(map(id, hidden))
    rest = [p for p in training.parameters if id(p) not in ids]
    return OneGradient(
        optim.AdamW(rest, lr), optim.Muon(hidden, lr, adjust_lr_fn="match_rms_adamw")
    )


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


# Each with its name in suites, its name in tables and its documented learning rate.
adagrad = one_gradient("adagrad", "AdaGrad", 1e-2, optim.Adagrad)
adam = one_gradient("adam", "Adam", 1e-3, optim.Adam)
adam_plus_plus = one_gradient("adam-plus-plus", "Adam++", 1.0, AdamPlusPlus)
adamw = one_gradient("adamw", "AdamW", 1e-3, optim.AdamW)
# Defazio and Mishchenko 2023
dadaptation = one_gradient("dadaptation", "D-Adaptation", 1.0, DAdaptAdam)
mechanic = one_gradient("mechanic", "Mechanic", 1.0, mechanize(optim.AdamW))  # Cutkosky et al. 2023
prodigy = one_gradient("prodigy", "Prodigy", 1.0, Prodigy)  # Mishchenko and Defazio 2024
rmsprop = one_gradient("rmsprop", "RMSprop", 1e-2, optim.RMSprop)
sgd = one_gradient("sgd", "SGD", 1e-3, optim.SGD)
sgd_momentum = one_gradient("sgd-momentum", "SGD momentum", 1e-3, partial(optim.SGD, momentum=0.9))
# Levy et al. 2021; STORM is Cutkosky and Orabona's, 2019
storm_plus = paired("storm-plus", "STORM+", StormPlus)
simplified_storm_plus = paired("simplified-storm-plus", "simplified STORM+", SimplifiedStormPlus)
storm = paired("storm", "STORM", Storm)
dog = solver("dog", "DoG", 1.0, _dog)
l_dog = solver("l-dog", "L-DoG", 1.0, partial(_dog, optimizer=LDoG))
# Yuan et al. 2024; approximate is its authors' default, with one gradient per step.
mars = solver("mars", "MARS", 3e-3, lambda run, lr: steppers.Mars(run.model, lr))
mars_approximate = solver(
    "mars-approximate",
    "MARS approximate",
    3e-3,
    lambda run, lr: steppers.MarsApproximate(run.model, lr),
    no_matrix,
)
muon = solver("muon", "Muon", 1e-3, _muon, no_hidden_matrix)
nadamw = solver("nadamw", "NadamW", NadamW.LR, _nadamw)
schedule_free = solver("schedule-free", "Schedule-Free", 0.0025, _schedule_free)
schedule_free_warmup = solver(
    "schedule-free-warmup", "Schedule-Free warm-up", 0.0025, partial(_schedule_free, warmup=0.05)
)
# Defazio 2026: no learning rate; lr 1 multiplies its step, as documented.
schedule_free_plus = solver(
    "schedule-free-plus",
    "ScheduleFree+",
    1.0,
    lambda run, lr: steppers.AtAverageWithLoss(ScheduleFreePlus(run.parameters, lr=lr)),
)
# Johnson and Zhang 2013: no package documents a default.
svrg = solver("svrg", "SVRG", 0.1, lambda run, lr: steppers.Svrg(run.model, lr), no_budget)
untuned = solver("untuned", "Untuned", 1.0, lambda run, lr: AtAverage(Untuned(run.parameters)))
