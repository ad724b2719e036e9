"""Which leaves are optimised, which of them share their sums, and |.|^2 over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.versions import explicit_mesh

PyTree: TypeAlias = Any
# A tree (or a prefix of one, or a function of the parameters that returns either).
TreeOrFunction: TypeAlias = PyTree | Callable[[PyTree], PyTree]

_SMALL = 8192  # elements


def sums_dtype() -> jnp.dtype[Any]:
    """Of the sums, the gain and the step size: the widest float that jax has switched on."""
    return jnp.dtype(jnp.result_type(float))


def estimator_dtype(leaf: jax.Array) -> jnp.dtype[Any]:
    """Float32 for narrow parameters: d sums gradients over many steps, x does not."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def widened(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """In the dtype of the estimator."""
    return [leaf.astype(estimator_dtype(leaf)) for leaf in leaves]


def counted(count: jax.Array, happened: jax.Array | bool = True) -> jax.Array:
    """One more if it happened; the largest integer stays, where a sum would turn negative."""
    return jnp.where(happened & (count < np.iinfo(count.dtype).max), count + 1, count)


def root(square: jax.Array) -> jax.Array:
    """The square root, with the derivative 0 at 0: infinity would make meta-gradients NaN."""
    return jnp.where(square == 0, 0, jnp.sqrt(jnp.where(square == 0, 1, square)))


def all_finite(tree: PyTree) -> jax.Array:
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(leaves).all()


class Layout:
    """How the leaves of one parameter tree are used. Static: built while tracing.

    Holes (`optax.MaskedNode`) are a part of the structure, as to jax: nothing is there.

    Attributes:
        x: The optimised leaves, in the tree's order. Lists of leaves below are like it.
        names: Their paths, for errors.
        bucket: For each of them, the index of its bucket: of the scalars it uses.
        shape: The shape of the scalars, () or (number of buckets,).
    """

    def __init__(
        self, params: PyTree, *, mask: TreeOrFunction, scope: str, groups: TreeOrFunction
    ) -> None:
        paths, treedef = jax.tree_util.tree_flatten_with_path(params)
        self.treedef: Any = treedef
        self.leaves = [jnp.asarray(leaf) for _, leaf in paths]
        self.kept: list[bool] = [True] * len(paths)
        if mask is not None:
            self.kept = per_leaf("mask", mask, params)
        for kept in self.kept:
            if not isinstance(kept, (bool, np.bool_)):
                raise TypeError(f"mask must have True and False as leaves, got {kept!r}")
        self.x = self.select(self.leaves)
        self.names = self.select([jax.tree_util.keystr(path) for path, _ in paths])
        for name, leaf in zip(self.names, self.x):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"parameter {name or 'tree'} is {leaf.dtype}, and only real floating-point "
                    "leaves can be optimised; leave it out with mask="
                )
        labels: list[Any] = [""] * len(self.x)
        if scope == "tensor":
            labels = list(range(len(self.x)))
        elif scope == "group":
            labels = self.select(per_leaf("groups", groups, params))
        order = list(dict.fromkeys(labels))  # of appearance
        self.bucket = [order.index(label) for label in labels]
        self.count = len(order)
        self.shape = () if scope == "global" else (self.count,)

    def select(self, leaves: Sequence[Any]) -> list[Any]:
        return [leaf for leaf, kept in zip(leaves, self.kept) if kept]

    def with_holes(self, selected: Iterable[Any]) -> PyTree:
        """The parameter tree with `selected` in it, and no leaf where nothing is optimised."""
        return self._tree(selected, lambda _: optax.MaskedNode())

    def with_zeros(self, selected: Iterable[Any]) -> PyTree:
        """The parameter tree with `selected` in it, and zeros where nothing is optimised."""
        return self._tree(selected, jnp.zeros_like)

    def _tree(self, selected: Iterable[Any], otherwise: Callable[[jax.Array], Any]) -> PyTree:
        rest = iter(selected)
        leaves = [next(rest) if kept else otherwise(p) for p, kept in zip(self.leaves, self.kept)]
        return self.treedef.unflatten(leaves)

    def each(self, scalar: jax.Array) -> list[jax.Array]:
        """A bucket's scalar for each optimised leaf, in the dtype of its estimator."""
        scalars = [scalar[b] if self.shape else scalar for b in self.bucket]
        return [s.astype(estimator_dtype(p)) for s, p in zip(scalars, self.x)]

    def square_norm(self, leaves: Sequence[jax.Array], norm: str) -> jax.Array:
        """|.|^2 as the rules see it: one number, or one per bucket."""
        dtype = sums_dtype()
        buckets = self._buckets(leaves)
        squares = [_sum_of_squares(bucket, dtype) for bucket in buckets]
        if norm == "mean":
            sizes = [max(sum(leaf.size for leaf in bucket), 1) for bucket in buckets]
            squares = [square / size for square, size in zip(squares, sizes)]
        if not squares:
            return jnp.zeros(self.shape, dtype)
        return jnp.stack(squares) if self.shape else squares[0]

    def rms(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The root mean square of each bucket, also where the square is beyond the dtype."""
        largest = [jnp.max(jnp.abs(leaf), initial=0).astype(sums_dtype()) for leaf in leaves]
        buckets = [jnp.max(jnp.stack(bucket)) for bucket in self._buckets(largest)]
        if not buckets:
            return jnp.zeros(self.shape, sums_dtype())
        # The scale cancels: no derivative need go through it.
        scale = jax.lax.stop_gradient(jnp.stack(buckets).reshape(self.shape))
        scale = jnp.where(scale == 0, 1, scale)
        scaled = [leaf / scale_i for leaf, scale_i in zip(leaves, self.each(scale))]
        return scale * root(self.square_norm(scaled, "mean"))

    def _buckets(self, leaves: Sequence[jax.Array]) -> list[list[jax.Array]]:
        buckets: list[list[jax.Array]] = [[] for _ in range(self.count)]
        for bucket, leaf in zip(self.bucket, leaves):
            buckets[bucket].append(leaf)
        return buckets

    def buffer(self, tree: PyTree) -> list[jax.Array]:
        """The leaves of a buffer of the state, checked against the parameters."""
        leaves: list[jax.Array] = jax.tree.leaves(tree)
        if [leaf.shape for leaf in leaves] != [x.shape for x in self.x]:
            raise ValueError(
                f"the state is of other parameters: its buffer is {_shapes(leaves)}, the "
                f"parameters are {_shapes(self.x)}; make one with tx.init(params)"
            )
        return leaves

    def gradient(self, tree: PyTree, source: str) -> list[jax.Array]:
        """The optimised leaves of a gradient, checked against the parameters."""
        structure = jax.tree.structure(tree)
        if structure != self.treedef:
            hint = ""
            if isinstance(tree, tuple) and self.treedef in map(jax.tree.structure, tree):
                hint = "; it looks like (value, gradient): return the gradient alone"
            raise TypeError(
                f"{source} must be a gradient with the structure of the parameters, "
                f"{_short(self.treedef)}, got {_short(structure)}{hint}"
            )
        leaves: list[jax.Array] = [jnp.asarray(g) for g in self.select(jax.tree.leaves(tree))]
        for name, g, x in zip(self.names, leaves, self.x):
            if g.shape != x.shape:
                raise ValueError(
                    f"{source} must have the shapes of the parameters: "
                    f"{name or 'the parameter'} is {x.shape}, its gradient {g.shape}"
                )
        return [g.astype(estimator_dtype(x)) for g, x in zip(leaves, self.x)]


def _sum_of_squares(leaves: Sequence[jax.Array], dtype: Any) -> jax.Array:
    # Small leaves together: a kernel for each would cost more than the copy. XLA sums by
    # halves, so that 2^25 equal float32 terms come out right to the last digits.
    small = [leaf.ravel().astype(dtype) for leaf in leaves if _joinable(leaf)]
    parts = [leaf for leaf in leaves if not _joinable(leaf)]
    if small:
        parts.append(jnp.concatenate(small))
    return sum((jnp.sum(jnp.square(p.astype(dtype))) for p in parts), start=jnp.zeros((), dtype))


def _joinable(leaf: jax.Array) -> bool:
    # On a mesh with explicit axes, arrays sharded in different ways do not concatenate.
    return leaf.size <= _SMALL and explicit_mesh(leaf) is None


def per_leaf(name: str, prefix: TreeOrFunction, params: PyTree) -> list[Any]:
    """One value per leaf of `params`, from a prefix of their tree or a function of them."""
    if not jax.tree.leaves(params):  # nothing to label, whatever tree the labels are for
        return []
    # A tree may be callable itself: an Equinox module of booleans is.
    structure: Any = jax.tree.structure(prefix)
    is_tree = not callable(prefix) or structure == jax.tree.structure(params)
    tree = prefix if is_tree else prefix(params)
    values: list[Any] = []

    def spread(value: Any, below: PyTree) -> None:
        values.extend([value] * len(jax.tree.leaves(below)))

    try:
        jax.tree.map(spread, tree, params)
    except ValueError as error:
        raise ValueError(
            f"{name} must have the structure of the parameters, or be a prefix of it: "
            f"they are {_short(jax.tree.structure(params))}, got {tree!r}"
        ) from error
    return values


def is_hole(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _short(structure: Any) -> str:
    text = str(structure)
    return text if len(text) < 300 else text[:300] + " ..."


def _shapes(leaves: Sequence[jax.Array]) -> str:
    return _short([leaf.shape for leaf in leaves])
