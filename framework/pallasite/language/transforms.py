"""Transforms of references: how data lies in memory, and views on it.

A transform maps the type of a reference to the type of a view on it. ``TilingTransform`` and
``SwizzleTransform`` are written by users on an allocation and map the logical shape to the physical
one; the reference that the kernel body gets is the physical one with the inverse transforms on it,
so that it reads with its logical shape. What the views mean for addresses is up to the lowering.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallasite import _jax
from pallasite.language import checks
from pallasite.language.memory_space import MemorySpace

SWIZZLES = (16, 32, 64, 128)


def _map_array_type(transform: Any, x: Any, function: Callable[[Any], Any]) -> Any:
    """Applies ``function`` to the array type inside ``x``, which may be a reference type."""
    match x:
        case _jax.ShapedArray():
            return function(x)
        case _jax.AbstractRef():
            return x.update(inner_aval=_map_array_type(transform, x.inner_aval, function))
        case _:
            raise checks.type_error(
                f"{type(transform).__name__} needs a reference to an array",
                got=x,
                expected="a reference whose elements are numbers",
            )


@dataclasses.dataclass(frozen=True)
class TilingTransform(_jax.Transform):  # type: ignore[misc]
    """Stores the trailing dimensions tile by tile.

    Tiling (X, Y) stores shape (..., M, N) as (..., M / X, N / Y, X, Y), each tile contiguous.
    Raises InvalidValueError when a dimension is not a multiple of its tile.
    """

    tiling: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiling", checks.positive_integers(self.tiling, "tiling"))

    def transform_type(self, x: Any) -> Any:
        """The physical type for the logical type ``x``."""
        return _map_array_type(self, x, self._tile)

    def _tile(self, x: Any) -> Any:
        rank = len(self.tiling)
        if len(x.shape) < rank:
            raise checks.value_error(
                f"tiling {self.tiling} has more dimensions than shape {x.shape}",
                expected=f"at most {len(x.shape)} tile dimensions",
            )
        split = len(x.shape) - rank
        for size, tile in zip(x.shape[split:], self.tiling, strict=True):
            if size % tile:
                raise checks.value_error(
                    f"dimension of size {size} cannot be cut into tiles of {tile}",
                    got=f"shape {x.shape} with tiling {self.tiling}",
                    expected=f"each of the last {rank} dimensions a multiple of its tile",
                )
        tiles = tuple(s // t for s, t in zip(x.shape[split:], self.tiling, strict=True))
        return x.update(shape=(*x.shape[:split], *tiles, *self.tiling))

    def undo(self, x: Any) -> UntilingTransform:
        """The view that gives the logical shape back."""
        del x
        return UntilingTransform(self.tiling)

    def pretty_print(self, context: Any) -> Any:
        """The transform as it appears in a printed jaxpr."""
        del context
        return _jax.pretty_printer.text(f"{{tile({list(self.tiling)})}}")


@dataclasses.dataclass(frozen=True)
class UntilingTransform(_jax.Transform):  # type: ignore[misc]
    """The inverse of :class:`TilingTransform`: (..., M / X, N / Y, X, Y) seen as (..., M, N)."""

    tiling: tuple[int, ...]

    def transform_type(self, x: Any) -> Any:
        """The logical type for the physical type ``x``."""
        return _map_array_type(self, x, self._untile)

    def _untile(self, x: Any) -> Any:
        rank = len(self.tiling)
        if len(x.shape) < 2 * rank or tuple(x.shape[-rank:]) != self.tiling:
            raise checks.value_error(
                f"shape {x.shape} is not tiled by {self.tiling}",
                expected=f"a shape that ends in {self.tiling}",
            )
        split = len(x.shape) - 2 * rank
        sizes = tuple(
            n * t for n, t in zip(x.shape[split : split + rank], self.tiling, strict=True)
        )
        return x.update(shape=(*x.shape[:split], *sizes))

    def undo(self, x: Any) -> TilingTransform:
        """The transform that this one undoes."""
        del x
        return TilingTransform(self.tiling)

    def pretty_print(self, context: Any) -> Any:
        """The transform as it appears in a printed jaxpr."""
        del context
        return _jax.pretty_printer.text(f"{{untile({list(self.tiling)})}}")


@dataclasses.dataclass(frozen=True)
class SwizzleTransform(_jax.Transform):  # type: ignore[misc]
    """Permutes the 16-byte chunks of each row, so that columns fall into different banks.

    ``swizzle`` is the row length in bytes: 32, 64 or 128 (PTX ISA, "Swizzling modes"). The last
    dimension must be exactly that long, which is what a tiling before it provides.
    """

    swizzle: int

    def __post_init__(self) -> None:
        if self.swizzle not in SWIZZLES[1:]:
            raise checks.value_error(
                f"there is no swizzle of {self.swizzle!r} bytes",
                expected="32, 64 or 128",
                hint="leave the transform out for unswizzled data" if self.swizzle == 16 else None,
            )

    def transform_type(self, x: Any) -> Any:
        """The physical type, which equals the logical one; checks the last dimension."""
        return _map_array_type(self, x, self._check)

    def _check(self, x: Any) -> Any:
        elements = self.swizzle * 8 // _jax.itemsize_bits(x.dtype)
        if not x.shape or x.shape[-1] != elements:
            raise checks.value_error(
                f"swizzle {self.swizzle} does not fit rows of shape {x.shape} and dtype {x.dtype}",
                expected=f"a last dimension of {elements} elements ({self.swizzle} bytes)",
                hint=f"put TilingTransform((8, {elements})) before SwizzleTransform",
            )
        return x

    def undo(self, x: Any) -> UnswizzleTransform:
        """The view that gives the logical order back."""
        del x
        return UnswizzleTransform(self.swizzle)

    def pretty_print(self, context: Any) -> Any:
        """The transform as it appears in a printed jaxpr."""
        del context
        return _jax.pretty_printer.text(f"{{swizzle({self.swizzle})}}")


@dataclasses.dataclass(frozen=True)
class UnswizzleTransform(_jax.Transform):  # type: ignore[misc]
    """The inverse of :class:`SwizzleTransform`; the type stays the same."""

    swizzle: int

    def transform_type(self, x: Any) -> Any:
        """``x`` itself."""
        return x

    def undo(self, x: Any) -> SwizzleTransform:
        """The transform that this one undoes."""
        del x
        return SwizzleTransform(self.swizzle)

    def pretty_print(self, context: Any) -> Any:
        """The transform as it appears in a printed jaxpr."""
        del context
        return _jax.pretty_printer.text(f"{{unswizzle({self.swizzle})}}")


@dataclasses.dataclass(frozen=True)
class ExtractAliasedRef(_jax.Transform):  # type: ignore[misc]
    """One member of a :class:`~pallasite.language.memory.RefUnion`.

    Attributes:
      dtype: element type of the member.
      shape: physical shape of the member.
      offset: where it begins in the union, in bytes, or in the unit of a plugin's memory space.
      group: which of the union's groups it belongs to; members of one group do not overlap.
      layout: what the memory space knows of the member besides; None in shared memory.
    """

    dtype: Any
    shape: tuple[int, ...]
    offset: int
    group: int
    layout: Any = None

    def transform_type(self, x: Any) -> Any:
        """The type of the member, for the type of the union."""
        match x:
            case _jax.ShapedArray():
                return x.update(shape=self.shape, dtype=self.dtype)
            case _jax.AbstractRef():
                return x.memory_space.member_type(self.transform_type(x.inner_aval), self.layout)
            case _:
                raise checks.type_error("only a RefUnion has members", got=x)

    def pretty_print(self, context: Any) -> Any:
        """The transform as it appears in a printed jaxpr."""
        del context
        return _jax.pretty_printer.text(
            f"{{member({self.dtype}{list(self.shape)} at {self.offset})}}"
        )


@dataclasses.dataclass(frozen=True)
class _TypePreserving(_jax.Transform):  # type: ignore[misc]
    def transform_type(self, x: Any) -> Any:
        """``x`` itself: the same data in another place."""
        return x


@dataclasses.dataclass(frozen=True)
class ClusterRefTransform(_TypePreserving):
    """The same shared-memory reference in another block of the cluster.

    ``dims`` are names of cluster axes and ``idxs`` the block's index along each; along axes that
    are not named, the index is the block's own.
    """

    dims: tuple[Any, ...]
    idxs: tuple[Any, ...]

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.idxs):
            raise checks.value_error(
                f"{len(self.dims)} cluster axes but {len(self.idxs)} indices",
                got=f"dims={self.dims}, idxs={self.idxs}",
            )


for _cls, _data, _static in (
    (UntilingTransform, (), ("tiling",)),
    (UnswizzleTransform, (), ("swizzle",)),
    (TilingTransform, (), ("tiling",)),
    (SwizzleTransform, (), ("swizzle",)),
    (ExtractAliasedRef, (), ("dtype", "shape", "offset", "group", "layout")),
    (ClusterRefTransform, ("idxs",), ("dims",)),
):
    jax.tree_util.register_dataclass(_cls, data_fields=_data, meta_fields=_static)


def as_transformed(ref: Any, what: str = "ref") -> Any:
    """``ref`` as a TransformedRef (without transforms if it has none), or an InvalidTypeError."""
    if isinstance(ref, _jax.TransformedRef):
        if ref.multiref:
            raise checks.unsupported(
                f"{what} was selected from several references",
                hint="branch with jax.lax.cond and use one reference in each branch",
            )
        return ref
    try:
        aval = _jax.typeof(ref)
    except TypeError:
        aval = None
    if not isinstance(aval, _jax.AbstractRef):
        raise checks.type_error(
            f"{what} is not a reference",
            got=f"{aval if aval is not None else ref!r}",
            expected="a Ref of the kernel, or a view of one such as ref.at[...]",
            hint="pass the reference itself; ref[...] reads it" if aval is not None else None,
        )
    return _jax.TransformedRef(ref, ())


def _append(ref: Any, transform: Any) -> Any:
    base = as_transformed(ref)
    return _jax.TransformedRef(base.ref, (*base.transforms, transform))


def transpose_ref(ref: Any, permutation: tuple[int, ...]) -> Any:
    """A view of ``ref`` with its dimensions permuted: result[i, j] is ref[j, i] for (1, 0).

    Args:
      ref: a reference in SMEM or GMEM, or a view of one.
      permutation: for each dimension of the view, which dimension of ``ref`` it is.

    Raises:
      InvalidValueError: ``permutation`` does not name each dimension once.
    """
    base = as_transformed(ref)
    permutation = tuple(permutation)
    if sorted(permutation) != list(range(len(base.shape))):
        raise checks.value_error(
            f"{permutation} is not a permutation of the dimensions of shape {base.shape}",
            expected=f"each of 0..{len(base.shape) - 1} once",
        )
    if isinstance(base.memory_space, MemorySpace):
        base.memory_space.check_view(base, _jax.TransposeTransform(permutation))
    return base.transpose(permutation)


def cluster_ref(ref: Any, block_id: Mapping[Any, Any]) -> Any:
    """A view of a shared-memory reference in another block of the cluster.

    ``block_id`` maps names of cluster axes to indices along them, for instance ``{"x": 1}``. Raises
    InvalidTypeError unless it is a dictionary with an entry.
    """
    if not isinstance(block_id, Mapping) or not block_id:
        raise checks.type_error(
            "block_id does not say which block",
            got=block_id,
            expected='a dictionary from cluster axis names to indices, such as {"x": 0}',
        )
    return _append(ref, ClusterRefTransform(tuple(block_id.keys()), tuple(block_id.values())))


def find_swizzle(minor_dim_bits: int, what: str = "") -> int:
    """The widest swizzle, in bytes, that divides rows of ``minor_dim_bits`` bits.

    16 means no swizzle. The usual transforms for a matrix operand are then
    ``TilingTransform((8, 8 * swizzle // element_bits))`` and ``SwizzleTransform(swizzle)``.
    Raises InvalidValueError when the row is not a multiple of 16 bytes; ``what`` names the operand.
    """
    for swizzle in reversed(SWIZZLES):
        if minor_dim_bits % (swizzle * 8) == 0:
            return swizzle
    raise checks.value_error(
        f"no swizzle fits{' ' + what if what else ''}: a row has {minor_dim_bits} bits",
        expected="a multiple of 128 bits (16 bytes)",
    )


def element_bits(dtype: Any, shape: tuple[int, ...]) -> int:
    """Size in bits of an array."""
    return int(math.prod(shape) * _jax.itemsize_bits(dtype))
