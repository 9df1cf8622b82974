"""The check of what shared memory holds: output blocks of pipelines that are not written, and
members of unions that are read after another member was written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import InvalidValueError, SourceLocation
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import types
from pallasite.plugin.language import MemorySpace, memory_space_of
from pallasite_std.checks import values as v
from pallasite_std.checks.accesses import Use
from pallasite_std.primitives import copies


def check_contents(uses: Sequence[Use], opaque: set[Any], threads: int) -> None:
    """Raises if a kernel certainly reads what shared memory should not hold any more.

    Args:
      uses: of references, by all threads, each in the order of its equations.
      opaque: references that something unknown is done to.
      threads: how many threads a block has.

    Raises:
      InvalidValueError: at the line of the copy or of the access.
    """
    by_variable: dict[Any, list[Use]] = {}
    for use in uses:
        space = memory_space_of(use.memory.aval)
        if use.memory.variable not in opaque and isinstance(space, MemorySpace) and space.is_shared:
            by_variable.setdefault(use.memory.variable, []).append(use)
    for found in by_variable.values():
        if any(use.member is not None for use in found):
            _check_union(found, threads)
        elif any(_discards(use) for use in found):
            _check_slots(found, uses)


def _discards(use: Use) -> bool:
    equation = use.equation
    return equation.primitive is copies.copy_smem_to_gmem_p and bool(equation.params["discard"])


# Output blocks ------------------------------------------------------------------------------------


def _check_slots(uses: Sequence[Use], everything: Sequence[Use]) -> None:
    """Checks an array whose contents are not used after they were copied to global memory: there
    has to be a write before each copy."""
    writes = [use for use in uses if use.writes]
    for copy in uses:
        if not (_discards(copy) and copy.certain):
            continue
        if not writes:
            raise _not_written(copy, "no step writes it")
        for symbol in _symbols_of_target(copy, everything):
            if symbol in copy.narrowed:
                continue
            missing = _first_missing(writes, symbol)
            if missing is not None:
                text = f"it is not written where {symbol.name} = {missing}"
                raise _not_written(copy, text)


def _symbols_of_target(copy: Use, everything: Sequence[Use]) -> list[v.Symbol]:
    """The counters and positions that the place in global memory depends on."""
    found: dict[v.Symbol, None] = {}
    for use in everything:
        if use.equation is copy.equation and use.memory is not copy.memory:
            for span in (span for spans in use.indexers for span in spans):
                if isinstance(span.start, v.Form):
                    found.update((symbol, None) for symbol, _ in span.start.terms)
    return list(found)


def _first_missing(writes: Sequence[Use], symbol: v.Symbol) -> int | None:
    """The least value of a symbol with which nothing is written."""
    ranges = sorted(use.narrowed.get(symbol, (0, symbol.extent - 1)) for use in writes)
    at = 0
    for low, high in ranges:
        if low > at:
            break
        at = max(at, high + 1)
    return at if at < symbol.extent else None


def _not_written(copy: Use, got: str) -> InvalidValueError:
    # Pipelines make their copies themselves: the line is that which calls them.
    location: SourceLocation | None = copy.location
    if location is None and copy.memory.scope is not None:
        location = _jax.user_location(copy.memory.scope.source_info)
    return InvalidValueError(
        "an output block of a pipeline is copied to global memory without having been written:"
        " what an earlier step left is copied",
        got=got,
        expected="a write of the whole block in each step with another block index",
        location=location,
    )


# Unions -------------------------------------------------------------------------------------------


def _check_union(uses: Sequence[Use], threads: int) -> None:
    if any(use.member is None for use in uses):
        return  # Something is done to all of it.
    for position, read in enumerate(uses):
        if not read.reads or read.writes or not read.certain or read.narrowed:
            continue
        others = [
            use
            for use in uses
            if use.writes and use.certain and not use.narrowed and _meets(use, read)
        ]
        own = [n for n, use in enumerate(uses) if use.writes and _key(use) == _key(read)]
        if not others:
            continue
        if not own:
            raise _written_as(read, others[0])
        if threads > 1:
            continue  # Others may write the member in between.
        latest = max((n for n in own if n < position), default=-1)
        between = [use for use in uses[latest + 1 : position] if any(use is one for one in others)]
        if between:
            raise _written_as(read, between[-1])


def _written_as(read: Use, write: Use) -> InvalidValueError:
    return InvalidValueError(
        "a member of a RefUnion is read after another one was written",
        got=f"read as {_name(read)}, written as {_name(write)} at {write.location}",
        expected="data to be read through the member that wrote them",
        location=read.location,
    )


def _name(use: Use) -> str:
    return f"{use.member.dtype}{list(use.member.shape)}"


def _key(use: Use) -> Any:
    return use.member.offset, str(use.member.dtype), tuple(use.member.shape)


def _range(use: Use) -> tuple[int, int]:
    member = use.member
    size = -(-math.prod(member.shape) * types.bit_width(member.dtype) // 8)
    return member.offset, member.offset + size


def _meets(write: Use, read: Use) -> bool:
    """Whether a write of another member certainly changes some of what is read."""
    if _key(write) == _key(read):
        return False
    (first, end), (start, stop) = _range(write), _range(read)
    if end <= start or stop <= first:
        return False
    whole_write, whole_read = _is_whole(write), _is_whole(read)
    if whole_write and whole_read:
        return True
    return (whole_write and first <= start and stop <= end) or (
        whole_read and start <= first and end <= stop
    )


def _is_whole(use: Use) -> bool:
    spans = (span for spans in use.indexers for span in spans)
    return all(span.start == 0 and span.size == span.extent for span in spans)
