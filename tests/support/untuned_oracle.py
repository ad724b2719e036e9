"""An independent transcription of the rule of Untuned: z, x and y as defined, in float64.

It imports nothing from the library, which stores neither z nor x but y and z - x, and so computes
the same numbers in another way.
"""

import math

import numpy as np


def untuned_run(
    grad,
    x1_blocks,
    steps,
    *,
    lr=1.0,
    weight_decay=0.0,
    maximize=False,
    inputs_last=False,
    sample=None,
):
    """Run `steps` samples; return one dict per sample, with the values after its step.

    `x` (the parameters, y), `z`, `s` and `average` are lists of blocks. `r` and `evidence` (both of
    the next step), `eta` (of this one), `effective_steps` and `t` have one number per block.

    Args:
        grad: `grad(k, blocks)` returns the gradient's blocks, of sample k = 0, 1, ...; None for a
            block without a gradient.
        x1_blocks: The first point, a list of arrays.
        steps: The number of samples.
        lr: A number, or a function of the number of previous moves (0, 1, ...); or a list with one
            of these per block.
        weight_decay: A number, or a list with one per block.
        maximize: As in the optimizers.
        inputs_last: Whether a matrix is (inputs, outputs), as in JAX, or the other way round.
        sample: How many coordinates of a block the displacement is measured on: every k-th, where
            k is the largest number up to size // sample that is coprime to the size. None: all.
    """
    y = [np.array(block, np.float64) for block in x1_blocks]
    count = range(len(y))
    rates, decays = (v if isinstance(v, list) else [v] * len(y) for v in (lr, weight_decay))
    strides = []
    for block in y:
        k = 1 if sample is None else max(1, block.size // sample)
        while math.gcd(k, block.size) > 1:
            k -= 1
        strides.append(k)

    def rms(block):
        return math.sqrt(np.mean(block * block)) if block.size else 0.0

    natural, ceiling, r = [], [], []
    for block in y:
        outputs = block.shape[-1 if inputs_last else 0] if block.ndim > 1 else 1
        natural.append(1 / math.sqrt(max(block.size // max(outputs, 1), 1)))
        ceiling.append(max(rms(block), natural[-1]))
        r.append(ceiling[-1] / 200)
    z, average, initial = ([block.copy() for block in y] for _ in range(3))
    s = [np.zeros_like(block) for block in y]
    t, effective_steps, eta, walk, evidence, agreement, weight = ([0] * len(y) for _ in range(7))
    matrices = [i for i in count if y[i].ndim > 1 and y[i].size]
    rows = []
    for k in range(steps):
        g = grad(k, y)
        present = [i for i in count if g[i] is not None]
        for i in present:
            g_i = (-1 if maximize else 1) * np.asarray(g[i], np.float64)
            t[i] += 1
            w = 3 / (t[i] + 2)
            s[i] = np.sqrt((1 - w) * s[i] ** 2 + w * g_i**2)
            u = np.divide(g_i, s[i], out=np.zeros_like(g_i), where=s[i] != 0)  # 0/0 is 0
            rate = rates[i](t[i] - 1) if callable(rates[i]) else rates[i]
            bound = (1 + evidence[i]) * ceiling[i] / 60
            eta[i] = min(r[i] / math.sqrt(1 + effective_steps[i]), bound)
            limit = rate * r[i]
            decay = min(1.0, decays[i] * rate * eta[i] * natural[i] / ceiling[i])
            z[i] = z[i] - np.clip(rate * eta[i] * u, -limit, limit) - decay * z[i]
            average[i] = average[i] + 9 / (t[i] + 8) * (z[i] - average[i])
            y[i] = 0.1 * z[i] + 0.9 * average[i]
            # What this step has measured.
            mean_square = np.mean(u * u) if u.size else 0.0
            weight[i] = min(1.0, mean_square)
            effective_steps[i] += weight[i]
            displacement = rms((z[i] - initial[i]).ravel()[:: strides[i]])
            walk[i] += (rate * eta[i]) ** 2 * mean_square  # squared distance of a random walk
            ratio = displacement**2 / walk[i] if walk[i] > 0 else 0.0
            r[i] = max(r[i], displacement * min(max(1.0, ratio), 2.0) ** 2)
            agreement[i] = max(0.0, ratio - 1)
        # The evidence of this step, once every block has its measurements. A block without a
        # gradient keeps its numbers, but its last agreement still counts.
        begun = [i for i in matrices or count if walk[i] > 0]
        least = min((agreement[i] for i in begun), default=0.0)
        for i in present:
            evidence[i] += weight[i] * least**2
            r[i] = min(r[i], ceiling[i] * math.sqrt(1 + least))
        rows.append(
            {
                "x": [block.copy() for block in y],
                "z": list(z),
                "s": list(s),
                "average": list(average),
                "r": np.array(r),
                "eta": np.array(eta, float),
                "effective_steps": np.array(effective_steps, float),
                "evidence": np.array(evidence, float),
                "t": np.array(t),
            }
        )
    return rows
