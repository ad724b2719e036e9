"""Algorithm 1 once more, literally: previous iterate stored, formulas spelled out.

Independent of the library (no import from it): flat NumPy vectors, Python sums, every
option of the torch optimizers written in the most obvious way.
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
    x: list = field(default_factory=list)  # all iterates, each a list of blocks
    d: list = field(default_factory=list)
    gain: list = field(default_factory=list)
    step_size: list = field(default_factory=list)


def rule(method, sum_g, sum_d, g_sq, d_sq, t, theta=0.1, w=0.1, c=100.0, smoothness=1.0):
    if callable(method):  # a rule of one's own
        return method(sum_g, sum_d, g_sq, d_sq, t)
    sum_g = sum_g + g_sq
    if method == "storm":
        eta = theta / np.cbrt(w + sum_g)
        a = min(1.0, c * smoothness**2 * eta**2)
        return sum_g, sum_d + d_sq / a, a, eta
    a = 1 / np.cbrt(1 + sum_g) ** 2 if method == "storm+" else 1 / np.cbrt(t) ** 2
    sum_d = sum_d + d_sq / a
    return sum_g, sum_d, a, 1 / np.cbrt(sum_d)


def algorithm_1(
    gradient,
    groups,
    samples,
    method="storm+",
    norm="raw",
    scope="global",
    decoupled=False,
    maximize=False,
    **constants,
):
    """`gradient(blocks, xi)` for all blocks of all groups in order."""
    x = [np.array(b, float) for g in groups for b in g.blocks]
    of_group = [i for i, g in enumerate(groups) for _ in g.blocks]
    share = {"global": [0] * len(x), "group": of_group, "tensor": list(range(len(x)))}[scope]
    buckets = sorted(set(share))
    decay = [groups[i].weight_decay for i in of_group]

    def objective(at, xi):
        sign = -1 if maximize else 1
        out = [sign * np.asarray(g, float) for g in gradient(at, xi)]
        if not decoupled:
            out = [g + wd * b for g, wd, b in zip(out, decay, at)]
        return out

    def square(blocks, bucket):
        mine = [b for b, s in zip(blocks, share) if s == bucket]
        total = sum(float((b * b).sum()) for b in mine)
        return total / sum(b.size for b in mine) if norm == "mean" else total

    sums = dict.fromkeys(buckets, (0.0, 0.0))
    run = Run()
    d, a, eta = [], {}, {}
    for t, xi in enumerate(samples, start=1):
        if t == 1:
            d = g = objective(x, xi)
        else:
            x_previous, moved = x, []
            for i, block in enumerate(x):
                lr = groups[of_group[i]].lr
                lr = lr(t - 1) if callable(lr) else lr
                step = d[i] + decay[i] * block if decoupled else d[i]
                moved.append(block - lr * eta[share[i]] * step)
            x = moved
            g, g_tilde = objective(x, xi), objective(x_previous, xi)
            d = [g[i] + (1 - a[share[i]]) * (d[i] - g_tilde[i]) for i in range(len(x))]
        a, eta = {}, {}
        for b in buckets:
            *new, a[b], eta[b] = rule(method, *sums[b], square(g, b), square(d, b), t, **constants)
            sums[b] = tuple(new)
        run.x.append(x)
        run.d.append(d)
        run.gain.append(a)
        run.step_size.append(eta)
    return run
