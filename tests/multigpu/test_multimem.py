"""Instructions on the memory of all devices: every type, vector and operation of PTX."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pallasite_simulator import PtxError, SimulationError
from pallasite_simulator.devices.joint import SharedState, run_devices
from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.launch import Launch, Pointer
from pallasite_simulator.programs import load

THREADS = 32
DEVICES = 3

_DTYPES = {
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}

_INTEGERS = [("add", one) for one in ("u32", "s32", "u64")] + [
    (operation, one) for operation in ("min", "max") for one in ("u32", "s32", "u64", "s64")
]
_BITS = [(operation, one) for operation in ("and", "or", "xor") for one in ("b32", "b64")]
_VECTORS = {
    "f32": ("", "v2", "v4"),
    "f64": ("",),
    "f16": ("v2", "v4", "v8"),
    "bf16": ("v2", "v4", "v8"),
    "f16x2": ("", "v2", "v4"),
    "bf16x2": ("", "v2", "v4"),
    "e4m3": ("v4", "v8"),
    "e5m2": ("v4", "v8"),
    "e4m3x2": ("v2", "v4", "v8"),
    "e5m2x2": ("v2", "v4", "v8"),
    "e4m3x4": ("", "v2", "v4"),
    "e5m2x4": ("", "v2", "v4"),
}


def _loads():
    for operation, kind in _INTEGERS + _BITS:
        yield operation, "", "", kind
    for kind, vectors in _VECTORS.items():
        base = kind.partition("x")[0]
        for vector in vectors:
            yield "add", "", vector, kind
            if base in ("f16", "bf16"):
                yield "add", "acc::f32", vector, kind
            if base in ("e4m3", "e5m2"):
                yield "add", "acc::f16", vector, kind
            if base not in ("f32", "f64"):
                yield "min", "", vector, kind
                yield "max", "", vector, kind


def _registers(kind, vector):
    """Declarations, the operand, and bytes of an access."""
    base, _, parts = kind.partition("x")
    bits = 8 * np.dtype(_DTYPES[base]).itemsize * int(parts or 1)
    count = int(vector[1:] or 1)
    letter = kind if kind in ("f32", "f64") else f"b{bits}"
    names = [f"%v{place}" for place in range(count)]
    declared = "".join(f".reg .{letter} {name}; " for name in names)
    operand = "{" + ", ".join(names) + "}" if count > 1 else names[0]
    return declared, operand, bits * count // 8, letter, names


def _program(body, target="sm_100a"):
    return f"""
    .version 8.8
    .target {target}
    .address_size 64
    .visible .entry kernel(.param .u64 .ptr p_data, .param .u64 .ptr p_out, .param .u64 .ptr p_far)
    {{
    .reg .b64 %data, %out, %far, %distance, %offset;
    .reg .b32 %thread;
    ld.param.u64 %data, [p_data];
    ld.param.u64 %out, [p_out];
    ld.param.u64 %far, [p_far];
    ld.global.u64 %distance, [%far];
    mov.u32 %thread, %tid.x;
    {body}
    ret;
    }}"""


def _run(text, data, out_bytes):
    """Runs on each device with its row of ``data`` (which may be changed); what they put out."""
    program = load(text, "kernel")
    outs = [np.zeros(out_bytes, np.uint8) for _ in data]
    far = [np.zeros(1, np.uint64) for _ in data]
    launches = [
        Launch(
            program,
            Geometry((1, 1, 1), (THREADS, 1, 1), device=device),
            [Pointer(rows, "data"), Pointer(outs[device], "out"), Pointer(far[device], "far")],
        )
        for device, rows in enumerate(data)
    ]

    def fill(addresses, multicast):
        for one, distance in zip(far, multicast, strict=True):
            one[0] = distance % 2**64
        return {}

    run_devices(launches, SharedState({}, fill))
    return outs


def _values(kind, count, seed):
    base = kind.partition("x")[0]
    dtype = np.dtype(_DTYPES[base])
    generator = np.random.default_rng(seed)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        whole = generator.integers(
            limits.min, limits.max, (DEVICES, count), dtype=dtype, endpoint=True
        )
        return whole
    return (generator.standard_normal((DEVICES, count)) * 4).astype(dtype)


def _expected(values, operation, accumulator):
    if values.dtype.kind in "iu":
        ufunc = {
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[operation]
        return ufunc.reduce(values, axis=0, dtype=values.dtype)
    if operation != "add":
        wide = values.astype(np.float64)
        return (wide.min(axis=0) if operation == "min" else wide.max(axis=0)).astype(values.dtype)
    wider = {"acc::f32": np.float32, "acc::f16": np.float16}.get(accumulator, values.dtype)
    if values.dtype.itemsize == 1:
        wider = np.float16
    total = values[0].astype(wider)
    for one in values[1:]:
        total = (total + one.astype(wider)).astype(wider)
    return total.astype(values.dtype)


@pytest.mark.parametrize("case", _loads(), ids="-".join)
def test_loads_that_reduce(case):
    operation, accumulator, vector, kind = case
    declared, operand, size, letter, names = _registers(kind, vector)
    name = ".".join(part for part in (operation, accumulator, vector, kind) if part)
    stores = "\n".join(
        f"st.global.{letter} [%out+{place * size // len(names)}], {one};"
        for place, one in enumerate(names)
    )
    text = _program(
        f"""{declared}
        mul.wide.u32 %offset, %thread, {size};
        add.s64 %data, %data, %offset;
        add.s64 %data, %data, %distance;
        add.s64 %out, %out, %offset;
        multimem.ld_reduce.relaxed.sys.global.{name} {operand}, [%data];
        {stores}"""
    )
    base = np.dtype(_DTYPES[kind.partition("x")[0]])
    values = _values(kind, THREADS * size // base.itemsize, seed=7)
    outs = _run(text, list(values.copy()), THREADS * size)
    expected = _expected(values, operation, accumulator)
    for out in outs:
        np.testing.assert_array_equal(out, expected.view(np.uint8))


def _updates():
    for operation, kind in _INTEGERS + _BITS:
        yield operation, "", kind
    for kind in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        for vector in _VECTORS[kind]:
            yield "add", vector, kind


@pytest.mark.parametrize("case", _updates(), ids="-".join)
def test_updates(case):
    operation, vector, kind = case
    declared, operand, size, letter, names = _registers(kind, vector)
    name = ".".join(part for part in (operation, vector, kind) if part)
    loads = "\n".join(
        f"ld.global.{letter} {one}, [%far+{8 + place * size // len(names)}];"
        for place, one in enumerate(names)
    )
    base = np.dtype(_DTYPES[kind.partition("x")[0]])
    text = _program(
        f"""{declared}
        mul.wide.u32 %offset, %thread, {size};
        add.s64 %data, %data, %offset;
        add.s64 %data, %data, %distance;
        add.s64 %far, %far, %offset;
        {loads}
        multimem.red.relaxed.sys.global.{name} [%data], {operand};"""
    )
    program = load(text, "kernel")
    count = THREADS * size // base.itemsize
    held, given = _values(kind, count, 1), _values(kind, count, 2)
    data = held.copy()
    far = [np.concatenate([np.zeros(8, np.uint8), one.view(np.uint8)]) for one in given]
    launches = [
        Launch(
            program,
            Geometry((1, 1, 1), (THREADS, 1, 1), device=device),
            [Pointer(data[device], "data"), None, Pointer(far[device], "far")],
        )
        for device in range(DEVICES)
    ]

    def fill(addresses, multicast):
        for one, distance in zip(far, multicast, strict=True):
            one[:8] = np.array([distance % 2**64], np.uint64).view(np.uint8)
        return {}

    run_devices(launches, SharedState({}, fill))
    for device in range(DEVICES):
        expected = _expected(np.stack([held[device], *given]), operation, "")
        np.testing.assert_array_equal(data[device].view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(
    "kind, vector",
    [("b32", ""), ("u64", ""), *((kind, one) for kind, each in _VECTORS.items() for one in each)],
)
def test_stores(kind, vector):
    declared, operand, size, letter, names = _registers(kind, vector)
    loads = "\n".join(
        f"ld.global.{letter} {one}, [%out+{place * size // len(names)}];"
        for place, one in enumerate(names)
    )
    name = ".".join(part for part in (vector, kind) if part)
    text = _program(
        f"""{declared}
        mul.wide.u32 %offset, %thread, {size};
        add.s64 %data, %data, %offset;
        add.s64 %data, %data, %distance;
        add.s64 %out, %out, %offset;
        {loads}
        multimem.st.weak.global.{name} [%data], {operand};"""
    )
    program = load(text, "kernel")
    generator = np.random.default_rng(3)
    given = generator.integers(0, 255, THREADS * size).astype(np.uint8)
    data = [np.zeros(THREADS * size, np.uint8) for _ in range(DEVICES)]
    far = [np.zeros(1, np.uint64) for _ in range(DEVICES)]
    launches = [
        Launch(
            program,
            Geometry((1, 1, 1), (THREADS, 1, 1), device=device),
            [
                Pointer(data[device], "data"),
                Pointer(given.copy(), "given"),
                Pointer(far[device], "far"),
            ],
        )
        for device in range(DEVICES)
    ]

    def fill(addresses, multicast):
        for one, distance in zip(far, multicast, strict=True):
            one[0] = distance % 2**64
        return {}

    run_devices(launches, SharedState({}, fill))
    for one in data:
        np.testing.assert_array_equal(one, given)


@pytest.mark.parametrize(
    "text, message",
    [
        ("ld_reduce.relaxed.sys.global.min.f32 %f, [%data]", "wrong operation or type"),
        ("ld_reduce.relaxed.sys.global.add.s64 %d, [%data]", "wrong operation or type"),
        ("ld_reduce.relaxed.sys.global.add.f16 %h, [%data]", "no such vectors"),
        ("ld_reduce.relaxed.sys.global.add.v8.f32 %f, [%data]", "no such vectors"),
        ("ld_reduce.relaxed.global.add.f32 %f, [%data]", "needs a scope"),
        ("ld_reduce.release.sys.global.add.f32 %f, [%data]", "no such order"),
        ("ld_reduce.relaxed.sys.add.acc::f32.f32 %f, [%data]", "not accumulated like that"),
        ("red.acquire.sys.global.add.f32 [%data], %f", "no such order"),
        ("red.relaxed.sys.global.add.e4m3x4 [%data], %r", "wrong operation or type"),
    ],
)
def test_forms_that_there_are_not(text, message):
    registers = ".reg .f32 %f; .reg .b64 %d; .reg .b16 %h; .reg .b32 %r;"
    with pytest.raises(PtxError, match=message):
        load(_program(f"{registers} multimem.{text};"), "kernel")


def test_other_addresses():
    text = _program(".reg .f32 %f; multimem.ld_reduce.relaxed.sys.global.add.f32 %f, [%data];")
    with pytest.raises(SimulationError, match="uses an address that is no multicast address"):
        _run(text, list(np.zeros((DEVICES, 4), np.float32)), 4)
    text = _program(".reg .f32 %f; add.s64 %data, %data, %distance; ld.global.f32 %f, [%data];")
    with pytest.raises(SimulationError, match="a multicast address, which only multimem"):
        _run(text, list(np.zeros((DEVICES, 4), np.float32)), 4)
