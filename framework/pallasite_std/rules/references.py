"""Reading and writing references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin import InvalidTypeError, RuleSet, Semantics, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.lowering import (
    LayoutContext,
    RegisterArray,
    RuleContext,
    Value,
)
from pallasite_std.memory.array_indices import OWN_INDICES, read_at, split_transforms, write_at
from pallasite_std.spaces import note_space

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)


def _space(ctx: RuleContext, reference: Value) -> MemorySpace:
    """The memory space of a reference that is read or written.

    Raises:
      InvalidTypeError: it is none.
    """
    space = getattr(reference, "space", None)
    if not isinstance(space, MemorySpace):
        raise InvalidTypeError(
            f"primitive {ctx.primitive} cannot access this reference",
            got=type(reference).__name__,
            expected="a reference to global or shared memory",
        )
    note_space(ctx, space)
    return space


@rules.lowering(_jax.get_p, *_ALL)
def _get(ctx: RuleContext, reference: Value, *leaves: Value, tree: Any, **params: Any) -> Value:
    space, transforms = _space(ctx, reference), jax.tree.unflatten(tree, leaves)
    arrays = split_transforms(transforms)
    if arrays is not None:
        return read_at(ctx, reference, *arrays)
    return space.read(ctx, reference, transforms)


@rules.lowering(_jax.swap_p, *_ALL)
def _swap(
    ctx: RuleContext,
    reference: Value,
    value: RegisterArray,
    *leaves: Value,
    tree: Any,
    **params: Any,
) -> Value:
    space, transforms = _space(ctx, reference), jax.tree.unflatten(tree, leaves)
    arrays = split_transforms(transforms)
    if arrays is None:
        return space.write(ctx, reference, transforms, value)
    old = read_at(ctx, reference, *arrays) if any(ctx.used) else value
    write_at(ctx, reference, *arrays, value)
    return old


@rules.layout(_jax.get_p)
def _get_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[Any]:
    # Lanes that hold the indices of their own elements need no others'.
    shape = ctx.avals_out[0].shape
    whole = math.prod(shape) >= OWN_INDICES
    indices = [whole and getattr(one, "shape", None) == shape for one in ctx.avals_in[1:]]
    return [None, *(wanted[0] if index else None for index in indices)]


@rules.layout(_jax.swap_p)
def _swap_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


_get_layout.accesses_memory = lambda operands, results: results[0]  # type: ignore[attr-defined]
_swap_layout.accesses_memory = lambda operands, results: operands[1]  # type: ignore[attr-defined]


@rules.lowering(_jax.addupdate_p, *_ALL)
def _addupdate(
    ctx: RuleContext,
    reference: Value,
    value: RegisterArray,
    *leaves: Value,
    tree: Any,
    **params: Any,
) -> Sequence[Value]:
    from pallasite_std.rules.arithmetic import binary

    def add(old: RegisterArray, new: RegisterArray) -> RegisterArray:
        return binary(ctx, "add", old, new, old.dtype)

    transforms = jax.tree.unflatten(tree, leaves)
    arrays = split_transforms(transforms)
    if arrays is not None:
        write_at(ctx, reference, *arrays, value, lambda memory: _atomic_add(ctx, memory))
        return ()
    _space(ctx, reference).update(ctx, reference, transforms, value, add)
    return ()


def _atomic_add(ctx: RuleContext, memory: Any) -> Any:
    from pallasite_std.rules.atomics import atomic_update

    update = atomic_update(ctx, memory, "add")
    if update is None:
        raise UnsupportedError(
            f"elements of {memory.dtype} at indices of an array are added to, of which several can"
            " be equal",
            expected="a dtype with atomic additions, such as float32 or int32",
        )
    return update


def check_dtype(value: RegisterArray, dtype: Any, what: str) -> None:
    """Raises unless ``value`` has the dtype."""
    if value.dtype != np.dtype(dtype):
        raise InvalidTypeError(what, got=str(value.dtype), expected=str(dtype))


__all__ = ["check_dtype", "rules"]
