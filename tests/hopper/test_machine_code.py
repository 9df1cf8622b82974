"""Machine code reads no accumulator while a product that is added to it is in flight.

What PTX says in the right order the assembler may still move, so this looks at what it made.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import pallasite
from pallasite.codegen import assembler
from pallasite.codegen.tools import find_tool
from pallasite_hopper import ops

needs_disassembler = pytest.mark.skipif(
    find_tool("nvdisasm").path is None or find_tool("ptxas").path is None,
    reason="nvdisasm or ptxas is missing",
)

_LINE = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);")
_PRODUCT = re.compile(r"[HQI]GMMA\.64x(\d+)x\d+\S* R(\d+)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
_READER = re.compile(
    r"(@!?U?P\d+ )?(F2FP|FADD|FMUL|FFMA|MOV|STS|STG|FMNMX|IMAD\.MOV|PRMT|HADD2|HFMA2|SEL)\b"
)


def early_reads(sass: str) -> list[str]:
    """Instructions that read accumulators in flight, in a walk over the code from top to bottom."""
    groups: list[set[int]] = []
    open_group: set[int] = set()
    found = []
    for instruction in _LINE.findall(sass):
        if product := _PRODUCT.search(instruction):
            columns, first = map(int, product.groups())
            open_group |= set(range(first, first + columns // 2))
            if "gsb0" in instruction:
                groups.append(open_group)
                open_group = set()
        elif wait := _WAIT.search(instruction):
            left = int(wait[1], 16)
            groups = groups[len(groups) - left :] if left else []
        elif groups and _READER.match(instruction):
            stores = re.match(r"(@!?U?P\d+ )?ST", instruction)
            text = instruction if stores else instruction.partition(",")[2]
            read = {int(number) for number in re.findall(r"\bR(\d+)", text)}
            if read & set().union(open_group, *groups):
                found.append(instruction)
    return found


def test_the_walk_finds_what_is_read_too_early():
    code = """
        /*0000*/                   HGMMA.64x16x16.F32.BF16 R24, R152, gdesc[UR4], R24, gsb0 ;
        /*0010*/                   F2FP.BF16.F32.PACK_AB R7, R31, R30 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/                   F2FP.BF16.F32.PACK_AB R8, R29, R28 ;
    """
    assert early_reads(code) == ["F2FP.BF16.F32.PACK_AB R7, R31, R30 "]
    assert early_reads(code.replace("R31, R30", "R33, R32")) == []


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradient(q, k, v):
    def total(*operands):
        return ops.attention(*operands, causal=True).astype(jnp.float32).sum()

    return jax.grad(total, (0, 1, 2))(q, k, v)


HEADS = {dim: [array(1, 2048, 4, dim)] * 3 for dim in (64, 128)}
FP8 = jnp.float8_e4m3fn
KERNELS = {
    "matmul": (ops.matmul, array(4096, 4096), array(4096, 4096)),
    "few rows": (ops.matmul, array(128, 8192), array(8192, 8192)),
    "float8": (
        lambda a, b: ops.matmul(a, b, transpose_b=True, out_dtype=jnp.bfloat16),
        array(4096, 4096, dtype=FP8),
        array(4096, 4096, dtype=FP8),
    ),
    "ragged": (
        ops.ragged_matmul,
        array(8192, 4096),
        array(8, 4096, 4096),
        array(8, dtype=jnp.int32),
    ),
    "attention 64": (ops.attention, *HEADS[64]),
    "causal attention 128": (lambda *x: ops.attention(*x, causal=True), *HEADS[128]),
    "gradient 64": (gradient, *HEADS[64]),
    "gradient 128": (gradient, *HEADS[128]),
} | {
    f"narrow weights, {rows} rows": (
        lambda a, w: ops.mixed_matmul(a, w, transpose_b=True),
        array(rows, 8192),
        array(8192, 8192, dtype=jnp.int8),
    )
    for rows in (64, 128, 1024, 4096)
}

SIMILAR = {"gradient 64", "narrow weights, 128 rows", "narrow weights, 4096 rows"}
"""Others have the same loops, in other tiles."""


@needs_disassembler
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SIMILAR)) for name in KERNELS],
)
def test_no_accumulator_is_read_too_early(name):
    function, *arguments = KERNELS[name]
    kernels = pallasite.compile_all(function, *arguments, target="sm_90a", assemble=True)
    products = [kernel for kernel in kernels if "wgmma.mma_async" in kernel.ptx]
    assert products
    for kernel in products:
        sass = assembler.disassemble(kernel.cubin)
        assert "GMMA.64x" in sass
        assert early_reads(sass) == [], kernel.name
