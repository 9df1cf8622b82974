"""Products of warps with narrow elements and scale factors, against sums over single elements."""

from __future__ import annotations

import numpy as np
import pytest
from ptxas_forms import refusals, rejected
from simulator_support import module, run_ptx
from tests.narrow_types import FACTORS, TYPES

from pallasite_simulator.errors import SimulationError


def program(name, half=False, selectors=()):
    """Each lane loads its registers of A, B, C and scale factors, and stores those of D."""
    words = 2 if half else 4
    d, c = (", ".join(f"%{letter}{n}" for n in range(words)) for letter in "dc")
    scales = ""
    if selectors:
        byte_a, lane_a, byte_b, lane_b = selectors
        scales = f", %s0, {{{byte_a}, {lane_a}}}, %s1, {{{byte_b}, {lane_b}}}"
    loads = [f"%a{n}" for n in range(4)] + [f"%b{n}" for n in range(2)]
    loads += [f"%c{n}" for n in range(words)] + ["%s0", "%s1"]
    body = ".reg .b32 %a<4>, %b<2>, %c<4>, %d<4>, %s<2>, %r; .reg .b64 %x, %y, %z;\n"
    body += "mov.u32 %r, %tid.x; mul.wide.u32 %z, %r, 4; ld.param.u64 %x, [given];"
    body += "ld.param.u64 %y, [made]; add.u64 %x, %x, %z; add.u64 %y, %y, %z;\n"
    for number, register in enumerate(loads):
        body += f"ld.global.b32 {register}, [%x+{128 * number}];\n"
    body += f"{name} {{{d}}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{{c}}}{scales};\n"
    for number in range(words):
        body += f"st.global.b32 [%y+{128 * number}], %d{number};\n"
    return module(body, [".u64 given", ".u64 made"], target="sm_120a")


def elements(words, row, column, k, name, packed):
    """One element of A (or B) in the registers of a warp, of shape (registers, 32)."""
    each = 8 if packed else 4
    along, rest = divmod(column, 4 * each)
    lane = 4 * (row % 8) + rest // each
    register = along * (len(words) // (k // (4 * each))) + row // 8
    bits, dtype = TYPES[name]
    code = int(words[register, lane]) >> rest % each * (32 // each)
    code = code & 15 if packed else code >> 2 & 15 if bits == 4 else code & (1 << bits) - 1
    return float(np.array([code], np.uint8).view(dtype)[0])


def run(name, a, b, k, *, half=False, scale="", vectors=0, selectors=(), seed=0):
    """The result, and what it should be."""
    generator = np.random.default_rng(seed)
    packed = k == 64
    # Nothing but numbers: no NaN, no infinity.
    given = generator.integers(0, 2**32, (12, 32), np.uint32)
    for kind, rows in ((a, slice(0, 4)), (b, slice(4, 6))):
        if kind in ("e4m3", "e5m2"):
            given[rows] &= 0xBBBBBBBB if kind == "e5m2" else 0xF7F7F7F7
    words = 2 if half else 4
    held = generator.standard_normal((16, 8)).astype(np.float16 if half else np.float32)
    for row in range(16):
        for column in range(8):
            lane, place = 4 * (row % 8) + column // 2, 2 * (row // 8) + column % 2
            if half:
                given[6:8].view(np.float16).reshape(2, 32, 2)[row // 8, lane, column % 2] = held[
                    row, column
                ]
            else:
                given[6 + place, lane] = held[row, column].view(np.uint32)
    factors = given[6 + words : 8 + words]
    if scale == "ue8m0":
        factors[:] = (
            generator.integers(120, 134, (2, 32, 4)).astype(np.uint8).view(np.uint32)[..., 0]
        )
    elif scale:
        factors[:] &= 0x77777777
    made = np.zeros((words, 32), np.uint32)
    run_ptx(program(name, half, selectors), given, made, block=32)

    def factor(matrix, row, column):
        if not scale:
            return 1.0
        byte, thread = selectors[2 * matrix : 2 * matrix + 2]
        lane = 4 * (row % 8) + (thread if matrix else 2 * thread + row // 8)
        place = byte + column // (k // vectors)
        code = int(factors[matrix, lane]) >> 8 * place & 255
        return float(np.array([code], np.uint8).view(FACTORS[scale])[0].astype(np.float64))

    left = np.array([
        [elements(given[:4], m, n, k, a, packed) * factor(0, m, n) for n in range(k)]
        for m in range(16)
    ])  # fmt: skip
    right = np.array([
        [elements(given[4:6], m, n, k, b, packed) * factor(1, m, n) for n in range(k)]
        for m in range(8)
    ])  # fmt: skip
    result = np.zeros((16, 8))
    for row in range(16):
        for column in range(8):
            lane, place = 4 * (row % 8) + column // 2, 2 * (row // 8) + column % 2
            if half:
                result[row, column] = made.view(np.float16).reshape(2, 32, 2)[
                    row // 8, lane, column % 2
                ]
            else:
                result[row, column] = made[place, lane].view(np.float32)
    return result, held.astype(np.float64) + left @ right.T


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("a", "b"), [("e4m3", "e5m2"), ("e2m1", "e3m2"), ("e2m3", "e2m1"), ("e3m2", "e4m3")]
)
def test_narrow_elements(a, b, half):
    d = "f16" if half else "f32"
    name = f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.{d}.{a}.{b}.{d}"
    found, expected = run(name, a, b, 32, half=half)
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float16).astype(np.float64) if half else expected
    np.testing.assert_allclose(found, expected, rtol=1e-3 if half else 1e-6, atol=1e-5)


SCALED = [
    ("mxf8f6f4", "", "e4m3", "e2m1", 32, 1, "ue8m0", (3, 1, 0, 2)),
    ("mxf8f6f4", ".scale_vec::1X", "e2m3", "e5m2", 32, 1, "ue8m0", (1, 0, 2, 3)),
    ("mxf4", ".scale_vec::2X", "e2m1", "e2m1", 64, 2, "ue8m0", (2, 1, 0, 1)),
    ("mxf4nvf4", ".scale_vec::2X", "e2m1", "e2m1", 64, 2, "ue8m0", (0, 0, 2, 0)),
    ("mxf4nvf4", ".scale_vec::4X", "e2m1", "e2m1", 64, 4, "ue4m3", (0, 1, 0, 3)),
]


@pytest.mark.parametrize(("kind", "size", "a", "b", "k", "vectors", "scale", "selectors"), SCALED)
def test_scale_factors(kind, size, a, b, k, vectors, scale, selectors):
    name = f"mma.sync.aligned.m16n8k{k}.row.col.kind::{kind}.block_scale{size}"
    name += f".f32.{a}.{b}.f32.{scale}"
    found, expected = run(name, a, b, k, scale=scale, vectors=vectors, selectors=selectors)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-4 * np.abs(expected).max())


def test_selectors_that_there_are_not():
    name = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0"
    for selectors in ((1, 0, 0, 0), (0, 2, 0, 0), (0, 0, 0, 4)):
        with pytest.raises(SimulationError, match="selects scale factors that there are not"):
            run(name, "e2m1", "e2m1", 64, scale="ue8m0", vectors=2, selectors=selectors)


def names():
    """Names as the grammar of mma has them, and some that it does not have."""
    types = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
    for d, a, b in (("f32", a, b) for a in types for b in types):
        yield f"m16n8k32.row.col.kind::f8f6f4.{d}.{a}.{b}.{d}"
        yield f"m16n8k32.row.col.kind::mxf8f6f4.block_scale.{d}.{a}.{b}.{d}.ue8m0"
    yield "m16n8k32.row.col.kind::f8f6f4.f16.e4m3.e2m1.f16"
    yield "m16n8k32.row.col.kind::f8f6f4.f32.e4m3.s8.f32"
    for kind in ("mxf8f6f4", "mxf4", "mxf4nvf4"):
        for size in ("", ".scale_vec::1X", ".scale_vec::2X", ".scale_vec::4X"):
            for scale in ("ue8m0", "ue4m3"):
                for d in ("f32", "f16"):
                    k = 32 if kind == "mxf8f6f4" else 64
                    name = f"m16n8k{k}.row.col.kind::{kind}.block_scale{size}"
                    yield f"{name}.{d}.e2m1.e2m1.{d}.{scale}"


@pytest.mark.parametrize("target", ["sm_120a", "sm_120f", "sm_100a"])
def test_ptxas_accepts_the_same(target):
    lines = []
    for name in names():
        words = "f0, f1" if ".f16." in name else "f0, f1, f2, f3"
        registers = words.replace("f", "r") if ".f16." in name else words
        scales = ", r0, {0, 0}, r1, {0, 0}" if "block_scale" in name else ""
        lines.append(
            f"mma.sync.aligned.{name} {{{registers}}}, {{r0, r1, r2, r3}}, {{r4, r5}},"
            f" {{{registers}}}{scales};"
        )
    declarations = ".reg .b32 r<8>; .reg .f32 f<4>;"
    wrong = rejected(lines, declarations, target) ^ refusals(lines, declarations, target).keys()
    assert [lines[number] for number in sorted(wrong)] == []
