"""Programs with ``mma``: fragments are put together lane by lane.

Layouts are written down here from the PTX ISA once more, one element at a time, and share nothing
with the simulator.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from simulator_support import body_ptx

DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f64": np.float64,
    "f32": np.float32,
    "s32": np.int32,
}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "f32": 32, "s32": 32}
BITS |= {"e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}


# The layouts, from the figures and formulas of PTX ISA 9.7.14.5 -----------------------------------


def up_to(limits, values):
    """The value that belongs to the first limit above an index."""

    def find(i):
        for limit, value in zip(limits, values, strict=True):
            if i < limit:
                return value
        raise AssertionError(i)

    return find


def alternating(width):
    """Row offset of elements of A: 0 and 8 in turn, every ``width`` elements."""
    return up_to((width, 2 * width, 3 * width, 4 * width), (0, 8, 0, 8))


# For A: row offset and column of element i in lane 4g + t; for B: row (along K). By shape and bits.
A = {
    ("m16n8k8", 16): (alternating(2), lambda t, i: 2 * t + (i & 1)),
    ("m16n8k16", 16): (alternating(2), lambda t, i: 2 * t + (i & 1) + (8 if i >= 4 else 0)),
    ("m16n8k4", 32): (alternating(1), lambda t, i: t),
    ("m16n8k8", 32): (alternating(1), lambda t, i: t + (4 if i >= 2 else 0)),
    ("m8n8k16", 8): (lambda i: 0, lambda t, i: 4 * t + i),
    ("m16n8k16", 8): (alternating(4), lambda t, i: 4 * t + (i & 3)),
    ("m16n8k32", 8): (alternating(4), lambda t, i: 4 * t + (i & 3) + (16 if i >= 8 else 0)),
    ("m8n8k32", 4): (lambda i: 0, lambda t, i: 8 * t + i),
    ("m16n8k32", 4): (alternating(8), lambda t, i: 8 * t + (i & 7)),
    ("m16n8k64", 4): (alternating(8), lambda t, i: 8 * t + (i & 7) + (32 if i >= 16 else 0)),
    ("m8n8k128", 1): (lambda i: 0, lambda t, i: 32 * t + i),
    ("m16n8k128", 1): (alternating(32), lambda t, i: 32 * t + (i & 31)),
    ("m16n8k256", 1): (alternating(32), lambda t, i: 32 * t + (i & 31) + (128 if i >= 64 else 0)),
    ("m8n8k4", 64): (lambda i: 0, lambda t, i: t),
    ("m16n8k4", 64): (alternating(1), lambda t, i: t),
    ("m16n8k8", 64): (alternating(1), lambda t, i: t + (4 if i >= 2 else 0)),
    ("m16n8k16", 64): (
        lambda i: 8 if i % 2 else 0,
        lambda t, i: (2 * i if i % 2 == 0 else 2 * i - 2) + t,
    ),
}
B = {
    ("m16n8k8", 16): lambda t, i: 2 * t + i,
    ("m16n8k16", 16): lambda t, i: 2 * t + (i & 1) + (8 if i >= 2 else 0),
    ("m16n8k4", 32): lambda t, i: t,
    ("m16n8k8", 32): lambda t, i: t + (4 if i == 1 else 0),
    ("m8n8k16", 8): lambda t, i: 4 * t + i,
    ("m16n8k16", 8): lambda t, i: 4 * t + i,
    ("m16n8k32", 8): lambda t, i: 4 * t + (i & 3) + (16 if i >= 4 else 0),
    ("m8n8k32", 4): lambda t, i: 8 * t + i,
    ("m16n8k32", 4): lambda t, i: 8 * t + i,
    ("m16n8k64", 4): lambda t, i: 8 * t + (i & 7) + (32 if i >= 8 else 0),
    ("m8n8k128", 1): lambda t, i: 32 * t + i,
    ("m16n8k128", 1): lambda t, i: 32 * t + i,
    ("m16n8k256", 1): lambda t, i: 32 * t + (i & 31) + (128 if i >= 32 else 0),
    ("m8n8k4", 64): lambda t, i: t,
    ("m16n8k4", 64): lambda t, i: t,
    ("m16n8k8", 64): lambda t, i: t + 4 * i,
    ("m16n8k16", 64): lambda t, i: t + 4 * i,
}


def extents(shape):
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def places(shape, bits):
    """For A, B and C: rows and columns, by lane and element."""
    m, n, k = extents(shape)
    offset, column = A[shape, bits]
    row_b = B[shape, bits]

    def listed(count, place):
        return np.array(
            [[place(lane // 4, lane % 4, i) for i in range(count)] for lane in range(32)]
        )

    return (
        listed(m * k // 32, lambda g, t, i: (g + offset(i), column(t, i))),
        listed(n * k // 32, lambda g, t, i: (row_b(t, i), g)),
        listed(m * n // 32, lambda g, t, i: (g + (8 if i >= 2 else 0), 2 * t + (i & 1))),
    )


def packed(values, kind):
    """Registers of 32 (or 64) bits from elements, the last dimension of which a lane holds."""
    bits = BITS[kind]
    if bits >= 8:
        dtype = DTYPES.get(kind, np.uint8)
        held = np.ascontiguousarray(values.astype(dtype))
        return held.view(np.uint64 if bits == 64 else np.uint32)
    parts = (values.astype(np.int64) & ((1 << bits) - 1)).astype(np.uint64)
    parts = parts.reshape(*parts.shape[:-1], -1, 32 // bits)
    shifts = np.arange(32 // bits, dtype=np.uint64) * np.uint64(bits)
    return (parts << shifts).sum(axis=-1).astype(np.uint32)


def random_values(random, kind, shape):
    """Elements that the type holds, in double precision."""
    if kind in ("s32", "s8", "u8", "s4", "u4", "b1"):
        bits = BITS[kind]
        low = -(1 << (bits - 1)) if kind[0] == "s" else 0
        return random.integers(low, low + (1 << bits), shape).astype(np.float64)
    values = random.standard_normal(shape)
    if kind == "tf32":
        values = (values.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)
    return values.astype(DTYPES[kind]).astype(np.float64)


# Programs -----------------------------------------------------------------------------------------


def listed(prefix, count):
    return "{" + ", ".join(f"%{prefix}{number}" for number in range(count)) + "}"


def product_ptx(
    name: str, words: list[np.ndarray], results: int, kinds: tuple[str, str], setup: str = ""
) -> str:
    """A kernel in which all warps execute an instruction.

    It takes the registers of A, B and C, and where those of D go.

    Args:
      name: of the instruction.
      words: registers of A, B and C: arrays of shape (warps, 32, registers).
      results: how many registers D has.
      kinds: register types of D and C.
      setup: code before.
    """
    width = words[0].itemsize
    body = [".reg .b64 %at;", setup]
    for number, (letter, array) in enumerate(zip("abc", words, strict=True)):
        count, size = array.shape[-1], array.itemsize
        register = kinds[1] if letter == "c" else f"b{8 * width}"
        body += [
            f".reg .{register} %{letter}<{count}>;",
            f"mul.wide.u32 %at, %thread, {count * size}; add.s64 %at, %at, %array{number};",
            *[f"ld.global.b{8 * size} %{letter}{i}, [%at+{size * i}];" for i in range(count)],
        ]
    size = 8 if kinds[0] == "f64" else 4
    body += [
        f".reg .{kinds[0]} %d<{results}>;",
        f"{name} {listed('d', results)}, {listed('a', words[0].shape[-1])},"
        f" {listed('b', words[1].shape[-1])}, {listed('c', words[2].shape[-1])};",
        f"mul.wide.u32 %at, %thread, {results * size}; add.s64 %at, %at, %array3;",
        *[f"st.global.b{8 * size} [%at+{size * i}], %d{i};" for i in range(results)],
    ]
    return body_ptx("\n".join(body), 4)


def register_kind(kind: str) -> str:
    """The type of registers for accumulators."""
    return {"f16": "b32", "f32": "f32", "s32": "s32", "f64": "f64"}[kind]


def quarter_places(layouts, kind):
    """For A, B and C of ``m8n8k4``: rows and columns, by lane and element."""

    def of_a(lane, i):
        high = 4 if lane >= 16 else 0
        return (lane % 4 + high, i) if layouts[0] == "row" else (i % 4 + high, lane % 4)

    def of_b(lane, i):
        high = 4 if lane >= 16 else 0
        return (lane % 4, i + high) if layouts[1] == "row" else (i, lane % 4 + high)

    def of_c(lane, i):
        high = 4 if lane >= 16 else 0
        if kind == "f16":
            return lane % 4 + high, i
        row = (lane & 0b1) + (i & 0b10) + high
        return row, (i & 0b100) + (lane & 0b10) + (i & 0b1)

    return [
        np.array([[of(lane, i) for i in range(count)] for lane in range(32)])
        for of, count in ((of_a, 4), (of_b, 4), (of_c, 8))
    ]


FLOATS = [
    *[(f"m16n8k{k}", d, "f16", "f16") for k in (8, 16) for d in ("f16", "f32")],
    *[(f"m16n8k{k}", "f32", "bf16", "bf16") for k in (8, 16)],
    *[(f"m16n8k{k}", "f32", "tf32", "tf32") for k in (4, 8)],
    *[
        (f"m16n8k{k}", d, a, b)
        for k in (16, 32)
        for d in ("f16", "f32")
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
    ],
    *[(shape, "f64", "f64", "f64") for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")],
]
INTEGERS = [
    *[
        (shape, a, b)
        for shape in ("m8n8k16", "m16n8k16", "m16n8k32")
        for a in ("s8", "u8")
        for b in ("s8", "u8")
    ],
    *[
        (shape, a, b)
        for shape in ("m8n8k32", "m16n8k32", "m16n8k64")
        for a in ("s4", "u4")
        for b in ("s4", "u4")
    ],
]
