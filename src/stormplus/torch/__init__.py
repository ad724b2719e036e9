"""The optimizers for PyTorch."""

from stormplus.install import how_to

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the PyTorch optimizers need torch: {how_to('torch')}") from error

from stormplus.torch._base import BaseOptimizer as BaseOptimizer
from stormplus.torch._rng import pair_lock as pair_lock
from stormplus.torch.batchnorm import recalibrate as recalibrate
from stormplus.torch.closures import same_sample as same_sample
from stormplus.torch.closures import scaled_step as scaled_step
from stormplus.torch.closures import verify_closure as verify_closure
from stormplus.torch.storm import PairedOptimizer as PairedOptimizer
from stormplus.torch.storm import SimplifiedStormPlus as SimplifiedStormPlus
from stormplus.torch.storm import Storm as Storm
from stormplus.torch.storm import StormPlus as StormPlus
from stormplus.torch.uniform import UniformIterate as UniformIterate
from stormplus.torch.untuned import Untuned as Untuned

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
