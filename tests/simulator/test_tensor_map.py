"""Tensor maps: their bytes, their limits, their swizzles, and how programs change them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from simulator_support import run_body

from pallasite.errors import InvalidValueError, PallasiteError
from pallasite.launch import Buffer, BufferKind, TensorMapParameter
from pallasite_simulator.engine.tensor_map import (
    BYTES,
    ELEMENT_TYPES,
    FIELDS,
    PTX_ELEMENT_TYPES,
    SWIZZLES,
    TensorMap,
)
from pallasite_simulator.errors import PtxError, SimulationError

PLAIN = TensorMap(
    address=0x7F00_0000_1000,
    element_type=7,
    sizes=(100, 50, 3),
    strides=(512, 65536),
    box=(32, 8, 1),
)


def random_map(random):
    rank = int(random.integers(1, 6))
    element = int(random.choice(list(ELEMENT_TYPES)))
    size = ELEMENT_TYPES[element].bytes
    inner = int(random.choice([n for n in range(1, 129) if n * size % 16 == 0 and n * size <= 128]))
    return TensorMap(
        address=16 * int(random.integers(0, 2**40)),
        element_type=element,
        sizes=tuple(int(n) for n in random.integers(1, 2**32, rank, endpoint=True)),
        strides=tuple(16 * int(n) for n in random.integers(0, 2**36, rank - 1)),
        box=(inner, *(int(n) for n in random.integers(1, 257, rank - 1))),
        element_strides=tuple(int(n) for n in random.integers(1, 9, rank)),
        swizzle=int(random.choice([0, 3, 4, 5, 6])),
        nan_fill=ELEMENT_TYPES[element].floating and bool(random.integers(0, 2)),
    )


def test_bytes_hold_everything():
    random = np.random.default_rng(0)
    for _ in range(300):
        tensor = random_map(random)
        contents = tensor.encode()
        assert len(contents) == BYTES
        assert TensorMap.decode(contents) == tensor


def test_sizes_of_boxes():
    strided = dataclasses.replace(PLAIN, element_strides=(4, 3, 1))
    assert PLAIN.extents == (32, 8, 1)
    assert PLAIN.box_bytes == 32 * 8 * 4
    # The stride of the first dimension does not matter.
    assert strided.extents == (32, 3, 1)
    assert strided.box_bytes == 32 * 3 * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": 8}, ("does not start at a multiple of 16", "0x8")),
        ({"element_type": 16}, ("unknown element type", "16")),
        ({"interleave": 1}, ("interleaved",)),
        ({"swizzle": 7}, ("unknown swizzle",)),
        ({"sizes": (100, 0, 3)}, ("empty or too large", "(100, 0, 3)")),
        ({"sizes": (2**32 + 1, 1, 3)}, ("empty or too large",)),
        ({"strides": (24, 65536)}, ("(24, 65536) bytes", "multiples of 16")),
        ({"strides": (16, 2**40)}, ("below 2**40",)),
        ({"box": (32, 0, 1)}, ("the box is empty or too large",)),
        ({"box": (32, 257, 1)}, ("extents from 1 to 256",)),
        ({"box": (3, 1, 1)}, ("not whole 16-byte pieces", "12 bytes per row")),
        ({"element_strides": (1, 9, 1)}, ("element strides",)),
        ({"element_strides": (0, 1, 1)}, ("element strides",)),
        ({"swizzle": 2}, ("longer than the swizzle", "128 bytes per row, swizzle of 64")),
        ({"element_type": 2, "nan_fill": True}, ("filled with NaN", "u32")),
    ],
)
def test_limits(change, words):
    with pytest.raises(InvalidValueError) as caught:
        dataclasses.replace(PLAIN, **change).check()
    for word in ("wrong tensor map", *words):
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"sizes": (1, 2**32, 1)},
        {"strides": (0, 2**40 - 16)},
        {"box": (256, 256, 256)},
        {"element_strides": (8, 8, 8)},
        {"swizzle": 3},
        {"swizzle": 1, "box": (4, 1, 1)},
        {"nan_fill": True},
    ],
)
def test_what_is_within_the_limits(change):
    dataclasses.replace(PLAIN, **change).check()


# Parameters of compiled kernels -------------------------------------------------------------------


def parameter(dtype, code, shape, strides, box, swizzle=16):
    buffer = Buffer(BufferKind.INPUT, 0, shape, dtype)
    return TensorMapParameter(buffer, code, shape, strides, box, swizzle)


CODES = [
    (jnp.int8, 1, 0, 1, 1),
    (jnp.int16, 2, 1, 2, 1),
    (jnp.uint32, 3, 2, 4, 1),
    (jnp.uint64, 4, 4, 8, 1),
    (jnp.float16, 5, 6, 2, 1),
    (jnp.float32, 6, 7, 4, 1),
    (jnp.bfloat16, 7, 9, 2, 1),
    (ml_dtypes.int4, 0, 0, 1, 2),
    (ml_dtypes.int2, 8, 0, 1, 4),
    (jnp.int32, 9, 3, 4, 1),
    (jnp.int64, 10, 5, 8, 1),
]


@pytest.mark.parametrize(("dtype", "code", "number", "size", "packed"), CODES)
def test_from_a_parameter(dtype, code, number, size, packed):
    shape, strides, box = (6, 40, 256), (20480, 512, 1), (2, 8, 64 * packed)
    found = TensorMap.from_parameter(parameter(dtype, code, shape, strides, box, 16), 0x1000)
    assert found.element_type == number
    assert found.address == 0x1000
    assert found.sizes == (256 // packed, 40, 6)
    assert found.strides == (512 // packed * size, 20480 // packed * size)
    assert found.box == (64, 8, 2)
    assert (found.swizzle, found.nan_fill, found.interleave) == (0, False, 0)
    found.check()


@pytest.mark.parametrize(("span", "number"), [(16, 0), (32, 1), (64, 2), (128, 3)])
def test_swizzles_of_parameters(span, number):
    one = parameter(jnp.float32, 6, (64, 64), (64, 1), (8, 4), span)
    assert TensorMap.from_parameter(one, 0).swizzle == number


def test_parameters_that_the_driver_refuses():
    with pytest.raises(InvalidValueError, match="rows of the tile are not whole 16-byte pieces"):
        TensorMap.from_parameter(parameter(jnp.float32, 6, (64,), (1,), (3,)), 0)


# Swizzles -----------------------------------------------------------------------------------------

TABLES = {
    1: "01234567 10325476",
    2: "01234567 10325476 23016745 32107654",
    3: "01234567 10325476 23016745 32107654 45670123 54761032 67452301 76543210",
    4: "01234567 23016745 45670123 67452301",
    6: "01234567 45670123",
}
"""Which 16 bytes of a line are in each place, line by line: PTX ISA 5.5.7."""


@pytest.mark.parametrize("number", TABLES)
def test_swizzles(number):
    swizzle = SWIZZLES[number]
    lines = TABLES[number].split()
    assert swizzle.period == 128 * len(lines)
    for start in (0, 5 * swizzle.period):
        for line, places in enumerate(lines):
            for piece in range(8):
                address = start + 128 * line + 16 * piece
                target = start + 128 * line + 16 * places.index(str(piece))
                assert swizzle.apply(address) == target
                assert swizzle.apply(address + 7) == target + 7


def test_swizzle_that_swaps_halves():
    plain, flipped = SWIZZLES[4], SWIZZLES[5]
    addresses = np.arange(1024)
    expected = np.where(addresses // 128 % 2, plain.apply(addresses) ^ 8, plain.apply(addresses))
    np.testing.assert_array_equal(flipped.apply(addresses), expected)


# tensormap.replace --------------------------------------------------------------------------------


def replacements(tensor, space="global", address="%array0"):
    """PTX that changes all fields to those of a tensor map."""
    number = {code: number for number, code in PTX_ELEMENT_TYPES.items()}[tensor.element_type]
    mode = min(tensor.swizzle, 3)
    rank = tensor.rank
    values = [
        ("global_address", "b64", tensor.address),
        ("rank", "b32", rank - 1),
        ("elemtype", "b32", number),
        ("interleave_layout", "b32", 0),
        ("swizzle_mode", "b32", mode),
        ("swizzle_atomicity", "b32", tensor.swizzle - mode),
        ("fill_mode", "b32", int(tensor.nan_fill)),
        *[("global_dim", "b32", f"{n}, {tensor.sizes[n]}") for n in range(rank)],
        *[("box_dim", "b32", f"{n}, {tensor.box[n]}") for n in range(rank)],
        *[("element_stride", "b32", f"{n}, {tensor.element_strides[n]}") for n in range(rank)],
        *[("global_stride", "b64", f"{n}, {tensor.strides[n]}") for n in range(rank - 1)],
    ]
    where = f".{space}" if space else ""
    return "\n".join(
        f"tensormap.replace.tile.{name}{where}.b1024.{kind} [{address}], {value};"
        for name, kind, value in values
    )


@pytest.mark.parametrize("space", ["global", ""])
def test_programs_change_all_fields(space):
    random = np.random.default_rng(1)
    for _ in range(20):
        tensor = random_map(random)
        sizes = tuple(min(size, 2**32 - 1) for size in tensor.sizes)
        tensor = dataclasses.replace(tensor, sizes=sizes)
        memory = np.zeros(BYTES, np.uint8)
        run_body(replacements(tensor, space), memory, block=32)
        assert TensorMap.decode(memory.tobytes()) == tensor
        assert memory.tobytes() == tensor.encode()


def test_one_field_changes_and_others_stay():
    memory = np.frombuffer(PLAIN.encode(), np.uint8).copy()
    body = """
    .reg .b32 %r0;
    mov.u32 %r0, 77;
    tensormap.replace.tile.global_dim.global.b1024.b32 [%array0], 1, %r0;
    """
    run_body(body, memory, block=32)
    expected = dataclasses.replace(PLAIN, sizes=(100, 77, 3))
    assert TensorMap.decode(memory.tobytes()) == expected


def test_copies_to_global_memory():
    # Each warp copies a tensor map of its own.
    maps = np.random.default_rng(2).integers(0, 256, (8, BYTES), np.uint8)
    out = np.zeros((8, BYTES), np.uint8)
    body = """
    .shared .align 128 .b8 maps[512];
    .reg .b32 %r<6>;
    .reg .b64 %a<4>;
    mul.wide.u32 %a0, %prologue0, 512;
    mul.wide.u32 %a1, %prologue2, 4;
    add.u64 %a1, %a1, %a0;
    add.u64 %a1, %a1, %array0;
    ld.global.b32 %r0, [%a1];
    mov.u32 %r1, maps;
    mad.lo.u32 %r2, %prologue2, 4, %r1;
    st.shared.b32 [%r2], %r0;
    bar.sync 0;
    shr.u32 %r3, %prologue2, 5;
    mad.lo.u32 %r4, %r3, 128, %r1;
    mul.wide.u32 %a2, %r3, 128;
    add.u64 %a2, %a2, %a0;
    add.u64 %a2, %a2, %array1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [%a2], [%r4], 128;
    """
    run_body(body, maps, out, grid=2)
    np.testing.assert_array_equal(out, maps)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "tensormap.replace.tile.rank.global.b1024.b32 [%array0], 5;",
            ("thread 0 of block (0, 0, 0) gives a tensor map a wrong .rank", "at most 4"),
        ),
        (
            "tensormap.replace.tile.box_dim.global.b1024.b32 [%array0], 0, 65536;",
            ("wrong .box_dim", "got: 65536"),
        ),
        (
            "tensormap.replace.tile.rank.global.b1024.b32 [%array0+16], 1;",
            ("misaligned", "multiple of 64"),
        ),
        (
            "tensormap.replace.tile.rank.global.b1024.b32 [%array0+192], 1;",
            ("out of bounds", "128 bytes at global address"),
        ),
    ],
)
def test_wrong_changes(body, words):
    with pytest.raises(SimulationError) as caught:
        run_body(body, np.zeros(2 * BYTES, np.uint8), block=32)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "tensormap.replace.tile.rank.global.b1024.b64 [%array0], 1;",
        "tensormap.replace.tile.global_address.global.b1024.b32 [%array0], 1;",
        "tensormap.replace.tile.rank.global.b1024.b32 [%array0], 0, 1;",
        "tensormap.replace.tile.box_dim.global.b1024.b32 [%array0], 1;",
        "tensormap.replace.tile.box_dim.global.b1024.b32 [%array0], 5, 1;",
        "tensormap.replace.tile.global_stride.global.b1024.b64 [%array0], 4, 16;",
        "tensormap.replace.tile.box_dim.global.b1024.b32 [%array0], %r0, 1;",
        "tensormap.replace.tile.elemtype.global.b1024.b32 [%array0], 13;",
        "tensormap.replace.tile.swizzle_mode.global.b1024.b32 [%array0], 4;",
        "tensormap.replace.tile.fill_mode.global.b1024.b32 [%array0], %r0;",
        "tensormap.replace.tile.colour.global.b1024.b32 [%array0], 1;",
        "tensormap.replace.tile.rank.global.b32 [%array0], 1;",
        "tensormap.replace.rank.global.b1024.b32 [%array0], 1;",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
        " [%array0], [%r0], 64;",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.aligned"
        " [%array0], [%r0], 128;",
    ],
)
def test_unknown_forms(body):
    with pytest.raises(PtxError) as caught:
        run_body(".reg .b32 %r0;\n" + body, np.zeros(BYTES, np.uint8), block=32)
    assert isinstance(caught.value, PallasiteError)


def test_fields_do_not_overlap():
    taken = np.zeros(BYTES, np.int64)
    for field in FIELDS.values():
        assert field.offset % field.size == 0
        taken[field.offset : field.offset + field.size * field.count] += 1
    assert taken.max() == 1
