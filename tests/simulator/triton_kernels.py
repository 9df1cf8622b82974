"""Kernels in Triton, compiled for Hopper without a GPU: PTX that another compiler wrote."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from recorded_ptx import recorded
from tests import session_folders

# Triton keeps what it compiles; the tests neither use nor change the user's cache.
os.environ.setdefault("TRITON_CACHE_DIR", str(session_folders.shared("triton")))

# Whether sums of products may be fused: Triton wants it to be said.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as Triton compiled it.

    ``scratch`` is what it wants of global memory for each block, in bytes.
    """

    ptx: str
    name: str
    threads: int
    shared: int
    scratch: int


@functools.cache
def compiled(
    kernel: Any,
    signature: str,
    warps: int = 4,
    stages: int = 3,
    divisible: str = "",
    capability: int = 90,
    ctas: int = 1,
    **constants: Any,
) -> Compiled:
    """Compiles a kernel for sm_90a, or another capability, unless what Triton makes is recorded.

    Args:
      kernel: a ``triton.jit`` function.
      signature: types of the arguments that are no constants, such as ``"*fp32 *fp32 i32"``.
      warps: of a block.
      stages: of software pipelines.
      divisible: names of integers that are multiples of 16.
      capability: of the chip.
      ctas: blocks of a cluster, which work on one program together.
      **constants: values of the ``constexpr`` arguments.
    """
    settings = (signature, warps, stages, divisible, capability, ctas, sorted(constants.items()))
    parts = (triton.__version__, kernel.cache_key, str(kernel), repr(settings))

    def make() -> dict[str, Any]:
        options = {"num_warps": warps, "num_stages": stages, "num_ctas": ctas}
        made = _compiled(kernel, signature, divisible.split(), capability, options, constants)
        return dataclasses.asdict(made)

    return Compiled(**recorded(parts, make))


def _compiled(
    kernel: Any,
    signature: str,
    divisible: Sequence[str],
    capability: int,
    options: Mapping[str, Any],
    constants: Mapping[str, Any],
) -> Compiled:
    types = iter(signature.split())
    named = {n: "constexpr" if n in constants else next(types) for n in kernel.arg_names}
    # Arrays begin at multiples of 16 bytes.
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if named[name].startswith("*") or name in divisible
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    make = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = make(kernel, named, values, attributes)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = _without_machine_code
        result = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options=dict(options),
        )
    metadata, ptx = result.metadata, result.asm["ptx"]
    # Warp specialization adds warps to those that were asked for.
    found = re.search(r"\.(?:req|max)ntid\s+(\d+)", ptx)
    return Compiled(
        ptx,
        metadata.name,
        int(found[1]) if found else 32 * metadata.num_warps,
        metadata.shared,
        metadata.global_scratch_size,
    )


def _without_machine_code(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, *_: Any
) -> tuple[str, str] | None:
    """A hook of Triton: its ptxas does not run, since nobody runs machine code here."""
    if stages is None:  # Asked for what its cache must know.
        return "without machine code", "without machine code"
    stages["cubin"] = lambda ptx, metadata: b""
    return None


@triton.jit
def gelu(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count)
    cube = value * value * value
    inner = 0.7978845608 * (value + 0.044715 * cube)
    result = 0.5 * value * (2 * tl.sigmoid(2 * inner))
    tl.store(y + at, result, mask=at < count)


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    value = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * columns + at, value / tl.sum(value, 0), mask=at < columns)


@triton.jit
def layer_norm(x, weight, bias, y, columns, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / columns
    centred = tl.where(inside, value - mean, 0.0)
    deviation = 1 / tl.sqrt(tl.sum(centred * centred, 0) / columns + epsilon)
    scale = tl.load(weight + at, mask=inside).to(tl.float32)
    shift = tl.load(bias + at, mask=inside).to(tl.float32)
    tl.store(y + row * columns + at, centred * deviation * scale + shift, mask=inside)


@triton.jit
def histogram(x, counts, largest, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0)
    tl.atomic_add(counts + value % 64, 1, mask=inside)
    tl.atomic_max(largest, tl.max(tl.where(inside, value, 0), 0))


@triton.jit
def scan(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + at, mask=at < columns, other=0.0)
    tl.store(y + row * columns + at, tl.cumsum(value, 0), mask=at < columns)


@triton.jit
def matmul(a, b, c, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, TILE_K)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        left = tl.load(a + rows[:, None] * k + (start + depth)[None, :])
        right = tl.load(b + (start + depth)[:, None] * n + columns[None, :])
        total = tl.dot(left, right, total)
    at = rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + at, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def matmul_transposed(
    a, b, c, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, TILE_K)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        left = tl.load(a + rows[:, None] * k + (start + depth)[None, :])
        right = tl.load(b + columns[None, :] * k + (start + depth)[:, None])
        total = tl.dot(left, right, total)
    at = rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + at, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def descriptor_matmul(
    a, b, c, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [TILE_M, TILE_K])
    right = tl.make_tensor_descriptor(b, [k, n], [n, 1], [TILE_K, TILE_N])
    result = tl.make_tensor_descriptor(c, [m, n], [n, 1], [TILE_M, TILE_N])
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        total = tl.dot(left.load([row, start]), right.load([start, column]), total)
    result.store([row, column], total.to(c.dtype.element_ty))
