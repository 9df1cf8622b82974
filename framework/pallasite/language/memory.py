"""Memory spaces, allocations in them, unions of allocations, and semaphores."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallasite import _jax
from pallasite.language import checks
from pallasite.language.memory_space import MemorySpace as MemorySpace
from pallasite.language.transforms import ExtractAliasedRef, as_transformed, element_bits
from pallasite.resource import SHARED_MEMORY

if TYPE_CHECKING:
    from pallasite.lowering.arrays import RegisterArray
    from pallasite.lowering.context import RuleContext
    from pallasite.lowering.inference.context import InferenceContext
    from pallasite.lowering.inference.values import AbstractValue
    from pallasite.lowering.resources import EstimatorContext, Resources

#: Every allocation in shared memory begins at a multiple of this many bytes, which satisfies TMA
#: (128) and the widest swizzle (1024).
SMEM_ALIGNMENT = 1024


class _WithAddresses(MemorySpace):
    def update(
        self,
        ctx: RuleContext,
        reference: Any,
        transforms: Sequence[Any],
        value: RegisterArray,
        combine: Callable[[Any, Any], Any],
    ) -> None:
        """See :meth:`MemorySpace.update`; the view is resolved only once."""
        ctx.update(reference, transforms, value, combine)


class GlobalMemory(_WithAddresses):
    """Global memory: the operands and results of the kernel."""

    name = "GMEM"
    is_global = True


class SharedMemory(_WithAddresses):
    """Shared memory of a block. A plugin's subclass is a part of it with rules of its own."""

    name = "SMEM"
    is_shared = True
    copied_to = True

    def describe(self, shape: Sequence[int], dtype: Any, *, transforms: Sequence[Any] = ()) -> Any:
        """See :meth:`MemorySpace.describe`; an extent of 0 is an InvalidValueError."""
        aval = array_type(shape, dtype)
        if 0 in aval.shape:
            raise checks.value_error(
                "an allocation without elements",
                got=f"{self.name}({aval.shape}, {aval.dtype})",
                expected="extents of at least 1",
            )
        return super().describe(shape, dtype, transforms=transforms)

    def union_placement(self, members: Sequence[Any]) -> tuple[list[int], int]:
        """Byte offsets of the members of one group, and where the group ends."""
        offsets, end = [], 0
        for leaf in members:
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

    def resources(self, ctx: EstimatorContext, variable: Any, axes: tuple[Any, ...]) -> Resources:
        """Its bytes, rounded up."""
        del axes
        aval = variable.aval
        size = -(-element_bits(aval.dtype, aval.shape) // 8)
        what = f"{aval.dtype}{list(aval.shape)}"
        return ctx.reserve(SHARED_MEMORY, round_up(size, SMEM_ALIGNMENT), what, size=size)

    def allocate(
        self, ctx: RuleContext, variable: Any, axes: tuple[Any, ...]
    ) -> AbstractContextManager[Any]:
        """On the stack of shared memory, in the layout that inference has chosen."""
        del axes
        return ctx.shared_array(variable)

    def infer_allocation(self, ctx: InferenceContext, variable: Any, name: str) -> AbstractValue:
        """An allocation whose layout is open."""
        return ctx.shared_allocation(variable, name)


class Registers(MemorySpace):
    """Registers, of which nothing can be allocated as such."""

    name = "REGS"

    def resources(self, ctx: EstimatorContext, variable: Any, axes: tuple[Any, ...]) -> Resources:
        """None: registers are not counted."""
        del variable, axes
        return ctx.nothing()


GMEM = GlobalMemory()
"""Global memory: the operands and results of the kernel."""

SMEM = SharedMemory()
"""Shared memory of a block."""

REGS = Registers()
"""Registers, of which nothing can be allocated as such."""

MemorySpace.GMEM, MemorySpace.SMEM, MemorySpace.REGS = GMEM, SMEM, REGS


def array_type(shape: Sequence[int], dtype: Any) -> Any:
    """The array type of an allocation; a wrong shape or dtype is an error at the user's line."""
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


def _is_ref(x: Any) -> bool:
    return isinstance(x, _jax.TransformedRef | _jax.AbstractRef)


def _physical(ref: Any) -> Any:
    return ref.ref if isinstance(ref, _jax.TransformedRef) else ref


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
    """Where each member of a union begins (in bytes in shared memory), its physical shape and its
    dtype."""
    found = []
    for group in aval.refs:
        leaves = jax.tree.leaves(group, is_leaf=_is_ref)
        physical = [_physical(leaf) for leaf in leaves]
        offsets, _ = aval.memory_space.union_placement(physical)
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
        physical = [_physical(leaf) for leaf in leaves]
        offsets, _ = aval.memory_space.union_placement(physical)
        members = []
        for leaf, inner, offset in zip(leaves, physical, offsets, strict=True):
            views = leaf.transforms if isinstance(leaf, _jax.TransformedRef) else ()
            member = ExtractAliasedRef(
                _jax.dtype_of(inner.dtype),
                tuple(inner.shape),
                offset,
                number,
                aval.memory_space.member_layout(inner),
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
    at a multiple of 1024 bytes. Raises InvalidValueError unless all members are in shared memory,
    or in a space of a plugin that has unions.
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
        if len(spaces) != 1 or not isinstance(next(iter(spaces)), MemorySpace):
            raise checks.value_error(
                "the members of a RefUnion must all be in shared memory",
                got=", ".join(sorted(str(space) for space in spaces)) or "no members",
                expected="allocations described by SMEM(shape, dtype)",
            )
        return super().__new__(cls)

    def __init__(self, *refs: Any):
        space = jax.tree.leaves(refs)[0].memory_space
        groups = [[_physical(leaf.get_ref_aval()) for leaf in jax.tree.leaves(g)] for g in refs]
        size = max(space.union_placement(group)[1] for group in groups)
        object.__setattr__(self, "refs", refs)
        super().__init__(_jax.ShapedArray((size,), jnp.int8), space, ())

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
