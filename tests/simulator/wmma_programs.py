"""Programs with ``wmma``."""

from __future__ import annotations

import numpy as np
from mma_programs import BITS, DTYPES, extents, listed
from simulator_support import body_ptx

COUNTS = {
    # Registers of A and B by type, and by shape where that matters.
    "f16": {"m16n16k16": (8, 8), "m32n8k16": (8, 8), "m8n32k16": (8, 8)},
    "bf16": {"m16n16k16": (4, 4), "m32n8k16": (8, 2), "m8n32k16": (2, 8)},
    "s8": {"m16n16k16": (2, 2), "m32n8k16": (4, 1), "m8n32k16": (1, 4)},
    "u8": {"m16n16k16": (2, 2), "m32n8k16": (4, 1), "m8n32k16": (1, 4)},
    "tf32": {"m16n16k8": (4, 4)},
    "f64": {"m8n8k4": (1, 1)},
    "s4": {"m8n8k32": (1, 1)},
    "u4": {"m8n8k32": (1, 1)},
    "b1": {"m8n8k128": (1, 1)},
}
"""PTX ISA 9.7.14.4.1, by the type of A and B and the shape."""

FORMS = [
    *[(s, d, "f16", c) for s in COUNTS["f16"] for d in ("f16", "f32") for c in ("f16", "f32")],
    *[(s, "f32", "bf16", "f32") for s in COUNTS["bf16"]],
    ("m16n16k8", "f32", "tf32", "f32"),
    ("m8n8k4", "f64", "f64", "f64"),
    *[(s, "s32", kind, "s32") for kind in ("s8", "u8") for s in COUNTS["s8"]],
    *[("m8n8k32", "s32", kind, "s32") for kind in ("s4", "u4")],
    ("m8n8k128", "s32", "b1", "s32"),
]
"""Shapes and types of D, of A and B, and of C."""


def accumulator_count(shape: str, kind: str) -> int:
    """Registers of C or D."""
    m, n, _ = extents(shape)
    return m * n // 32 // (2 if kind == "f16" else 1)


def register_kind(kind: str) -> str:
    return {"f32": "f32", "f64": "f64", "s32": "s32"}.get(kind, "b32")


def stored(values: np.ndarray, kind: str, layout: str, stride: int) -> np.ndarray:
    """Bytes of matrices (..., rows, columns) in memory, with a stride in elements."""
    lines = values if layout == "row" else values.swapaxes(-1, -2)
    padded = np.zeros((*lines.shape[:-1], stride), lines.dtype)
    padded[..., : lines.shape[-1]] = lines
    bits = BITS[kind]
    if bits >= 8:
        dtype = DTYPES.get(kind, np.uint8)
        if kind in ("s8", "u8"):
            padded = padded.astype(np.int64) & 255
        return np.ascontiguousarray(padded.astype(dtype)).view(np.uint8)
    parts = (padded.astype(np.int64) & ((1 << bits) - 1)).astype(np.uint8)
    parts = parts.reshape(*parts.shape[:-1], -1, 8 // bits)
    return (parts << (np.arange(8 // bits) * bits).astype(np.uint8)).sum(axis=-1).astype(np.uint8)


def product_ptx(
    shape: str,
    kinds: tuple[str, str, str],
    layouts: tuple[str, str, str],
    strides: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    name: str = "",
    space: str = "global",
) -> str:
    """A kernel in which each warp loads A, B and C, multiplies, and stores D over C's layout.

    Args:
      shape: of the product.
      kinds: types of D, of A and B, and of C.
      layouts: of A, B, and C and D.
      strides: of A, B, and C and D.
      sizes: bytes of A, B, C and D of one warp.
      name: of the product, if it is not the plain one.
      space: of A; the others are in global memory.
    """
    d, a, c = kinds
    count_a, count_b = COUNTS[a][shape]
    counts = {"a": count_a, "b": count_b, "c": accumulator_count(shape, c)}
    types = {"a": a, "b": a, "c": c}
    body = [".reg .b64 %at<4>; .reg .b32 %warp;", "shr.u32 %warp, %thread, 5;"]
    for number, size in enumerate(sizes):
        body.append(
            f"mul.wide.u32 %at{number}, %warp, {size};"
            f" add.s64 %at{number}, %at{number}, %array{number};"
        )
    for number, letter in enumerate("abc"):
        body += [
            f".reg .{register_kind(types[letter])} %{letter}<{counts[letter]}>;",
            f"wmma.load.{letter}.sync.aligned.{layouts[number]}.{shape}.global.{types[letter]}"
            f" {listed(letter, counts[letter])}, [%at{number}], {strides[number]};",
        ]
    between = f"{d}.{c}" if a == "f16" else f"{d}.{a}.{a}.{c}"
    name = name or f"wmma.mma.sync.aligned.{layouts[0]}.{layouts[1]}.{shape}.{between}"
    count = accumulator_count(shape, d)
    body += [
        f".reg .{register_kind(d)} %d<{count}>;",
        f"{name} {listed('d', count)}, {listed('a', count_a)}, {listed('b', count_b)},"
        f" {listed('c', counts['c'])};",
        f"wmma.store.d.sync.aligned.{layouts[2]}.{shape}.global.{d} [%at3], {listed('d', count)},"
        f" {strides[2]};",
    ]
    return body_ptx("\n".join(body), 4)


def load_ptx(which: str, layout: str, shape: str, kind: str, count: int) -> str:
    """A kernel in which a warp loads a matrix and stores the registers as they are."""
    wide = kind == "f64"
    size = 8 if wide else 4
    body = [
        f".reg .b64 %at; .reg .{register_kind(kind)} %d<{count}>;",
        f"wmma.load.{which}.sync.aligned.{layout}.{shape}.global.{kind} {listed('d', count)},"
        " [%array0];",
        f"mul.wide.u32 %at, %thread, {count * size}; add.s64 %at, %at, %array1;",
        *[f"st.global.b{8 * size} [%at+{size * i}], %d{i};" for i in range(count)],
    ]
    return body_ptx("\n".join(body), 2)
