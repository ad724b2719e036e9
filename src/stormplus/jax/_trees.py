"""The optimized leaves of a parameter tree, as lists, and norms over such lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.versions import explicit_mesh

PyTree: TypeAlias = Any
# A tree (or a prefix of one, or a function of the parameters that returns either).
TreeOrFunction: TypeAlias = PyTree | Callable[[PyTree], PyTree]

State = TypeVar("State")

_SMALL = 8191  # elements


def accumulator_dtype() -> jnp.dtype[Any]:
    """Return the dtype of sums, gains and step sizes: the widest float that jax has enabled."""
    return jnp.dtype(jnp.result_type(float))


def wide_dtype(leaf: jax.Array) -> jnp.dtype[Any]:
    """Return the dtype of a leaf's buffers: float32 or wider, because they sum over many steps."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def widen(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Cast each leaf to its `wide_dtype`."""
    return [leaf.astype(wide_dtype(leaf)) for leaf in leaves]


def safe_increment(count: jax.Array, happened: jax.Array | bool = True) -> jax.Array:
    """Add 1 if it happened. The largest integer stays, where a plain sum would wrap around."""
    return jnp.where(happened & (count < np.iinfo(count.dtype).max), count + 1, count)


def is_masked(node: Any) -> bool:
    """Return whether a node is what `optax.masked` puts in place of a leaf."""
    return isinstance(node, optax.MaskedNode)


def find_states(kind: type[State], state: PyTree) -> list[State]:
    """Return the states of one kind in a state, which may be that of a chain or a wrapper."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


# -- the optimized leaves --------------------------------------------------------------------


class OptimizedLeaves:
    """Which leaves of a parameter tree are optimized. Static: built while tracing.

    An `optax.MaskedNode` in the tree has no leaves, so it is never optimized.

    Attributes:
        leaves: The optimized leaves, in the order of the tree, as in all lists of leaves.
        names: Their paths, for error messages.
    """

    def __init__(self, params: PyTree, mask: TreeOrFunction) -> None:
        paths, treedef = jax.tree_util.tree_flatten_with_path(params)
        self._params = params
        self._treedef: Any = treedef
        self._optimized: list[bool] = [True] * len(paths)
        if mask is not None:
            self._optimized = broadcast_prefix(mask, params)
        for flag in self._optimized:
            if not isinstance(flag, (bool, np.bool_)):
                raise TypeError(f"mask must have True and False as leaves, got {flag!r}")
        self.leaves = [jnp.asarray(leaf) for leaf in self.select([leaf for _, leaf in paths])]
        names = self.select([jax.tree_util.keystr(path) for path, _ in paths])
        for name, leaf in zip(names, self.leaves):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"parameter {name or 'tree'} is {leaf.dtype}, and only real floating-point "
                    "leaves can be optimized; exclude it with mask="
                )

    def select(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of the optimized leaves, from those of all leaves."""
        return [value for value, optimized in zip(values, self._optimized) if optimized]

    def tree(
        self,
        selected: Iterable[Any],
        fill: Callable[[jax.Array], Any] = lambda _: optax.MaskedNode(),
    ) -> PyTree:
        """Return the parameter tree with `selected` as leaves, the others masked or filled."""
        rest, flags = iter(selected), iter(self._optimized)
        return jax.tree.map(lambda leaf: next(rest) if next(flags) else fill(leaf), self._params)

    def entries(self, tree: PyTree) -> list[Any]:
        """Return the node of a tree like the parameters at each optimized leaf."""
        return self.select(self._treedef.flatten_up_to(tree))

    def buffers(self, tree: PyTree) -> list[jax.Array]:
        """Return the leaves of a tree of the state; raise if they do not match the parameters."""
        _check_like(
            self.tree(self.leaves),
            tree,
            "params do not match the structure of the optimizer state; create a new state with "
            "tx.init(params)",
        )
        leaves: list[jax.Array] = jax.tree.leaves(tree)
        return leaves

    def gradient(self, tree: PyTree, source: str) -> list[jax.Array]:
        """Return the optimized leaves of a gradient, in their wide dtypes.

        Raise if `tree` does not have the structure and the shapes of the parameters.
        """
        _check_like(
            self._params,
            tree,
            f"{source} must be a gradient with the structure of the parameters (of value_and_grad, "
            "the gradient alone)",
        )
        pairs = zip(self.leaves, self.select(jax.tree.leaves(tree)))
        return [jnp.asarray(g).astype(wide_dtype(leaf)) for leaf, g in pairs]


def _check_like(expected: PyTree, tree: PyTree, message: str) -> None:
    shapes, found = (jax.tree.map(jnp.shape, each) for each in (expected, tree))
    if jax.tree.flatten(shapes) != jax.tree.flatten(found):
        raise ValueError(f"{message}: shapes {str(shapes)[:300]}, got {str(found)[:300]}")


def broadcast_prefix(prefix: TreeOrFunction, params: PyTree) -> list[Any]:
    """Return one value per leaf of `params`, from a prefix of their tree or a function of them."""
    if not jax.tree.leaves(params):  # `optax.tree.map_params` passes a placeholder
        return []
    # A tree may itself be callable: an Equinox module of booleans is.
    structure: Any = jax.tree.structure(prefix)
    is_tree = not callable(prefix) or structure == jax.tree.structure(params)
    tree = prefix if is_tree else prefix(params)
    repeated = jax.tree.map(lambda value, part: jax.tree.map(lambda _: value, part), tree, params)
    values: list[Any] = jax.tree.leaves(repeated)
    return values


# -- norms -----------------------------------------------------------------------------------


def square_norm(leaves: Sequence[jax.Array], unit: Any) -> jax.Array:
    """Return |.|^2 over all leaves together, in units of `unit`."""
    dtype = accumulator_dtype()
    # Small leaves are concatenated: one kernel for each would cost more than the copy. XLA sums
    # pairwise, so that 2^25 equal float32 terms come out right to the last digits.
    parts = [leaf for leaf in leaves if not _can_concatenate(leaf)]
    small = [leaf.ravel().astype(dtype) for leaf in leaves if _can_concatenate(leaf)]
    if small:
        parts.append(jnp.concatenate(small))
    squares = (jnp.sum(jnp.square(part.astype(dtype) / unit)) for part in parts)
    return sum(squares, start=jnp.zeros((), dtype))


def norm(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return |.| over all leaves together, also where the squares overflow or underflow."""
    largest = jnp.max(largest_magnitudes(leaves), initial=0)
    largest = jnp.where(largest == 0, 1, largest)
    return largest * jnp.sqrt(square_norm(leaves, largest))


def root_mean_squares(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return the root mean square of each leaf, also where the squares overflow or underflow."""
    scale = largest_magnitudes(leaves)
    scale = jax.lax.stop_gradient(jnp.where(scale == 0, 1, scale))  # it cancels
    scaled = [leaf / scale_i.astype(leaf.dtype) for leaf, scale_i in zip(leaves, scale)]
    sizes = np.array([max(leaf.size, 1) for leaf in leaves])
    return scale * square_root(sums_of_squares(scaled) / sizes)


def sums_of_squares(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return |.|^2 of each leaf."""
    dtype = accumulator_dtype()
    if not leaves:
        return jnp.zeros(0, dtype)
    small = [i for i, leaf in enumerate(leaves) if _can_concatenate(leaf)]
    large = [i for i, leaf in enumerate(leaves) if not _can_concatenate(leaf)]
    groups = stack_equal_sizes([leaves[i].reshape(-1).astype(dtype) for i in small])
    order = [small[i] for which, _ in groups for i in which] + large
    sums = [jnp.sum(jnp.square(rows), axis=1) for _, rows in groups]
    sums += [jnp.sum(jnp.square(leaves[i].astype(dtype)))[None] for i in large]
    return jnp.concatenate(sums)[np.argsort(order)]


def stack_equal_sizes(vectors: Sequence[jax.Array]) -> list[tuple[list[int], jax.Array]]:
    """Stack vectors of equal size: each matrix, with the places of its rows in `vectors`."""
    groups: dict[int, list[int]] = {}
    for i, vector in enumerate(vectors):
        groups.setdefault(vector.size, []).append(i)
    return [
        (which, jnp.concatenate([vectors[i] for i in which]).reshape(len(which), size))
        for size, which in groups.items()
    ]


def square_root(square: jax.Array) -> jax.Array:
    """Return the root, with derivative 0 at 0: infinity would make meta-gradients NaN."""
    return jnp.where(square == 0, 0, jnp.sqrt(jnp.where(square == 0, 1, square)))


def largest_magnitudes(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return the largest absolute value of each leaf, as one array; 0 for an empty leaf."""
    if not leaves:
        return jnp.zeros(0, accumulator_dtype())
    return jnp.stack([_largest_magnitude(leaf) for leaf in leaves])


@jax.jit
def _largest_magnitude(leaf: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(leaf), initial=0).astype(accumulator_dtype())


def _can_concatenate(leaf: jax.Array) -> bool:
    # On a mesh with explicit axes, arrays with different shardings do not concatenate.
    return leaf.size <= _SMALL and explicit_mesh(leaf) is None
