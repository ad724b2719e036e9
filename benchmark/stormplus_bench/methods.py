"""The methods of the benchmark, by name and in order; its workloads, by tier."""

from collections.abc import Iterable

OURS = ("STORM+", "STORM+ mean", "Untuned", "simplified STORM+", "simplified STORM+ mean")
METHODS = (
    *OURS,
    *("STORM", "STORM mean", "SGD", "SGD momentum", "Adam", "AdamW", "AdaGrad", "RMSprop"),
    *("Schedule-Free", "Prodigy", "DoG", "D-Adaptation", "Mechanic", "MARS", "SVRG"),
    *("ScheduleFree+", "L-DoG", "NadamW", "AdamW linear", "AdamW average", "MARS approximate"),
    "Muon",
    # Only in the long runs.
    *("AdamW cosine", "Schedule-Free warm-up", "Prodigy cosine", "Adam++", "Adam++ cosine"),
)
NO_RATE = ("Untuned",)  # has no learning rate; its rows say 1
# README's table: gradients per step, buffers of the model's size, and what is left to choose.
COMPARED = {
    "Untuned": ("1", "2", "none"),
    "STORM+": ("2", "1", "none if gradients are of order one, else lr"),
    "Adam": ("1", "2", "lr, schedule"),
    "SGD momentum": ("1", "1", "lr, schedule, momentum"),
    "Schedule-Free": ("1", "2", "lr, warm-up"),
    "Prodigy": ("1", "4", "schedule"),
    "Mechanic": ("1", "3", "schedule"),
    "DoG": ("1", "2", "none"),
}
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


def ordered(methods: Iterable[str]) -> list[str]:
    """Return the methods once each, in the order of `METHODS`; others follow by name."""
    ranks = {name: rank for rank, name in enumerate(METHODS)}
    return sorted(set(methods), key=lambda name: (ranks.get(name, len(ranks)), name))


def headline(methods: Iterable[str]) -> list[str]:
    """Return the methods of README's table, and the reader's own."""
    return [name for name in ordered(methods) if name in COMPARED or name not in METHODS]
