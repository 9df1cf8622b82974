"""Which dimensions the arrays of a product have, as labels, and which of them kernels take as one.

A label that both operands and the result have is a batch dimension; one of the left operand and the
result are rows, one of the right operand and the result columns, one of both operands is summed
over, as in ``jnp.einsum``. Labels stand in the order of dimensions in memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

type Labels = tuple[int, ...]
type Group = tuple[int, ...]
"""Labels that are one dimension of a kernel, outermost first."""

ROW, COLUMN, DEPTH = range(3)
"""The labels of a product without batch dimensions; ``jax.vmap`` adds others."""


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """The labels of the arrays of a product.

    Attributes:
      a, b, out: of both operands and the result.
      extras: of the operands of the epilogue, each in the order of the result.
    """

    a: Labels
    b: Labels
    out: Labels
    extras: tuple[Labels, ...] = ()

    def sizes(self, *shapes: Sequence[int]) -> dict[int, int]:
        """The extents of all labels, from the shapes of the operands."""
        labels = (self.a, self.b, *self.extras)
        found: dict[int, int] = {}
        for one, shape in zip(labels, shapes, strict=True):
            found.update(zip(one, shape, strict=True))
        return found

    @property
    def sums(self) -> Labels:
        """The result's without those that only operands of the epilogue have."""
        return tuple(one for one in self.out if one in self.a or one in self.b)

    def swapped(self) -> Dimensions:
        """The same product of the operands in the other order."""
        return dataclasses.replace(self, a=self.b, b=self.a)


def matrices(transpose_a: bool, transpose_b: bool, extras: Sequence[Labels] = ()) -> Dimensions:
    """The labels of a product of two matrices."""
    a, b = (ROW, DEPTH), (DEPTH, COLUMN)
    return Dimensions(
        a=a[::-1] if transpose_a else a,
        b=b[::-1] if transpose_b else b,
        out=(ROW, COLUMN),
        extras=tuple(extras),
    )


def with_batch(
    dims: Dimensions,
    label: int,
    places: Sequence[int | None],
    *,
    movable: bool,
    wanted: int | None = None,
    apart: bool = False,
) -> Dimensions:
    """The labels of a product with one dimension more.

    Args:
      dims: of the product.
      label: of the new dimension.
      places: the position of the new dimension in a and b, None where it is not; then whether the
        operands of the epilogue have it (a number, or None).
      movable: whether columns of the result may lie apart, as without an epilogue.
      wanted: the place in the result of a dimension that may have any, if kernels can put it there.
      apart: whether kernels can put rows or columns there that they could join, too.
    """
    in_a, in_b, *in_extras = places
    told = wanted if wanted is not None and wanted < len(dims.out) else None  # Columns are last.
    place = told or 0
    chosen = apart and told is not None
    if in_b is None and in_a is not None and not chosen:
        place = _beside(dims.a, in_a, dims.out, set(dims.b), place)
    elif in_a is None and in_b is not None and movable and not chosen:
        # The first dimension can be the result's first, too, without a copy of either.
        place = _beside(dims.b, in_b, dims.out, set(dims.a), place) if in_b else place
    out = _inserted(dims.out, place, label)
    extras = tuple(
        one if position is None else tuple(x for x in out if x in one or x == label)
        for one, position in zip(dims.extras, in_extras, strict=True)
    )
    return Dimensions(_inserted(dims.a, in_a, label), _inserted(dims.b, in_b, label), out, extras)


def _beside(operand: Labels, position: int, out: Labels, shared: set[int], otherwise: int) -> int:
    """The place in the result where a new dimension is next to the same one as in the operand, if
    that is one that only this operand has."""
    for neighbour, after in ((position, 0), (position - 1, 1)):
        if 0 <= neighbour < len(operand):
            label = operand[neighbour]
            if label in out and label not in shared:
                return out.index(label) + after
    return otherwise


def _inserted(labels: Labels, position: int | None, label: int) -> Labels:
    if position is None:
        return labels
    return (*labels[:position], label, *labels[position:])


def with_joined_depth(dims: Dimensions, sizes: Mapping[int, int]) -> Dimensions:
    """The labels where those that are summed over lie next to each other in both operands, if they
    do in one, and a copy of the other moves less than results for each, which are added up."""
    depth = {one for one in dims.a if one in dims.b and one not in dims.out}
    options: list[tuple[int, Dimensions]] = []
    for labels, kept in ((dims.a, dims.b), (dims.b, dims.a)):
        block = tuple(one for one in kept if one in depth)
        if not _has(kept, block):
            continue
        rest = tuple(one for one in labels if one not in depth)
        place = len(rest) if labels[-1] in depth else 0
        found = (*rest[:place], *block, *rest[place:])
        if _has(labels, block):
            return dims
        copied = math.prod(sizes[one] for one in labels)
        a, b = (found, dims.b) if labels is dims.a else (dims.a, found)
        options.append((copied, dataclasses.replace(dims, a=a, b=b)))
    if not options:
        return dims
    copied, joined = min(options, key=lambda one: one[0])
    parts = math.prod(sizes[one] for one in depth) // max(sizes[one] for one in depth)
    # Sums have 32 bits; operands 16, mostly.
    return joined if copied < 2 * parts * math.prod(sizes[one] for one in dims.out) else dims


def _has(labels: Labels, block: Labels) -> bool:
    """Whether labels lie next to each other, in this order."""
    first = labels.index(block[0])
    return labels[first : first + len(block)] == block


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel for products of matrices computes a product.

    Attributes:
      groups: labels that are one dimension, of each of the arrays.
      a, b, out: groups of the operands and the result, in the order in which they lie in memory, or
        are to be brought into if they do not.
      rows, columns, depth: the dimensions of each matrix.
      batch: the dimensions of several products, in the order of the result. Those that the result
        does not have come first, and are summed over afterwards.
      summed: how many of these there are.
    """

    a: tuple[Group, ...]
    b: tuple[Group, ...]
    out: tuple[Group, ...]
    rows: Group
    columns: Group
    depth: Group
    batch: tuple[Group, ...]
    summed: int

    @property
    def transpose_a(self) -> bool:
        """Whether matrices of the left operand have columns first."""
        return self.a.index(self.depth) < self.a.index(self.rows)

    @property
    def transpose_b(self) -> bool:
        """Whether matrices of the right operand have columns first."""
        return self.b.index(self.columns) < self.b.index(self.depth)


def plan(
    dims: Dimensions, sizes: Mapping[int, int], by_rows: Sequence[bool], *, plain: bool
) -> Plan:
    """The kernel's view of a product whose result has columns as its last dimension.

    Args:
      dims: labels of the arrays.
      sizes: extents.
      by_rows: for each operand of the epilogue, whether it has something for each row.
      plain: whether there is no epilogue.
    """
    fixed = {
        label
        for labels, rows in zip(dims.extras, by_rows, strict=True)
        if not rows
        for label in labels
    }
    a, b, out = _merged(dims, fixed, plain=plain)

    def size(group: Group) -> int:
        return math.prod(sizes[one] for one in group)

    def chosen(groups: Sequence[Group], *preferred: Group) -> Group:
        """The one that has to be last in an operand, else the largest."""
        for one in preferred:
            if one in groups:
                return one
        return max(groups, key=size)

    rows = [one for one in out if one in a and one not in b and not fixed & {*one}]
    columns = [one for one in out if one in b and one not in a]
    depths = [one for one in a if one in b and one not in out]
    column = chosen(columns, out[-1], b[-1])
    depth = chosen(depths, a[-1], b[-1])
    row = chosen(rows, a[-1])
    summed = [one for one in depths if one != depth]
    batch = [*summed, *(one for one in out if one not in (row, column))]
    return Plan(
        a=_in_order(a, batch, (row, depth)),
        b=_in_order(b, batch, (column, depth)),
        out=_in_order((*summed, *out), batch, (column,)),
        rows=row,
        columns=column,
        depth=depth,
        batch=tuple(batch),
        summed=len(summed),
    )


def _in_order(
    groups: Sequence[Group], batch: Sequence[Group], inner: Sequence[Group]
) -> tuple[Group, ...]:
    """The groups as they are if one of ``inner`` is the last; else matrices after all others."""
    if groups[-1] in inner:
        return tuple(groups)
    matrix = [one for one in groups if one not in batch]
    return (*(one for one in batch if one in groups), *matrix)


def _merged(
    dims: Dimensions, fixed: set[int], *, plain: bool
) -> tuple[list[Group], list[Group], list[Group]]:
    """Labels that lie next to each other in all arrays that have them, as groups.

    An epilogue has operands for each row, which all rows can have. What it has for each column, or
    once, by the labels that are ``fixed``, stays the same for all rows.
    """
    arrays: list[list[Group]] = [
        [(one,) for one in labels] for labels in (dims.a, dims.b, dims.out)
    ]
    a, b, out = arrays

    def joins(left: Group, right: Group) -> bool:
        having = [one for one in arrays if left in one or right in one]
        for one in having:
            if left not in one or right not in one or one.index(right) != one.index(left) + 1:
                return False
        if len(having) != 2:
            return True  # A batch dimension.
        if having == [a, b]:
            return True
        return plain if having == [b, out] else not fixed & {*left, *right}

    changed = True
    while changed:
        changed = False
        for array in arrays:
            for left, right in zip(array, array[1:], strict=False):
                if joins(left, right):
                    for one in arrays:
                        if left in one:
                            place = one.index(left)
                            one[place : place + 2] = [left + right]
                    changed = True
                    break
    return a, b, out
