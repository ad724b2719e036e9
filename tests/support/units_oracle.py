"""STORM+ in measured units once more, literally: float64, formulas spelled out.

Independent of the library (no import from it). One run is a list of dicts, one a sample:

| key       | without correction              | with correction                     |
|-----------|---------------------------------|-------------------------------------|
| `x`       | x_{t+1}, after the step         | x_t, where the second gradient was  |
| `d`       | d_t                             | d_t                                 |
| `s`       | s_t, blocks like x              | s_t, one number a bucket            |
| `r`       | r_t, one number a bucket        | r_t, one number a bucket            |
| `a`       | a_{t+1}, the next gain          | a_{t+1}, one number a bucket        |
| `eta`     | eta_t, one number a bucket      | eta_t, one number a bucket          |
| `average` | of the x above                  | of the x above                      |

In both, `x` is what the parameters are after the t-th call of the optimizer.
"""

import numpy as np


def units_run(
    grad,
    x1_blocks,
    steps,
    *,
    correction=False,
    distance=None,
    gradient=None,
    lr=1.0,
    weight_decay=0.0,
    decoupled=False,
    maximize=False,
    scope="global",
    norm="raw",
):
    """Run `steps` samples.

    Args:
        grad: `grad(k, blocks, which)`: the gradient's blocks, of sample k = 0, 1, ... The
            first evaluation of a sample is `which` = 1, and the only one without correction;
            the second, where the move has led, is 2. The first sample is evaluated once.
        x1_blocks: The first point, a list of arrays.
        steps: The number of samples.
        correction, distance, gradient, weight_decay, decoupled, maximize: As in the optimizers.
        lr: A number, or a function of the moves made before (0, 1, ...).
        scope: "global", "tensor", or a list with one label a block.
        norm: "raw" or "mean"; without correction it has no effect.
    """
    x1 = [np.array(block, np.float64) for block in x1_blocks]
    labels = {"global": [0] * len(x1), "tensor": list(range(len(x1)))}
    given = labels[scope] if isinstance(scope, str) else list(scope)
    share = [list(dict.fromkeys(given)).index(label) for label in given]  # order of appearance

    def objective(k, at, which):
        g = [np.asarray(block, np.float64) for block in grad(k, at, which)]
        g = [-block if maximize else block for block in g]
        if not decoupled:
            g = [g_i + weight_decay * x_i for g_i, x_i in zip(g, at)]
        return g

    def square(blocks, bucket, mean):
        mine = [block for block, b in zip(blocks, share) if b == bucket]
        total = sum(float(np.sum(block * block)) for block in mine)
        return total / sum(block.size for block in mine) if mean else total

    def length(blocks, mean):
        return np.array([np.sqrt(square(blocks, b, mean)) for b in range(max(share) + 1)])

    rate = lr if callable(lr) else lambda moves: lr
    decay = weight_decay if decoupled else 0.0
    run = _corrected if correction else _uncorrected
    mean = norm == "mean" or not correction
    return run(
        objective, x1, steps, share, lambda v: length(v, mean), distance, gradient, rate, decay
    )


def _start(x1, length, distance):
    r = 0.01 * length(x1)
    r[r == 0] = 0.01
    return r if distance is None else np.full_like(r, distance)


def _farther(r, x, x1, length, distance):
    return r if distance is not None else np.maximum(r, length(_minus(x, x1)))


def _minus(left, right):
    return [a - b for a, b in zip(left, right)]


def _averaged(average, x, t):
    return [m + 9 / (t + 8) * (x_i - m) for m, x_i in zip(average, x)]


def _uncorrected(objective, x1, steps, share, length, distance, gradient, rate, decay):
    x = average = x1
    d = [np.zeros_like(block) for block in x1]
    s = [np.full_like(block, gradient or 0.0) for block in x1]
    r, rows = _start(x1, length, distance), []
    for t in range(1, steps + 1):
        r = _farther(r, x, x1, length, distance)
        g = objective(t - 1, x, 1)
        a, b = max(0.1, 1 / t), max(0.01, 1 / t)
        d = [d_i + a * (g_i - d_i) for d_i, g_i in zip(d, g)]
        if gradient is None:
            s = [np.hypot(np.sqrt(1 - b) * s_i, np.sqrt(b) * g_i) for s_i, g_i in zip(s, g)]
        eta = r / np.sqrt(t)
        moved = []
        for i, x_i in enumerate(x):
            ratio = np.divide(d[i], s[i], out=np.zeros_like(x_i), where=s[i] != 0)  # 0/0 is 0
            moved.append(x_i - rate(t - 1) * eta[share[i]] * (ratio + decay * x_i))
        x = moved
        average = _averaged(average, x, t)
        rows.append(
            {"x": x, "d": d, "s": s, "r": r, "a": max(0.1, 1 / (t + 1)), "eta": eta}
            | {"average": average}
        )
    return rows


def _corrected(objective, x1, steps, share, length, distance, gradient, rate, decay):
    x = average = x1
    r, rows = _start(x1, length, distance), []
    largest = np.zeros_like(r)  # |g| so far
    sum_g, sum_d = np.zeros_like(r), np.zeros_like(r)
    d, a, eta = [], None, None
    for t in range(1, steps + 1):
        if t == 1:
            d = g = objective(0, x, 1)
        else:
            g_tilde = objective(t - 1, x, 1)
            x = [
                x_i - rate(t - 2) * eta[b] * (d_i + decay * x_i) for x_i, d_i, b in zip(x, d, share)
            ]
            g = objective(t - 1, x, 2)
            d = [
                g_i + (1 - a[b]) * (d_i - tilde_i)
                for g_i, tilde_i, d_i, b in zip(g, g_tilde, d, share)
            ]
        r = _farther(r, x, x1, length, distance)
        largest = np.maximum(largest, length(g))
        s = largest if gradient is None else np.full_like(r, gradient)
        unit = np.where(s == 0, 1.0, s)
        sum_g = sum_g + length(g) ** 2
        a = np.cbrt(1 + sum_g / unit**2) ** -2
        sum_d = sum_d + length(d) ** 2 / a
        eta = r / np.cbrt(unit) / np.cbrt(np.where(sum_d == 0, 1.0, sum_d))
        average = _averaged(average, x, t)
        rows.append({"x": x, "d": d, "s": s, "r": r, "a": a, "eta": eta, "average": average})
    return rows
