"""An independent transcription of Algorithm 1, which stores the previous iterate.

It imports nothing from the library: NumPy blocks, Python sums, every option of the optimizers
written in the most obvious way.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Group:
    """Blocks that share lr and weight decay."""

    blocks: list
    lr: object = 1.0  # a number or a function of the move's number, from 1
    weight_decay: float = 0.0


@dataclass
class Run:
    """One entry per sample in each list."""

    x: list = field(default_factory=list)  # each a list of blocks
    d: list = field(default_factory=list)
    gain: list = field(default_factory=list)
    step_size: list = field(default_factory=list)


def rule(method, sum_g, sum_d, g_sq, d_sq, t, theta=0.1, w=0.1, c=100.0, smoothness=1.0):
    if callable(method):  # a user's rule
        return method(sum_g, sum_d, g_sq, d_sq, t)
    sum_g = sum_g + g_sq
    if method == "storm":
        eta = theta / np.cbrt(w + sum_g)
        a = min(1.0, c * smoothness**2 * eta**2)
        return sum_g, sum_d + d_sq / a, a, eta
    if method in ("meta-storm-sg", "meta-storm-na"):  # a_0 = b_0 = 1, p = 1/2, q = 1/4
        a = 1 / np.cbrt(1 + (sum_g if method == "meta-storm-sg" else t)) ** 2
        return sum_g, sum_d + d_sq, a, a**0.25 / np.sqrt(1 + sum_d + d_sq)
    if method == "ada-storm":  # T = 200, alpha = 0.3
        eta = min(1 / np.cbrt(200), 200 ** (-0.7 / 3) / (sum_d + d_sq) ** 0.3)
        return sum_g, sum_d + d_sq, 1 / np.cbrt(200) ** 2, eta
    a = 1 / np.cbrt(1 + sum_g) ** 2 if method == "storm+" else 1 / np.cbrt(t) ** 2
    sum_d = sum_d + d_sq / a
    if method == "normalized-storm":
        return sum_g, sum_d, a, a / np.sqrt(d_sq)
    return sum_g, sum_d, a, 1 / np.cbrt(sum_d)


def algorithm_1(
    gradient,
    groups,
    samples,
    method="storm+",
    unit=1.0,
    decoupled=False,
    maximize=False,
    **constants,
):
    """Run one sample after the other; return all iterates and scalars as a `Run`.

    `gradient(blocks, xi)` takes and returns the blocks of all groups in order.
    """
    x = [np.array(b, float) for g in groups for b in g.blocks]
    of_group = [i for i, g in enumerate(groups) for _ in g.blocks]
    decay = [groups[i].weight_decay for i in of_group]

    def objective(at, xi):
        sign = -1 if maximize else 1
        out = [sign * np.asarray(g, float) for g in gradient(at, xi)]
        if not decoupled:
            out = [g + wd * b for g, wd, b in zip(out, decay, at)]
        return out

    def square(blocks):
        return sum(float((b * b).sum()) for b in blocks)

    d, a, eta = [], 1.0, 0.0
    g_0 = None if unit == "first" else unit  # the unit, once it is known
    sum_g = sum_d = 0.0
    run = Run()
    for t, xi in enumerate(samples, start=1):
        if t == 1:
            d = g = objective(x, xi)
        else:
            x_previous, moved = x, []
            for i, block in enumerate(x):
                lr = groups[of_group[i]].lr
                lr = lr(t - 1) if callable(lr) else lr
                step = d[i] / (g_0 or 1.0) + (decay[i] * block if decoupled else 0.0)
                moved.append(block - lr * eta * step)
            x = moved
            g, g_tilde = objective(x, xi), objective(x_previous, xi)
            d = [g[i] + (1 - a) * (d[i] - g_tilde[i]) for i in range(len(x))]
        if g_0 is None and square(g) > 0:
            g_0 = np.sqrt(square(g))
        g_sq, d_sq = (square(blocks) / (g_0 or 1.0) ** 2 for blocks in (g, d))
        sum_g, sum_d, a, eta = rule(method, sum_g, sum_d, g_sq, d_sq, t, **constants)
        run.x.append(x)
        run.d.append(d)
        run.gain.append(a)
        run.step_size.append(eta)
    return run
