"""Untuned once more, literally: float64, formulas spelled out, no import from the library."""

import numpy as np


def untuned_run(
    grad,
    x1_blocks,
    steps,
    *,
    lr=1.0,
    weight_decay=0.0,
    decoupled=False,
    maximize=False,
    scope="global",
):
    """Run `steps` samples; returns a dict a sample.

    `x` (after the step), `d`, `s` and `average` are lists of blocks; `r`, `eta` have one number a
    bucket; `a` is the next gain.

    Args:
        grad: `grad(k, blocks)`: the gradient's blocks, of sample k = 0, 1, ...
        x1_blocks: The first point, a list of arrays.
        steps: The number of samples.
        lr: A number, or a function of the moves made before (0, 1, ...); or a list of them, one a
            block.
        weight_decay: A number, or a list with one a block.
        decoupled, maximize: As in the optimizers.
        scope: "global", "tensor", or a list with one label a block.
    """
    x1 = [np.array(block, np.float64) for block in x1_blocks]
    labels = {"global": [0] * len(x1), "tensor": list(range(len(x1)))}
    given = labels[scope] if isinstance(scope, str) else list(scope)
    share = [list(dict.fromkeys(given)).index(label) for label in given]  # order of appearance
    rates, decays = (v if isinstance(v, list) else [v] * len(x1) for v in (lr, weight_decay))

    def length(blocks):
        """The root mean square over each bucket."""
        out = []
        for bucket in range(max(share) + 1):
            mine = np.concatenate([b.ravel() for b, i in zip(blocks, share) if i == bucket])
            out.append(np.sqrt(np.mean(mine * mine)))
        return np.array(out)

    x = average = x1
    d, s = ([np.zeros_like(block) for block in x1] for _ in range(2))
    r = 0.01 * length(x1)
    r[r == 0] = 0.01
    rows = []
    for t in range(1, steps + 1):
        r = np.maximum(r, length([x_i - start for x_i, start in zip(x, x1)]))
        g = [np.asarray(block, np.float64) for block in grad(t - 1, x)]
        g = [-block if maximize else block for block in g]
        if not decoupled:
            g = [g_i + decay * x_i for g_i, decay, x_i in zip(g, decays, x)]
        a, b = max(0.1, 1 / t), max(0.01, 1 / t)
        d = [d_i + a * (g_i - d_i) for d_i, g_i in zip(d, g)]
        s = [np.hypot(np.sqrt(1 - b) * s_i, np.sqrt(b) * g_i) for s_i, g_i in zip(s, g)]
        eta = r / np.sqrt(t)
        moved = []
        for i, x_i in enumerate(x):
            step = np.divide(d[i], s[i], out=np.zeros_like(x_i), where=s[i] != 0)  # 0/0 is 0
            if decoupled:
                step = step + decays[i] * x_i
            rate = rates[i](t - 1) if callable(rates[i]) else rates[i]
            moved.append(x_i - rate * eta[share[i]] * step)
        x = moved
        average = [m + 9 / (t + 8) * (x_i - m) for m, x_i in zip(average, x)]
        rows.append({"x": x, "d": d, "s": s, "r": r, "a": max(0.1, 1 / (t + 1)), "eta": eta})
        rows[-1]["average"] = average
    return rows
