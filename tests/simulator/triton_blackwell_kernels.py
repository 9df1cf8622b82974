"""Kernels in Triton and Gluon that use tensor memory."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
)


@triton.jit
def matmul_f16_sums(
    a, b, c, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, TILE_K)
    total = tl.zeros((TILE_M, TILE_N), tl.float16)
    for start in range(0, k, TILE_K):
        left = tl.load(a + rows[:, None] * k + (start + depth)[None, :])
        right = tl.load(b + (start + depth)[:, None] * n + columns[None, :])
        total = tl.dot(left, right, total, out_dtype=tl.float16)
    tl.store(c + rows[:, None] * n + columns[None, :], total)


@triton.jit
def two_products(a, b, c, d, n, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """``d = f(a @ b) @ c``: the first operand of the second product comes from registers."""
    rows, columns, depth = tl.arange(0, 128), tl.arange(0, SIZE), tl.arange(0, DEPTH)
    left = tl.load(a + rows[:, None] * DEPTH + depth[None, :])
    total = tl.zeros((128, DEPTH), tl.float32)
    for start in range(0, n, SIZE):
        first = tl.load(b + depth[:, None] * n + (start + columns)[None, :])
        middle = tl.maximum(tl.dot(left, first), 0.0).to(left.dtype)
        second = tl.load(c + (start + columns)[:, None] * DEPTH + depth[None, :])
        total = tl.dot(middle, second, total)
    tl.store(d + rows[:, None] * DEPTH + depth[None, :], total)


@triton.jit
def attention(
    q, k, v, o, length, scale, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    queries = tl.make_tensor_descriptor(q, [length, DEPTH], [DEPTH, 1], [ROWS, DEPTH])
    keys = tl.make_tensor_descriptor(k, [length, DEPTH], [DEPTH, 1], [COLUMNS, DEPTH])
    values = tl.make_tensor_descriptor(v, [length, DEPTH], [DEPTH, 1], [COLUMNS, DEPTH])
    start = tl.program_id(0) * ROWS
    rows = start + tl.arange(0, ROWS)
    query = queries.load([start, 0])
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    end = start + ROWS if CAUSAL else length
    for column in tl.range(0, end, COLUMNS, warp_specialize=SPECIALIZED):
        score = tl.dot(query, keys.load([column, 0]).T) * scale
        if CAUSAL:
            columns = column + tl.arange(0, COLUMNS)
            score = tl.where(rows[:, None] >= columns[None, :], score, -1.0e6)
        higher = tl.maximum(most, tl.max(score, 1))
        share = tl.math.exp2(score - higher[:, None])
        factor = tl.math.exp2(most - higher)
        weight = weight * factor + tl.sum(share, 1)
        total = total * factor[:, None]
        total = tl.dot(share.to(query.dtype), values.load([column, 0]), total)
        most = higher
    depth = tl.arange(0, DEPTH)
    tl.store(o + rows[:, None] * DEPTH + depth[None, :], total / weight[:, None])


@triton.jit
def specialized_matmul(
    a, b, c, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    """Loads, products and the rest are done by warps of their own."""
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [TILE_M, TILE_K])
    right = tl.make_tensor_descriptor(b, [n, k], [k, 1], [TILE_N, TILE_K])
    result = tl.make_tensor_descriptor(c, [m, n], [n, 1], [TILE_M, TILE_N])
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in tl.range(0, k, TILE_K, warp_specialize=True):
        total = tl.dot(left.load([row, start]), right.load([column, start]).T, total)
    result.store([row, column], total.to(c.dtype.element_ty))


@triton.jit
def persistent_matmul(
    a, b, c, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [TILE_M, TILE_K])
    right = tl.make_tensor_descriptor(b, [n, k], [k, 1], [TILE_N, TILE_K])
    result = tl.make_tensor_descriptor(c, [m, n], [n, 1], [TILE_M, TILE_N])
    across = n // TILE_N
    for tile in tl.range(tl.program_id(0), m // TILE_M * across, BLOCKS, flatten=True,
                         warp_specialize=True):  # fmt: skip
        row, column = tile // across * TILE_M, tile % across * TILE_N
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for start in range(0, k, TILE_K):
            total = tl.dot(left.load([row, start]), right.load([column, start]).T, total)
        result.store([row, column], total.to(c.dtype.element_ty))


@triton.jit
def scaled_matmul(
    a, a_scale, b, b_scale, c, n, k,
    A: tl.constexpr, B: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, BLOCK: tl.constexpr, A_PACK: tl.constexpr, B_PACK: tl.constexpr,
):  # fmt: skip
    """Rows of ``a``, and of the transposed ``b``, with a scale for each ``BLOCK`` elements."""
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        in_a = start // A_PACK + tl.arange(0, TILE_K // A_PACK)
        in_b = start // B_PACK + tl.arange(0, TILE_K // B_PACK)
        blocks = start // BLOCK + tl.arange(0, TILE_K // BLOCK)
        left = tl.load(a + rows[:, None] * (k // A_PACK) + in_a[None, :])
        right = tl.load(b + columns[:, None] * (k // B_PACK) + in_b[None, :])
        left_scale = tl.load(a_scale + rows[:, None] * (k // BLOCK) + blocks[None, :])
        right_scale = tl.load(b_scale + columns[:, None] * (k // BLOCK) + blocks[None, :])
        total = tl.dot_scaled(left, left_scale, A, right.T, right_scale, B, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total)


# Gluon --------------------------------------------------------------------------------------------


@gluon.jit
def through_tensor_memory(
    x, y, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, STORED: gl.constexpr,
    LOADED: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """Stores to tensor memory and loads from it, with instructions of given shapes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    offsets = rows[:, None] * COLUMNS + columns[None, :]
    value = gl.load(x + offsets)
    place: gl.constexpr = TensorMemoryLayout([ROWS, COLUMNS], col_stride=STRIDE)
    memory = allocate_tensor_memory(x.dtype.element_ty, [ROWS, COLUMNS], place)
    stored: gl.constexpr = memory.get_reg_layout(num_warps=WARPS, instr_variant=STORED)
    loaded: gl.constexpr = memory.get_reg_layout(num_warps=WARPS, instr_variant=LOADED)
    memory.store(gl.convert_layout(value, stored))
    gl.store(y + offsets, gl.convert_layout(memory.load(loaded), layout))


@gluon.jit
def reduced_load(x, y, z, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LARGEST: gl.constexpr,
                 ABSOLUTE: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    offsets = rows[:, None] * COLUMNS + columns[None, :]
    place: gl.constexpr = TensorMemoryLayout([ROWS, COLUMNS], col_stride=1)
    memory = allocate_tensor_memory(gl.float32, [ROWS, COLUMNS], place)
    inside: gl.constexpr = memory.get_reg_layout(num_warps=4)
    memory.store(gl.convert_layout(gl.load(x + offsets), inside))
    if LARGEST:
        value, reduced = memory.load_max(inside, abs=ABSOLUTE)
    else:
        value, reduced = memory.load_min(inside, abs=ABSOLUTE)
    gl.store(y + offsets, gl.convert_layout(value, layout))
    gl.store(z + rows, gl.convert_layout(reduced, gl.SliceLayout(1, layout)))


@gluon.jit
def product(
    a, b, c, d, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SWIZZLE: gl.constexpr,
    A_ACROSS: gl.constexpr, B_ACROSS: gl.constexpr, IN_TENSOR_MEMORY: gl.constexpr,
    VARIANT: gl.constexpr,
):  # fmt: skip
    """``d = a @ b + c``, with operands in shared memory whose rows lie along K or across it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, M, gl.SliceLayout(1, layout))
    n = gl.arange(0, N, gl.SliceLayout(0, layout))
    k_along = gl.arange(0, K, gl.SliceLayout(0, layout))
    k_down = gl.arange(0, K, gl.SliceLayout(1, layout))
    left = gl.load(a + m[:, None] * K + k_along[None, :])
    right = gl.load(b + k_down[:, None] * N + n[None, :])
    bits: gl.constexpr = a.dtype.element_ty.primitive_bitwidth
    a_layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, bits, 2, transposed=A_ACROSS)
    b_layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, bits, 2, transposed=not B_ACROSS)
    in_b = gl.allocate_shared_memory(b.dtype.element_ty, [K, N], b_layout, right)
    place: gl.constexpr = TensorMemoryLayout([M, N], col_stride=1)
    sums = allocate_tensor_memory(gl.float32, [M, N], place)
    inside: gl.constexpr = sums.get_reg_layout(num_warps=4, instr_variant=VARIANT)
    before = gl.load(c + m[:, None] * N + n[None, :])
    sums.store(gl.convert_layout(before, inside))
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(done, count=1)
    if IN_TENSOR_MEMORY:
        a_place: gl.constexpr = TensorMemoryLayout([M, K], col_stride=1)
        in_a = allocate_tensor_memory(a.dtype.element_ty, [M, K], a_place)
        a_inside: gl.constexpr = in_a.get_reg_layout(num_warps=4)
        in_a.store(gl.convert_layout(left, a_inside))
    else:
        in_a = gl.allocate_shared_memory(a.dtype.element_ty, [M, K], a_layout, left)
    fence_async_shared()
    tcgen05_mma(in_a, in_b, sums, use_acc=True)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)
    mbarrier.invalidate(done)
    gl.store(d + m[:, None] * N + n[None, :], gl.convert_layout(sums.load(inside), layout))


@gluon.jit
def copied(x, y, COLUMNS: gl.constexpr, SWIZZLE: gl.constexpr):
    """Copies shared memory to tensor memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 128, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    offsets = rows[:, None] * COLUMNS + columns[None, :]
    shared: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, 32, 2)
    source = gl.allocate_shared_memory(gl.float32, [128, COLUMNS], shared, gl.load(x + offsets))
    place: gl.constexpr = TensorMemoryLayout([128, COLUMNS], col_stride=1)
    memory = allocate_tensor_memory(gl.float32, [128, COLUMNS], place)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(done, count=1)
    fence_async_shared()
    tcgen05_copy(source, memory)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)
    mbarrier.invalidate(done)
    inside: gl.constexpr = memory.get_reg_layout(num_warps=4)
    gl.store(y + offsets, gl.convert_layout(memory.load(inside), layout))
