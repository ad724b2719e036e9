"""STORM+, simplified STORM+, STORM, and untuned, as optax transformations.

tx = storm_plus()
state = tx.init(params)
grad_fn = lambda p: jax.grad(loss)(p, batch, key)  # one sample: both evaluations share it
updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
params = optax.apply_updates(params, updates)
"""

from __future__ import annotations

from stormplus.install import required

with required("jax"):
    from stormplus.jax.closures import accumulate, verify
    from stormplus.jax.storm import StormState, simplified_storm_plus, storm, storm_plus
    from stormplus.jax.uniform import UniformIterate, UniformIterateState, uniform_iterate
    from stormplus.jax.untuned import UntunedState, averaged, untuned

__all__ = [
    "StormState",
    "UniformIterate",
    "UniformIterateState",
    "UntunedState",
    "accumulate",
    "averaged",
    "simplified_storm_plus",
    "storm",
    "storm_plus",
    "uniform_iterate",
    "untuned",
    "verify",
]
