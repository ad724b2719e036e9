"""BatchNorm's running statistics, taken anew at the point where the parameters are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from stormplus.torch._rng import RunningStatistics


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    evaluate: Callable[[Any], Any] | None = None,
) -> None:
    """Take BatchNorm's running statistics anew, over some batches.

    The statistics that a model has after training belong to the iterates. At another point, the
    average of `Untuned` for one, they are off:

        opt.eval()
        recalibrate(model, (x for x, y in loader))

    The new ones are plain means over the batches, as those of torch's `update_bn`. Unlike there,
    all modules but BatchNorm are in eval mode meanwhile, so that the statistics are of what
    validation will see and no random number is drawn. Modes and momenta are as before
    afterwards; if an evaluation fails, so are the statistics. A model without running statistics
    is left alone.

    Args:
        model: The model, with the parameters that are to be validated or saved.
        batches: What `model` takes, on its device: tensors; dictionaries, which it gets as
            keywords; tuples and lists, of which it gets the first, or as many as its `forward`
            must have. So a loader of pairs (x, y) will do. A few dozen are enough.
        evaluate: Called with each batch in place of the model, if that is not how it is used.

    Raises:
        TypeError: If the model has BatchNormalization of Keras.
        ValueError: If there are no batches.
    """
    evaluate = evaluate or partial(_evaluate, model)
    with _statistics_anew(model) as norms:
        if not norms:
            return
        evaluated = False
        for batch in batches:
            evaluate(batch)
            evaluated = True
        if not evaluated:
            raise ValueError(
                "recalibrate got no batches, and the statistics are as they were: pass some of "
                "the training data, and make an iterator anew if it has been used up"
            )


@contextmanager
def _statistics_anew(model: nn.Module) -> Iterator[list[_BatchNorm]]:
    """Evaluations in here are those that running statistics are taken over.

    Yields:
        The modules that have running statistics.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = (getattr(module, "non_trainable_variables", ()) for module, _ in modes)  # of Keras
    if any(variable.name == "moving_variance" for variables in kept for variable in variables):
        raise TypeError(
            "recalibrate knows torch's BatchNorm, and this model has Keras's BatchNormalization: "
            "call model(x, training=True) on some batches instead, which moves its statistics"
        )
    norms = [
        module
        for module, _ in modes
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]
    momenta = [norm.momentum for norm in norms]
    before = RunningStatistics(nn.ModuleList(norms))
    try:
        for module, _ in modes:
            module.training = False  # not eval(): a model may have its own
        for norm in norms:
            norm.training = True
            norm.reset_running_stats()
            norm.momentum = None  # a mean, each batch with the same weight
        with torch.no_grad():
            yield norms
    except BaseException:
        before.restore()
        raise
    finally:
        for module, mode in modes:
            module.training = mode
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum


def _evaluate(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, (tuple, list)):
        parts = batch[: _required(model)]
        if len(parts) != 1 or not isinstance(parts[0], Mapping):
            model(*parts)
            return
        batch = parts[0]
    if isinstance(batch, Mapping):
        model(**batch)
    else:
        model(batch)


def _required(model: nn.Module) -> int:
    """How many positional arguments a model must have; 1 if it does not say."""
    given = inspect.signature(model.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return max(1, sum(p.kind in positional and p.default is p.empty for p in given))
