"""Copies from shared to tensor memory, which the tensor core makes: the primitives and their rules.

Bound arguments of all three: (source, destination). They are ordered before products that the same
thread starts later; for others, ``tcgen05_commit_arrive`` says when they are complete (PTX ISA,
``tcgen05.cp``).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError, RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.language import SMEM, checks
from pallasite.plugin.lowering import RuleContext, Value, resolve
from pallasite_blackwell.tensor_core.descriptors import (
    CHUNK,
    encoded,
    start_descriptor,
)
from pallasite_blackwell.tensor_core.pairs import issuer
from pallasite_blackwell.tensor_core.types import operand_bits
from pallasite_blackwell.tensor_memory import layouts
from pallasite_blackwell.tensor_memory.layouts import CELL_BITS, ROWS
from pallasite_blackwell.tensor_memory.primitives import tensor_memory
from pallasite_blackwell.tensor_memory.references import (
    TensorMemoryReference,
    one_matrix,
    resolve_tensor_memory,
)
from pallasite_std.api import MemoryReference, arguments, places_of

rules = RuleSet()

_ALL = (Semantics.LANE, Semantics.WARP)
_FEATURE = ("tcgen05",)
_SCALES = ("float8_e8m0fnu", "float8_e4m3fn")
_CORE = 8 * CHUNK
"""Bytes of 8 rows of 16 bytes."""


def _primitive(name: str) -> Any:
    primitive = _jax.Primitive(name)
    primitive.multiple_results = True

    @_jax.abstract_eval(primitive)
    def _(*avals: Any, args_tree: Any, collective_axis: Any) -> Any:
        del collective_axis
        return (), arguments.reference_effects(args_tree, len(avals), read=(0,), written=(1,))

    arguments.no_discharge(primitive)
    arguments.pretty(primitive, lambda args, _: [args[0], "->", args[1]])
    return primitive


async_copy_scales_to_tmem_p = _primitive("async_copy_scales_to_tmem")
async_copy_sparse_metadata_to_tmem_p = _primitive("async_copy_sparse_metadata_to_tmem")
async_copy_smem_to_tmem_p = _primitive("async_copy_smem_to_tmem")

PRIMITIVES = (
    async_copy_scales_to_tmem_p,
    async_copy_sparse_metadata_to_tmem_p,
    async_copy_smem_to_tmem_p,
)


def _bind(primitive: Any, source: Any, target: Any, axis: Hashable | None) -> None:
    source = arguments.reference(source, "smem_ref", SMEM)
    target = tensor_memory(target, "tmem_ref")
    arguments.same_dtype(source, "smem_ref", target, "tmem_ref")
    if axis is not None and not _jax.axis_exists(axis):
        raise checks.value_error(
            f"there is no axis named {axis!r}", expected="the minormost axis of the cluster"
        )
    arguments.bind(primitive, source, target, collective_axis=axis)


def async_copy_scales_to_tmem(
    smem_ref: Any, tmem_ref: Any, collective_axis: Hashable | None = None
) -> None:
    """Copies block scales from shared to tensor memory.

    Args:
      smem_ref: (rows / 128, scales / 4, 32, 16) 8-bit scales, contiguous: the scale s of row r is
        at ``[r // 128, s // 4, r % 32, r % 128 // 32 * 4 + s % 4]``. For
        ``TMEMLayout.SCALES_M64_COLLECTIVE_LAYOUT``, (1, scales / 4, 64, 16), the rows of the first
        block of the pair in the first 32.
      tmem_ref: (rows, scales), rows a multiple of 128 and scales one of 4, with
        ``TMEMLayout.SCALES_LAYOUT`` or ``TMEMLayout.SCALES_M64_COLLECTIVE_LAYOUT``.
      collective_axis: for a pair of blocks, the axis of the cluster: each copies its own.

    Raises:
      InvalidTypeError, InvalidValueError: other memory, shapes, dtypes or layouts.

    PTX ISA: ``tcgen05.cp.32x128b.warpx4``, ``tcgen05.cp.64x128b.warpx2::01_23``.
    """
    _bind(async_copy_scales_to_tmem_p, smem_ref, tmem_ref, collective_axis)


def async_copy_sparse_metadata_to_tmem(
    smem_ref: Any, tmem_ref: Any, collective_axis: Hashable | None = None
) -> None:
    """Copies the metadata of a sparse operand from shared to tensor memory.

    Args:
      smem_ref: (rows / 128, n / 64, 128, 64) 2-bit integers, contiguous, as
        :func:`format_tcgen05_sparse_metadata` makes them.
      tmem_ref: (rows, n) with ``TMEMLayout.SPARSE_METADATA_LAYOUT``.
      collective_axis: for a pair of blocks, the axis of the cluster: each copies its own.

    Raises:
      InvalidTypeError, InvalidValueError: other memory, shapes, dtypes or layouts.

    PTX ISA: ``tcgen05.cp.128x128b``.
    """
    _bind(async_copy_sparse_metadata_to_tmem_p, smem_ref, tmem_ref, collective_axis)


def async_copy_smem_to_tmem(
    smem_ref: Any, tmem_ref: Any, collective_axis: Hashable | None = None
) -> None:
    """Copies a matrix from shared to tensor memory.

    Args:
      smem_ref: (rows, columns) in tiles of 8 rows, as wide as their swizzle, or of 16 bytes without
        one.
      tmem_ref: the same shape and dtype, rows a multiple of 128, packed.
      collective_axis: for a pair of blocks, the axis of the cluster: each copies its own.

    Raises:
      InvalidTypeError, InvalidValueError: other memory, shapes, dtypes or layouts.

    PTX ISA: ``tcgen05.cp.128x256b``, ``tcgen05.cp.128x128b``.
    """
    arguments.same_shape(smem_ref, "smem_ref", tmem_ref, "tmem_ref")
    _bind(async_copy_smem_to_tmem_p, smem_ref, tmem_ref, collective_axis)


# Lowering -----------------------------------------------------------------------------------------


def _operands(
    ctx: RuleContext, operands: Sequence[Value], args_tree: Any
) -> tuple[MemoryReference, TensorMemoryReference]:
    source, target = args_tree.unflatten(operands)
    memory: MemoryReference = resolve(ctx, source, other_blocks=True)
    matrix = one_matrix(resolve_tensor_memory(ctx, target, "tmem_ref"), "tmem_ref")
    return memory, matrix


def _issue(
    ctx: RuleContext,
    shape: str,
    copies: Sequence[tuple[int, int]],
    memory: MemoryReference,
    target: TensorMemoryReference,
    constant: int,
    axis: Hashable | None,
) -> None:
    """Copies of (byte offset in shared memory, column of tensor memory), by one lane."""
    name = f"tcgen05.cp.cta_group::{1 if axis is None else 2}.{shape}"
    # What does not change in a loop is computed outside of it, if it is not under a condition.
    start = start_descriptor(memory, constant, "smem_ref")
    with ops.when(issuer(ctx, axis)):
        for offset, column in copies:
            descriptor = start
            if offset:
                descriptor = ops.arith.addi(start, ops.i64_constant(offset // CHUNK))
            ops.inline_assembly(
                f"{name} [$0], $1;", "r,l,~{memory}", target.address(column), descriptor
            )


def _tiles(memory: MemoryReference, shape: tuple[int, ...], what: str) -> np.ndarray[Any, Any]:
    """Byte offsets of the tiles (the last two dimensions) of an array of a given shape.

    Raises:
      InvalidValueError: another shape, or tiles that are not contiguous.
    """
    if memory.layout.shape != shape:
        raise InvalidValueError(
            f"smem_ref has another shape than {what} of tmem_ref",
            got=list(memory.layout.shape),
            expected=str(list(shape)),
        )
    places = places_of(memory.layout) * memory.element_bits // 8
    rows, columns = shape[-2:]
    one = (places[0, 0] - places[0, 0, 0, 0]).reshape(-1)
    expected = np.arange(rows * columns) * memory.element_bits // 8
    starts = places[:, :, 0, 0]
    dense = (one == expected).all() and memory.layout.swizzle == CHUNK
    if not dense or (starts % CHUNK).any() or memory.offset_alignment % CHUNK:
        raise InvalidValueError(
            f"{what} are not contiguous in smem_ref",
            got=f"laid out as {memory.layout}",
            expected="an allocation without transforms",
        )
    return starts


@rules.lowering(async_copy_scales_to_tmem_p, *_ALL, requires=_FEATURE)
def _copy_scales(
    ctx: RuleContext, *operands: Value, args_tree: Any, collective_axis: Hashable | None
) -> Sequence[Value]:
    memory, target = _operands(ctx, operands, args_tree)
    if np.dtype(target.dtype).name not in _SCALES:
        raise InvalidValueError(f"scales of {target.dtype}", expected=" or ".join(_SCALES))
    rows, count = target.matrix
    if target.layout == layouts.SCALES_M64_COLLECTIVE:
        tiles = _tiles(memory, (1, count // 4, 64, 16), "the scales")
        shape, step = "64x128b.warpx2::01_23", 4
    elif target.layout == layouts.SCALES:
        tiles = _tiles(memory, (rows // ROWS, count // 4, 32, 16), "the scales")
        shape, step = "32x128b.warpx4", rows // ROWS * 4
    else:
        raise InvalidValueError(
            "scales lie in tensor memory in another way",
            got=str(target.layout),
            expected=f"{layouts.SCALES} or {layouts.SCALES_M64_COLLECTIVE}",
        )
    copies = [
        (int(tiles[block, quad]), step * quad + 4 * block)
        for block, quad in np.ndindex(tiles.shape)
    ]
    _issue(ctx, shape, copies, memory, target, encoded(0, _CORE, CHUNK), collective_axis)
    return ()


@rules.lowering(async_copy_sparse_metadata_to_tmem_p, *_ALL, requires=_FEATURE)
def _copy_metadata(
    ctx: RuleContext, *operands: Value, args_tree: Any, collective_axis: Hashable | None
) -> Sequence[Value]:
    memory, target = _operands(ctx, operands, args_tree)
    rows, count = target.matrix
    if target.layout != layouts.SPARSE_METADATA or memory.element_bits != 2:
        raise InvalidValueError(
            "tmem_ref is no metadata of a sparse operand",
            got=f"{target.dtype} in {target.layout}",
            expected=f"uint2 in {layouts.SPARSE_METADATA}",
        )
    if count % 64:
        raise InvalidValueError(
            "metadata is copied by whole tiles",
            got=f"shape {target.matrix}",
            expected="columns in multiples of 64",
        )
    tiles = _tiles(memory, (rows // ROWS, count // 64, 128, 64), "the tiles of metadata")
    width = count // 16
    copies = [
        (int(tiles[block, tile]), block * width + 4 * tile)
        for block, tile in np.ndindex(tiles.shape)
    ]
    _issue(ctx, "128x128b", copies, memory, target, encoded(0, _CORE, CHUNK), collective_axis)
    return ()


@rules.lowering(async_copy_smem_to_tmem_p, *_ALL, requires=_FEATURE)
def _copy_matrix(
    ctx: RuleContext, *operands: Value, args_tree: Any, collective_axis: Hashable | None
) -> Sequence[Value]:
    memory, target = _operands(ctx, operands, args_tree)
    bits = operand_bits(target.dtype)
    expected = layouts.default(CELL_BITS // bits)
    if target.layout != expected:
        raise InvalidValueError(
            "tmem_ref lies in tensor memory in another way than copies leave it",
            got=str(target.layout),
            expected=str(expected),
            hint="plgpu.TMEM(shape, dtype, packed=True)",
        )
    size, constant, copies = plan_matrix_copy(memory.layout, bits)
    swizzle = memory.layout.swizzle
    if memory.offset_alignment % (CHUNK if swizzle == CHUNK else 8 * swizzle):
        raise InvalidValueError(
            "smem_ref starts inside of a block of the tensor core",
            got=f"laid out as {memory.layout}",
            expected="rows from a multiple of 8, and columns from one of the swizzle",
        )
    shape = "128x256b" if size == 32 else "128x128b"
    _issue(ctx, shape, copies, memory, target, constant, collective_axis)
    return ()


def plan_matrix_copy(layout: Any, bits: int) -> tuple[int, int, list[tuple[int, int]]]:
    """How a matrix is copied: bytes of a row that one instruction moves, the descriptor, and for
    each instruction the byte offset in shared memory and the column of tensor memory.

    Raises:
      InvalidValueError: it does not lie in tiles that the tensor core reads.
    """
    swizzle = layout.swizzle
    size = CHUNK if swizzle == CHUNK else 32
    run = swizzle * 8 // bits
    rows, columns = layout.shape
    places = places_of(layout)
    row = np.arange(ROWS)
    part = size * 8 // bits
    copies, strides = [], set()
    width = columns * bits // CELL_BITS
    if rows % ROWS == 0 and columns % part == 0:
        for block in range(0, rows, ROWS):
            for column in range(0, columns, part):
                tile = places[block : block + ROWS, column : column + part]
                tile = tile - tile[0, 0]
                stride = int(tile[8, 0])
                strides.add(stride)
                expected = (row % 8 * run + row // 8 * stride)[:, None] + np.arange(part)
                if (tile != expected).any():
                    strides.add(-1)
                offset = int(places[block, column]) * bits // 8
                copies.append((offset, block // ROWS * width + column * bits // CELL_BITS))
    if len(strides) != 1 or -1 in strides:
        raise InvalidValueError(
            "smem_ref does not lie in tiles that the tensor core copies",
            got=f"{layout.shape} laid out as {layout}",
            expected="multiples of 128 rows, in tiles of 8 rows as wide as the swizzle, or of 16"
            " bytes without swizzle",
            hint=f"plgpu.SMEM(..., transforms=(plgpu.TilingTransform((8, {128 * 8 // bits})),"
            " plgpu.SwizzleTransform(128)))",
        )
    return size, encoded(CHUNK, strides.pop() * bits // 8, swizzle), copies


# Metadata -----------------------------------------------------------------------------------------


def format_tcgen05_sparse_metadata(meta: Any, operand_dtype: Any) -> Any:
    """The metadata of a sparse operand in the order of the tensor core.

    It can be copied to shared memory, and from there by :func:`async_copy_sparse_metadata_to_tmem`.

    Args:
      meta: (m, k / 4, 2) uint2: for each group of four elements along k the positions of the two
        that there are, in ascending order; m a multiple of 128, k of 128. For float4_e2m1fn,
        (m, k / 8, 2), k a multiple of 256: for each eight elements the positions of the two
        pairs of neighbours.
      operand_dtype: of the operand, of 16, 8 or 4 bits.

    Returns:
      (m / 128, n / 64, 128, 64) uint2 with n numbers for each row.

    Raises:
      InvalidTypeError, InvalidValueError: another shape or dtype.

    PTX ISA, "Sparse matrices" of ``tcgen05.mma``.
    """
    import jax.numpy as jnp

    try:
        meta = jnp.asarray(meta)
    except TypeError:
        raise checks.type_error(
            "metadata is no array", got=repr(meta), expected="an array of uint2"
        ) from None
    if np.dtype(meta.dtype).name != "uint2":
        raise checks.type_error(
            "metadata is of another dtype",
            got=meta.dtype,
            expected="uint2",
            hint="meta.astype(jnp.uint2)",
        )
    try:
        bits = operand_bits(operand_dtype)
    except TypeError:
        bits = None
    if bits not in (4, 8, 16):
        raise checks.type_error(
            "sparse operands of this dtype", got=repr(operand_dtype), expected="4, 8 or 16 bits"
        )
    if meta.ndim != 3 or meta.shape[2] != 2:
        raise checks.value_error(
            "metadata is of another shape",
            got=tuple(meta.shape),
            expected=f"(m, k / {8 if bits == 4 else 4}, 2)",
        )
    rows, count = meta.shape[0], math.prod(meta.shape[1:])
    if rows % ROWS or count % 64:
        raise checks.value_error(
            "metadata does not fill tiles",
            got=tuple(meta.shape),
            expected=f"m a multiple of {ROWS}, and 64 numbers for each row or a multiple",
        )
    if bits == 16:
        # Rows r and r + 8 share a lane, and so 16 elements along k each.
        split = meta.reshape(rows // ROWS, 8, 2, 8, count // 64, 4, 2, 8)
        ordered = split.transpose(0, 4, 1, 6, 3, 5, 2, 7)
    else:
        ordered = meta.reshape(rows // ROWS, ROWS, count // 64, 64).transpose(0, 2, 1, 3)
    return ordered.reshape(rows // ROWS, count // 64, ROWS, 64)
