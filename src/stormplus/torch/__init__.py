"""The optimizers for PyTorch."""

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the PyTorch optimizers need torch: pip install 'stormplus[torch]'"
    ) from error

from stormplus.torch.amp import scaled_step as scaled_step
from stormplus.torch.family import SimplifiedStormPlus as SimplifiedStormPlus
from stormplus.torch.family import Storm as Storm
from stormplus.torch.family import StormPlus as StormPlus
from stormplus.torch.iterate import UniformIterate as UniformIterate
from stormplus.torch.same_sample import same_sample as same_sample
from stormplus.torch.units import Untuned as Untuned
from stormplus.torch.verify import verify_closure as verify_closure

__all__ = [
    "SimplifiedStormPlus",
    "Storm",
    "StormPlus",
    "Untuned",
    "UniformIterate",
    "same_sample",
    "scaled_step",
    "verify_closure",
]
