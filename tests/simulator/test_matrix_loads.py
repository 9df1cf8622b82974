"""``ldmatrix``, ``stmatrix`` and ``movmatrix``, lane by lane."""

from __future__ import annotations

import numpy as np
import pytest
from matrix_load_programs import (
    ADDRESS,
    FILL,
    SETUP,
    SHARED,
    WARPS,
    listed,
    load_program,
    row_offsets,
)
from simulator_support import body_ptx, module, run_ptx

from pallasite_simulator.errors import PtxError, SimulationError
from pallasite_simulator.programs import load

DRAIN = """
    bar.sync 0;
$drain:
    cvt.u64.u32 %at, %i0; add.s64 %at, %at, %array0;
    add.u32 %place, %base, %i0; ld.shared.v4.b32 {%v0, %v1, %v2, %v3}, [%place];
    st.global.v4.b32 [%at], {%v0, %v1, %v2, %v3};
    add.u32 %i0, %i0, 1024; setp.lt.u32 %more, %i0, 4096; @%more bra $drain;
"""


def run_load(name, registers, rows, *options, **more):
    """Loads matrices from random shared memory: see :func:`load_program`.

    Returns:
      Rows of the matrices (warps, rows, 16 bytes) and bytes of the registers (warps, 32,
      registers, 4).
    """
    ptx, images, places = load_program(name, registers, rows, *options, **more)
    output = np.full((WARPS, 32, registers), 0xCDCDCDCD, np.uint32)
    run_ptx(ptx, images, places, output, grid=WARPS // 2, block=64, shared=SHARED + 16)
    chosen = places[:, :rows, None] + np.arange(16)
    matrices = np.stack([images[warp // 2][chosen[warp]] for warp in range(WARPS)])
    return matrices, output.view(np.uint8).reshape(WARPS, 32, registers, 4)


SPACES = ["shared", "shared::cta", ""]


def addressing(space, offset=0):
    """The operand for an address that is ``offset`` too small, and what must be done before."""
    if space:
        return f"[%own+{offset}]", f"sub.u32 %own, %own, {offset};"
    return (
        f"[%generic+{offset}]",
        f"cvt.u64.u32 %generic, %own; cvta.shared.u64 %generic, %generic;"
        f" sub.s64 %generic, %generic, {offset};",
    )


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_load_16_bits(number, trans, space):
    address, setup = addressing(space, 32)
    parts = ["ldmatrix.sync.aligned.m8n8", f"x{number}", "trans" * trans, space, "b16"]
    name = ".".join(part for part in parts if part)
    matrices, got = run_load(name, number, 8 * number, address, setup)
    elements = matrices.view(np.uint16).reshape(WARPS, number, 8, 8)
    for lane in range(32):
        for matrix in range(number):
            for e in range(2):
                row, column = lane // 4, lane % 4 * 2 + e
                if trans:
                    row, column = column, row
                np.testing.assert_array_equal(
                    got.view(np.uint16)[:, lane, matrix, e], elements[:, matrix, row, column]
                )


def unpacked(matrices, kind):
    """Bytes of rows: 16 elements of 6 or 4 bits each become one byte."""
    if kind == "b8":
        return matrices
    width = 6 if "b6" in kind else 4
    result = np.zeros_like(matrices)
    for index in np.ndindex(*matrices.shape[:-1]):
        value = int.from_bytes(matrices[index].tobytes(), "little")
        result[index] = [(value >> width * i) & ((1 << width) - 1) for i in range(16)]
    return result


@pytest.mark.parametrize("kind", ["b8", "b8x16.b6x16_p32", "b8x16.b4x16_p64"])
@pytest.mark.parametrize("number", [1, 2])
def test_load_transposed_bytes(number, kind):
    name = f"ldmatrix.sync.aligned.m16n16.x{number}.trans.shared.{kind}"
    matrices, got = run_load(name, 2 * number, 16 * number, target="sm_100a")
    rows = unpacked(matrices, kind).reshape(WARPS, number, 16, 16)
    for lane in range(32):
        for register in range(2 * number):
            for e in range(4):
                # A row of the transposed matrix is a byte of all rows in memory.
                row, column = lane // 4 + 8 * (register % 2), lane % 4 * 4 + e
                np.testing.assert_array_equal(
                    got[:, lane, register, e], rows[:, register // 2, column, row]
                )


@pytest.mark.parametrize("kind", ["b8x16.b6x16_p32", "b8x16.b4x16_p64"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_load_packed_bytes(number, kind):
    name = f"ldmatrix.sync.aligned.m8n16.x{number}.shared.{kind}"
    matrices, got = run_load(name, number, 8 * number, target="sm_100a")
    rows = unpacked(matrices, kind).reshape(WARPS, number, 8, 16)
    for lane in range(32):
        for register in range(number):
            for e in range(4):
                np.testing.assert_array_equal(
                    got[:, lane, register, e], rows[:, register, lane // 4, lane % 4 * 4 + e]
                )


def run_store(name, registers, rows, address="[%own]", setup="", target="sm_90a"):
    """Stores random registers.

    Returns:
      Bytes of the registers, and the rows of the matrices; everything else is checked to be as it
      was.
    """
    random = np.random.default_rng(2)
    images = random.integers(0, 256, (WARPS // 2, SHARED), np.uint8)
    places = row_offsets(random, rows)
    words = random.integers(0, 2**32, (WARPS, 32, registers), np.uint32)
    body = [
        SETUP,
        FILL,
        ADDRESS,
        f".reg .b32 %d<{registers}>;",
        f"mul.wide.u32 %at, %thread, {4 * registers}; add.s64 %at, %at, %array2;",
        *[f"ld.global.b32 %d{i}, [%at+{4 * i}];" for i in range(registers)],
        setup,
        f"{name} {address}, {listed('d', registers)};",
        "mov.u32 %i0, %tid.x; shl.b32 %i0, %i0, 4;",
        DRAIN,
    ]
    before = images.copy()
    ptx = body_ptx("\n".join(body), 3, shared=SHARED, target=target)
    run_ptx(ptx, images, places, words, grid=WARPS // 2, block=64, shared=SHARED + 16)
    stored = []
    for warp in range(WARPS):
        chosen = places[warp, :rows, None] + np.arange(16)
        stored.append(images[warp // 2][chosen])
        images[warp // 2][chosen] = before[warp // 2][chosen]
    np.testing.assert_array_equal(images, before)
    return words.view(np.uint8).reshape(WARPS, 32, registers, 4), np.stack(stored)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_store_16_bits(number, trans, space):
    address, setup = addressing(space, 48)
    parts = ["stmatrix.sync.aligned.m8n8", f"x{number}", "trans" * trans, space, "b16"]
    name = ".".join(part for part in parts if part)
    held, stored = run_store(name, number, 8 * number, address, setup)
    elements = stored.view(np.uint16).reshape(WARPS, number, 8, 8)
    for lane in range(32):
        for matrix in range(number):
            for e in range(2):
                row, column = lane // 4, lane % 4 * 2 + e
                if trans:
                    row, column = column, row
                np.testing.assert_array_equal(
                    elements[:, matrix, row, column], held.view(np.uint16)[:, lane, matrix, e]
                )


@pytest.mark.parametrize("number", [1, 2, 4])
def test_store_transposed_bytes(number):
    name = f"stmatrix.sync.aligned.m16n8.x{number}.trans.shared.b8"
    held, stored = run_store(name, number, 8 * number, target="sm_100a")
    rows = stored.reshape(WARPS, number, 8, 16)
    for lane in range(32):
        for matrix in range(number):
            for e in range(4):
                # As accumulators of m16n8 lie; a row in memory is a column of the matrix.
                row, column = lane // 4 + (8 if e >= 2 else 0), lane % 4 * 2 + e % 2
                np.testing.assert_array_equal(
                    rows[:, matrix, column, row], held[:, lane, matrix, e]
                )


def test_transpose():
    words = np.random.default_rng(3).integers(0, 2**32, (WARPS, 32), np.uint32)
    output = np.zeros_like(words)
    body = """
        .reg .b64 %at; .reg .b32 %a, %d;
        add.s64 %at, %array0, %offset4; ld.global.b32 %a, [%at];
        movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;
        add.s64 %at, %array1, %offset4; st.global.b32 [%at], %d;
    """
    run_ptx(body_ptx(body, 2), words, output, grid=WARPS // 2, block=64)
    before = words.view(np.uint16).reshape(WARPS, 8, 8)
    after = output.view(np.uint16).reshape(WARPS, 8, 8)
    np.testing.assert_array_equal(after, before.swapaxes(1, 2))


def test_transpose_of_a_constant():
    body = """
        .reg .b64 %at; .reg .b32 %d;
        movmatrix.sync.aligned.m8n8.trans.b16 %d, 0x00010001;
        add.s64 %at, %array0, %offset4; st.global.b32 [%at], %d;
    """
    output = np.zeros(32, np.uint32)
    run_ptx(body_ptx(body, 1), output, block=32)
    assert (output == 0x00010001).all()


def test_registers_that_are_not_wanted():
    name = "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {_, %d1}, [%own]; //"
    matrices, got = run_load(name, 2, 16, setup="mov.b32 %d0, 77;")
    np.testing.assert_array_equal(got.view(np.uint32)[:, :, 0], 77)
    second = matrices.view(np.uint32).reshape(WARPS, 2, 8, 4)[:, 1].reshape(WARPS, 32)
    np.testing.assert_array_equal(got.view(np.uint32)[:, :, 1, 0], second)


def test_some_warps_only():
    setup = """
        .reg .pred %p; mov.u32 %i2, %tid.x; setp.ge.u32 %p, %i2, 32; mov.b32 %d0, 5; @%p
    """
    matrices, got = run_load("ldmatrix.sync.aligned.m8n8.x1.shared.b16", 1, 8, setup=setup)
    words = got.view(np.uint32).reshape(WARPS, 32)
    assert (words[::2] == 5).all()
    np.testing.assert_array_equal(words[1::2], matrices.view(np.uint32).reshape(WARPS, 32)[1::2])


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ldmatrix", "stmatrix"])
@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("add.u32 %own, %own, 8;", "misaligned"),
        ("add.u32 %own, %own, 65536;", "out of bounds"),
    ],
)
def test_wrong_addresses(name, setup, message):
    whole = f"{name}.sync.aligned.m8n8.x4.shared.b16"
    with pytest.raises(SimulationError, match=message):
        (run_load if name == "ldmatrix" else run_store)(whole, 4, 32, setup=setup)


@pytest.mark.parametrize("name", ["ldmatrix", "stmatrix"])
def test_addresses_of_other_memory(name):
    whole = f"{name}.sync.aligned.m8n8.x1.b16"
    run = run_load if name == "ldmatrix" else run_store
    with pytest.raises(SimulationError, match="not in shared memory") as caught:
        run(whole, 1, 8, address="[%array0]")
    assert ".global" in str(caught.value)


@pytest.mark.parametrize(
    "instruction",
    [
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r1];",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r0};",
        "movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1;",
    ],
)
def test_a_warp_that_is_not_whole(instruction):
    body = ".reg .b32 %r<4>; .shared .b8 x[1024]; mov.u32 %r1, x; mov.u32 %r0, 0;" + instruction
    with pytest.raises(SimulationError, match="all 32 threads of a warp"):
        run_ptx(module(body), block=40)


WRONG = [
    ("ldmatrix.aligned.m8n8.x1.shared.b16 {%r0}, [%r1];", "missing"),
    ("ldmatrix.sync.aligned.x1.shared.b16 {%r0}, [%r1];", "missing"),
    ("ldmatrix.sync.aligned.m8n8.shared.b16 {%r0}, [%r1];", "missing"),
    ("ldmatrix.sync.aligned.m8n8.x1.shared {%r0}, [%r1];", "missing"),
    ("ldmatrix.sync.aligned.m8n8.x1.global.b16 {%r0}, [%r1];", "unknown modifier"),
    ("ldmatrix.sync.aligned.m8n8.x1.shared.b8 {%r0}, [%r1];", "no such combination"),
    ("ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r0, %r2}, [%r1];", "no such combination"),
    ("ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8 {%r0, %r2}, [%r1];", "no such combination"),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r0}, [%r1];", "no such combination"),
    ("ldmatrix.sync.aligned.m8n16.x1.trans.shared.b8x16.b4x16_p64 {%r0}, [%r1];",
     "no such combination"),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16 {%r0}, [%r1];", "packed"),
    ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r0}, [%r1];", "number of registers"),
    ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, %r1;", "address"),
    ("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r1], {%r0};", "number of registers"),
    ("stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r1], {%r0};", "no such combination"),
    ("stmatrix.sync.aligned.m16n8.x1.trans.shared.b16 [%r1], {%r0};", "no such combination"),
    ("stmatrix.sync.aligned.m8n8.x1.shared.b8 [%r1], {%r0};", "no such combination"),
    ("movmatrix.sync.aligned.m8n8.b16 %r0, %r1;", "unknown form"),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "message"), WRONG)
def test_wrong_instructions(instruction, message):
    with pytest.raises(PtxError, match=message):
        load(module(".reg .b32 %r<8>;\n" + instruction))
