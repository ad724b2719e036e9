"""The methods of the benchmark: their display names, their order, and which ones are ours."""

from __future__ import annotations

from collections.abc import Iterable

OURS = ("STORM+", "STORM+ mean", "Untuned", "simplified STORM+", "simplified STORM+ mean")
METHODS = (
    *OURS,
    *("STORM", "STORM mean", "SGD", "SGD momentum", "Adam", "AdamW", "AdaGrad", "RMSprop"),
    *("Schedule-Free", "Prodigy", "DoG", "D-Adaptation", "Mechanic", "MARS", "SVRG"),
)
# The few that a small figure, or README, has room for.
HEADLINE = ("STORM+", "STORM+ mean", "Untuned", "SGD momentum", "Adam", "AdaGrad", "Prodigy")


def ordered(methods: Iterable[str]) -> list[str]:
    """The methods once each, in the order of `METHODS`; others follow by name."""
    ranks = {name: rank for rank, name in enumerate(METHODS)}
    return sorted(set(methods), key=lambda name: (ranks.get(name, len(ranks)), name))
