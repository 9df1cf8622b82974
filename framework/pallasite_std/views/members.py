"""Members of a ``RefUnion``, which share memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from pallasite.plugin import ViewRule
from pallasite.plugin.inference import MemoryValue
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import transforms as tr
from pallasite.plugin.layouts import row_major
from pallasite.plugin.lowering import RuleContext
from pallasite_std.memory.contents import Part
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.regions import RegionBuilder


def _key(member: Any) -> tuple[int, str, tuple[int, ...]]:
    return (member.offset, str(np.dtype(member.dtype)), tuple(member.shape))


def _lower(ctx: RuleContext, reference: MemoryReference, member: Any) -> MemoryReference:
    del ctx
    pointer = ops.byte_pointer(reference.pointer, member.offset + reference.offset)
    dtype = np.dtype(member.dtype)
    chosen = (reference.members or {}).get(_key(member))
    bits = types.bit_width(dtype)
    size = -(-math.prod(member.shape) * bits // 8)
    part = Part(f"{dtype}{list(member.shape)}", member.offset, size, is_member=True)
    return dataclasses.replace(
        reference,
        pointer=pointer,
        part=part,
        offset=0,
        layout=chosen or row_major(member.shape, bits),
        members=None,
        dtype=dtype,
        window=None,
    )


def _member(root: MemoryValue, member: Any) -> MemoryValue:
    choice = (root.members or {}).get(_key(member))
    dtype = np.dtype(member.dtype)
    return MemoryValue(root.space, tuple(member.shape), dtype, choice, name=root.name)


def _region(builder: RegionBuilder, member: Any) -> None:
    builder.member = member


RULES = (ViewRule(transform=tr.ExtractAliasedRef, lower=_lower, region=_region, member=_member),)
