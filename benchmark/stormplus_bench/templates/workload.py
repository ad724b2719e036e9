"""A user's model: `stormplus compare SUITE --workload FILE`."""

import torch
from torch import nn

budget, inputs = 200, torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
data, valid = (inputs[:800], targets[:800]), (inputs[800:], targets[800:])


def model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
