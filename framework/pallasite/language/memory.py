"""Memory spaces, allocations in them, unions of allocations, and semaphores."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import _jax
from pallasite.language import checks
from pallasite.language.transforms import ExtractAliasedRef, as_transformed, element_bits

#: Every allocation in shared memory begins at a multiple of this many bytes, which satisfies TMA
#: (128) and the widest swizzle (1024).
SMEM_ALIGNMENT = 1024


class MemorySpace(enum.Enum):
    """Where data lives. Calling one describes an allocation: ``SMEM((64, 64), jnp.float16)``."""

    #: Global memory: the operands and results of the kernel.
    GMEM = "gmem"
    #: Shared memory of a block.
    SMEM = "smem"
    #: Tensor memory (Blackwell).
    TMEM = "tmem"
    #: Registers.
    REGS = "regs"

    def __str__(self) -> str:
        return self.value

    def __call__(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        transforms: Sequence[Any] = (),
        packed: bool | None = None,
        collective: bool | None = None,
        layout: Any = None,
    ) -> Any:
        """Describes an allocation, for ``scratch_types=`` and ``pl.run_scoped``.

        Args:
          shape: logical shape.
          dtype: element type.
          transforms: how the data lies in shared memory; applied to the logical shape in order.
          packed, collective, layout: tensor memory only.

        Raises:
          InvalidValueError: an extent of 0 in shared memory, or an argument of another space.
          UnsupportedError: tensor memory without the plugin that provides it.
        """
        arguments = dict(
            transforms=tuple(transforms), packed=packed, collective=collective, layout=layout
        )
        constructor = MEMORY_CONSTRUCTORS.get(self)
        if constructor is not None:
            return constructor(tuple(shape), dtype, **arguments)
        if self is MemorySpace.TMEM:
            raise checks.unsupported(
                "tensor memory (TMEM) comes with the Blackwell plugin, which is not installed",
                hint="pip install 'pallasite[blackwell]'",
            )
        if packed is not None or collective is not None or layout is not None:
            raise checks.value_error(
                f"packed, collective and layout describe tensor memory, not {self.name}",
                hint="use transforms= to say how data lies in shared memory",
            )
        aval = _array_type(shape, dtype)
        if self is MemorySpace.SMEM and 0 in aval.shape:
            raise checks.value_error(
                "an allocation without elements",
                got=f"SMEM({aval.shape}, {aval.dtype})",
                expected="extents of at least 1",
            )
        allocation = GPUMemoryRef(aval, self, tuple(transforms))
        allocation.get_ref_aval()  # Transforms that do not fit are an error here, at this line.
        return allocation

    def like(self, shape_dtype_like: Any) -> Any:
        """An allocation with the shape and dtype of another object."""
        return self(shape_dtype_like.shape, shape_dtype_like.dtype)


#: Plugins enter here how to describe an allocation in a space that the core does not know.
MEMORY_CONSTRUCTORS: dict[MemorySpace, Callable[..., Any]] = {}
#: The same for a union of allocations.
UNION_CONSTRUCTORS: dict[MemorySpace, Callable[..., Any]] = {}

GMEM = MemorySpace.GMEM
SMEM = MemorySpace.SMEM
TMEM = MemorySpace.TMEM
REGS = MemorySpace.REGS


def _array_type(shape: Sequence[int], dtype: Any) -> Any:
    if isinstance(shape, int):
        raise checks.type_error(
            "the shape of an allocation is an integer", got=shape, expected=f"({shape},)"
        )
    sizes = tuple(checks.count(size, f"shape[{i}]") for i, size in enumerate(shape))
    try:
        return _jax.ShapedArray(sizes, dtype)
    except TypeError as error:
        raise checks.type_error(
            "the dtype of an allocation is unknown", got=repr(dtype), expected="jnp.float32, say"
        ) from error


@dataclasses.dataclass(frozen=True)
class GPUMemoryRef(_jax.MemoryRef):  # type: ignore[misc]
    """An allocation: element type, logical shape, memory space and transforms."""

    transforms: Sequence[Any] = ()

    def get_ref_aval(self) -> Any:
        """The reference that the body gets: the physical one, seen with its logical shape."""
        logical = _jax.ShapedArray(self.shape, self.dtype)
        physical = _jax.AbstractRef(
            _jax.transform_type(self.transforms, logical), memory_space=self.memory_space
        )
        views = tuple(_jax.undo_transforms(logical, self.transforms))
        return _jax.TransformedRef(physical, views) if views else physical


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def _placement(leaves: Sequence[Any]) -> tuple[list[int], int]:
    """Byte offsets of the members of one group, and where the group ends."""
    offsets, end = [], 0
    for leaf in leaves:
        bits = element_bits(leaf.dtype, leaf.shape)
        if bits % 8:
            raise checks.value_error(
                "a member of a RefUnion does not fill whole bytes",
                got=f"{leaf.dtype}{list(leaf.shape)} is {bits} bits",
            )
        begin = round_up(end, SMEM_ALIGNMENT)
        offsets.append(begin)
        end = begin + bits // 8
    return offsets, end


def _is_ref(x: Any) -> bool:
    return isinstance(x, _jax.TransformedRef | _jax.AbstractRef)


class AbstractRefUnion(_jax.AbstractRef):  # type: ignore[misc]
    """Type of a reference to a :class:`RefUnion`; iterating over the reference gives its groups."""

    def __init__(self, aval: Any, refs: tuple[Any, ...], memory_space: Any):
        self.refs = refs
        super().__init__(aval, memory_space=memory_space)

    def _iter(self, tracer: Any) -> Iterator[Any]:
        return iter(flatten_ref_union(tracer))

    def _getitem(self, tracer: Any, idx: Any) -> Any:
        if not isinstance(idx, int):
            raise checks.type_error(
                "a RefUnion is indexed by the number of the member",
                got=idx,
                expected="a Python integer",
            )
        groups = flatten_ref_union(tracer)
        if not -len(groups) <= idx < len(groups):
            raise checks.value_error(
                f"a RefUnion of {len(groups)} members has no member {idx}",
                expected=f"an index from 0 to {len(groups) - 1}",
            )
        return groups[idx]

    def _setitem(self, tracer: Any, idx: Any, value: Any) -> None:
        del tracer, idx, value
        raise checks.value_error(
            "a RefUnion can't be assigned to as a whole", hint="write one of its members"
        )

    def update(self, inner_aval: Any = None, memory_space: Any = None, kind: Any = None) -> Any:
        """The same union with another array type."""
        ref = super().update(inner_aval, memory_space, kind)
        return type(self)(ref.inner_aval, self.refs, ref.memory_space)

    def _key(self) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(self.refs, is_leaf=_is_ref)
        members = tuple(
            (leaf.ref, leaf.transforms) if isinstance(leaf, _jax.TransformedRef) else (leaf, ())
            for leaf in leaves
        )
        return (self.inner_aval, self.memory_space, members, tree)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, AbstractRefUnion)
            and type(self) is type(other)
            and self._key() == other._key()
        )

    def __hash__(self) -> int:
        return hash(self._key())


def union_members(aval: AbstractRefUnion) -> list[tuple[int, tuple[int, ...], Any]]:
    """Where each member of a union begins (in bytes), its physical shape and its dtype."""
    found = []
    for group in aval.refs:
        leaves = jax.tree.leaves(group, is_leaf=_is_ref)
        physical = [leaf.ref if isinstance(leaf, _jax.TransformedRef) else leaf for leaf in leaves]
        offsets, _ = _placement(physical)
        for inner, offset in zip(physical, offsets, strict=True):
            found.append((offset, tuple(inner.shape), _jax.dtype_of(inner.dtype)))
    return found


def flatten_ref_union(ref_union: Any) -> tuple[Any, ...]:
    """The groups of a union reference: each a tree of references into the union."""
    base = as_transformed(ref_union, "ref_union")
    aval = _jax.typeof(base.ref)
    if not isinstance(aval, AbstractRefUnion):
        raise checks.type_error("not a reference to a RefUnion", got=aval)
    groups = []
    for number, group in enumerate(aval.refs):
        leaves, tree = jax.tree.flatten(group, is_leaf=_is_ref)
        physical = [leaf.ref if isinstance(leaf, _jax.TransformedRef) else leaf for leaf in leaves]
        offsets, _ = _placement(physical)
        members = []
        for leaf, inner, offset in zip(leaves, physical, offsets, strict=True):
            views = leaf.transforms if isinstance(leaf, _jax.TransformedRef) else ()
            member = ExtractAliasedRef(
                _jax.dtype_of(inner.dtype), tuple(inner.shape), offset, number
            )
            members.append(_jax.TransformedRef(base.ref, (*base.transforms, member, *views)))
        groups.append(tree.unflatten(members))
    return tuple(groups)


@dataclasses.dataclass(init=False, frozen=True)
class RefUnion(GPUMemoryRef):
    """Groups of allocations that share the same memory.

    ``RefUnion(a, (b, c))`` is as large as the larger of ``a`` and ``b`` plus ``c``; the body
    unpacks the reference the same way: ``a_ref, (b_ref, c_ref) = union_ref``. Groups must not
    be live at the same time: data are read through the member that wrote them. Every member begins
    at a multiple of 1024 bytes. Raises InvalidValueError unless all members are in shared memory.
    """

    refs: tuple[Any, ...] = ()

    def __new__(cls, *refs: Any) -> Any:
        for number, group in enumerate(refs):
            leaves = jax.tree.leaves(group)
            if not leaves or not all(hasattr(leaf, "memory_space") for leaf in leaves):
                raise checks.type_error(
                    f"member {number} of a RefUnion is not memory",
                    got=repr(group),
                    expected="an allocation such as SMEM(shape, dtype), or a tuple of them",
                )
        spaces = {leaf.memory_space for leaf in jax.tree.leaves(refs)}
        if len(spaces) == 1 and (constructor := UNION_CONSTRUCTORS.get(*spaces)):
            return constructor(*refs)
        if spaces != {SMEM}:
            raise checks.value_error(
                "the members of a RefUnion must all be in shared memory",
                got=", ".join(sorted(str(space) for space in spaces)) or "no members",
                expected="allocations described by SMEM(shape, dtype)",
            )
        return super().__new__(cls)

    def __init__(self, *refs: Any):
        size = max(_placement(jax.tree.leaves(group))[1] for group in refs)
        object.__setattr__(self, "refs", refs)
        super().__init__(_jax.ShapedArray((size,), jnp.int8), SMEM, ())

    def get_ref_aval(self) -> Any:
        """The type of the reference that the body gets."""
        members = jax.tree.map(lambda ref: ref.get_ref_aval(), self.refs)
        aval = _jax.ShapedArray(self.shape, self.dtype)
        return AbstractRefUnion(aval, members, memory_space=self.memory_space)


class SemaphoreType(enum.Enum):
    """Kinds of semaphores: 32-bit counters in global memory, initially zero."""

    REGULAR = "regular"
    BARRIER = "barrier"

    def __call__(self, shape: tuple[int, ...]) -> Any:
        """An allocation of semaphores of the given shape."""
        kind = _jax.BarrierSemaphore if self is SemaphoreType.BARRIER else _jax.Semaphore
        return _jax.MemoryRef(_jax.ShapedArray(tuple(shape), kind()), GMEM)

    def get_array_aval(self) -> Any:
        """The array type of one semaphore."""
        return self(()).get_array_aval()

    def get_ref_aval(self) -> Any:
        """The reference type of one semaphore."""
        return self(()).get_ref_aval()


def memory_space_of(aval: Any) -> MemorySpace | Any:
    """The memory space of a reference; one that names none is in global memory."""
    space = getattr(aval, "memory_space", None)
    if space is None or isinstance(space, _jax.PallasMemorySpace | _jax.DeviceMemorySpace):
        return GMEM
    return space
