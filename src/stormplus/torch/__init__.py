"""The optimizers for PyTorch."""

from stormplus.install import how_to

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the PyTorch optimizers need torch: {how_to('torch')}") from error

from stormplus.torch._base import BaseOptimizer
from stormplus.torch._rng import pair_lock
from stormplus.torch.batchnorm import recalibrate
from stormplus.torch.closures import same_sample, scaled_step, verify_closure
from stormplus.torch.storm import PairedOptimizer, SimplifiedStormPlus, Storm, StormPlus
from stormplus.torch.uniform import UniformIterate
from stormplus.torch.untuned import Untuned

__all__ = [
    "BaseOptimizer",
    "PairedOptimizer",
    "SimplifiedStormPlus",
    "Storm",
    "StormPlus",
    "UniformIterate",
    "Untuned",
    "pair_lock",
    "recalibrate",
    "same_sample",
    "scaled_step",
    "verify_closure",
]
