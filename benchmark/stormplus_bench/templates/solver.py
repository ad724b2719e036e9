"""A user's optimizer: `stormplus compare SUITE --solver FILE`."""

import torch

name, rates = "Mine", [0.002, 0.01]  # the first rate is the default


def make(parameters, lr):
    return torch.optim.NAdam(parameters, lr)
