"""Running statistics: `recalibrate` those of BatchNorm, and restore a model's buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from stormplus.torch._checks import is_expanded


def recalibrate(
    model: nn.Module, batches: Iterable[Any], *, evaluate: Callable[[Any], Any] | None = None
) -> None:
    """Compute BatchNorm's running statistics again, as means over some batches.

    After training they belong to the iterates, not to the average of `Untuned`:

        opt.eval()
        recalibrate(model, (x for x, y in loader))

    Unlike in torch's `update_bn`, all modules but BatchNorm are in eval mode meanwhile, so that the
    statistics are of what validation will see and no random number is drawn. If an evaluation
    fails, the statistics are as before. A model without running statistics is left alone.

    Args:
        model: The model, with the parameters that are to be validated or saved.
        batches: What `model` takes, on its device: tensors; dictionaries, which it gets as
            keywords; tuples and lists, of which it gets the first, or as many as its `forward`
            must have. So a loader of pairs (x, y) will do. A few dozen are enough.
        evaluate: Called with each batch in place of the model, if that is not how it is used.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = (getattr(module, "non_trainable_variables", ()) for module, _ in modes)  # of Keras
    if any(variable.name == "moving_variance" for variables in kept for variable in variables):
        raise TypeError(
            "recalibrate knows torch's BatchNorm, not Keras's BatchNormalization: call "
            "model(x, training=True) on some batches instead, which moves its statistics"
        )
    norms = [m for m, _ in modes if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return
    momenta, before = [norm.momentum for norm in norms], BufferSnapshot(nn.ModuleList(norms))
    evaluate, count = evaluate or partial(_evaluate, model), 0
    try:
        for module, _ in modes:
            module.training = False  # not eval(): a model may have its own
        for norm in norms:
            norm.training = True
            norm.reset_running_stats()
            norm.momentum = None  # a mean, each batch with the same weight
        with torch.no_grad():
            for batch in batches:
                evaluate(batch)
                count += 1
        if not count:
            raise ValueError(
                "recalibrate got no batches, and the statistics are as they were: pass some of "
                "the training data, and make a new iterator if this one has been used up"
            )
    except BaseException:
        before.restore()
        raise
    finally:
        for module, mode in modes:
            module.training = mode
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum


def _evaluate(model: nn.Module, batch: Any) -> None:
    inputs = (batch,)
    if isinstance(batch, (tuple, list)):
        given = inspect.signature(model.forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = sum(p.kind in positional and p.default is p.empty for p in given)
        inputs = tuple(batch[: max(1, required)])
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        model(**inputs[0])
    else:
        model(*inputs)


class BufferSnapshot:
    """A snapshot of a model's buffers, to restore them."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else model.modules()
        self._modules = [(m._buffers, dict(m._buffers)) for m in modules if m._buffers]
        buffers = (b for _, saved in self._modules for b in saved.values() if b is not None)
        # The elements of an expanded buffer share memory: nothing can write to them.
        self._values = [(b, b.detach().clone()) for b in buffers if not is_expanded(b)]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the snapshot back."""
        for buffer, value in self._values:
            buffer.copy_(value)
        for buffers, saved in self._modules:
            buffers.update(saved)  # a module may have assigned another tensor
