"""A user's optimizer with two gradients per step: `stormplus compare SUITE --solver FILE`.

A Stepper draws a sample and calls `training.gradient(sample)` for each gradient, which counts it.
"""

import torch

from stormplus_bench.train.steppers import OneGradient

name, rates = "Extragradient", [0.1, 0.3]  # the first rate is the default


class Extragradient(OneGradient):
    gradients_per_step = 2

    def step(self, training):
        sample = training.draw()
        start = [p.detach().clone() for p in training.parameters]
        training.gradient(sample)
        self.optimizer.step()  # to the point where the second gradient is taken
        training.gradient(sample)
        with torch.no_grad():
            for p, x in zip(training.parameters, start):
                p.copy_(x)
        self.optimizer.step()


def make(parameters, lr):
    return Extragradient(torch.optim.SGD(parameters, lr))
