"""The methods of the benchmark, by name and in order; its workloads, by tier."""

from __future__ import annotations

from collections.abc import Iterable

OURS = ("STORM+", "STORM+ mean", "Untuned", "simplified STORM+", "simplified STORM+ mean")
METHODS = (
    *OURS,
    *("STORM", "STORM mean", "SGD", "SGD momentum", "Adam", "AdamW", "AdaGrad", "RMSprop"),
    *("Schedule-Free", "Prodigy", "DoG", "D-Adaptation", "Mechanic", "MARS", "SVRG"),
    # Of the long runs.
    *("AdamW cosine", "Schedule-Free warm-up", "Prodigy cosine", "Adam++", "Adam++ cosine"),
    "NadamW",
)
NO_RATE = ("Untuned",)  # to need none is what it is for; its rows say 1
# The few that a small figure, or README, has room for.
HEADLINE = ("STORM+", "STORM+ mean", "Untuned", "SGD momentum", "Adam", "AdaGrad", "Prodigy")
# README's table: gradients a step, buffers of the model's size, and what is left to choose.
COMPARED = {
    "Untuned": ("1", "2", "none"),
    "STORM+": ("2", "1", "none on smooth problems, lr on networks"),
    "Adam": ("1", "2", "lr, schedule"),
    "SGD momentum": ("1", "1", "lr, schedule, momentum"),
    "Schedule-Free": ("1", "2", "lr, warm-up"),
    "Prodigy": ("1", "4", "schedule"),
    "Mechanic": ("1", "3", "schedule"),
    "DoG": ("1", "2", "none"),
}
# A figure has the workloads of one tier.
TIERS = {
    "smooth": (
        *("logistic-breast-cancer", "logistic-digits", "matrix-completion", "nmf"),
        "phase-retrieval",
    ),
    "networks": (
        *("autoencoder-mnist", "bncnn-cifar10", "cnn-digits", "cnn-mnist", "gpt-shakespeare"),
        *("mlp-digits", "resnet-cifar10"),
    ),
    "long": (
        *("autoencoder-mnist-long", "finetune-cifar10", "gpt-shakespeare-long", "lora-cifar10"),
        *("resnet-cifar10-long", "vit-cifar10"),
    ),
}
MOST_PANELS = 8  # of a figure


def in_figures(workloads: Iterable[str]) -> dict[str, list[str]]:
    """The workloads by figure: a tier each, what is in no tier last, and never too many panels.

    Another budget is another workload of the same tier: "nmf (60 evaluations)".
    """
    tier_of = {name: tier for tier, names in TIERS.items() for name in names}
    parts: dict[str, list[str]] = {tier: [] for tier in (*TIERS, "others")}
    for name in sorted(set(workloads)):
        parts[tier_of.get(name.split(" (")[0], "others")].append(name)
    found = {}
    for tier, names in parts.items():
        figures = range(0, len(names), MOST_PANELS)
        for number, first in enumerate(figures, start=1):
            title = f"{tier}-{number}" if len(figures) > 1 else tier
            found[title] = names[first : first + MOST_PANELS]
    return found


def ordered(methods: Iterable[str]) -> list[str]:
    """The methods once each, in the order of `METHODS`; others follow by name."""
    ranks = {name: rank for rank, name in enumerate(METHODS)}
    return sorted(set(methods), key=lambda name: (ranks.get(name, len(ranks)), name))


def few(methods: Iterable[str]) -> list[str]:
    """Those that a small figure has room for: the headline's, and the reader's own."""
    return [name for name in ordered(methods) if name in HEADLINE or name not in METHODS]
