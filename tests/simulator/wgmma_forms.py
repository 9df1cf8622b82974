"""Forms of ``wgmma.mma_async``: types, layouts of operands, what stands behind the descriptors."""

from __future__ import annotations

import numpy as np
from wgmma_programs import RESULTS, Matrix

FORMS = [
    ("f32", "f16", "f16"),
    ("f16", "f16", "f16"),
    ("f32", "bf16", "bf16"),
    ("f32", "tf32", "tf32"),
    *[(d, a, b) for d in ("f32", "f16") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")],
    *[("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")],
    ("s32", "b1", "b1"),
]


def plain(rows, start, transposed=False):
    """A matrix without swizzling that starts somewhere; for transposed ones, K is 16."""
    if transposed:
        return Matrix(0, True, leading=rows * 16, stride=128, start=start)
    return Matrix(0, False, leading=rows * 16, stride=128, start=start)


def suffix(kinds):
    return ".and.popc" if kinds[1] == "b1" else ""


def tail(kinds, scale="%yes", signs=(1, 1), transposed=(0, 0), in_registers=False):
    """Operands behind the descriptors."""
    parts = [scale]
    if kinds[0] != "s32":
        parts += [str(one) for one in signs]
    if kinds[1] in ("f16", "bf16"):
        parts += [str(one) for one in transposed[in_registers:]]
    return ", ".join(parts)


def initial(random, kind, n):
    if kind == "s32":
        return random.integers(-(2**31), 2**31, (64, n)).astype(np.int32)
    return (random.standard_normal((64, n)) * 3).astype(RESULTS[kind])


def register_kind(kind):
    return {"f32": "f32", "s32": "b32", "f16": "b32"}[kind]


def layouts():
    """Matrices of 64 or 128 rows: (name, transposed, how to place one of this many rows)."""
    for swizzle in (32, 64, 128):
        # Several instructions' worth of K side by side.
        for advance in range(0, swizzle, 32):
            yield (
                f"K-{swizzle}-{advance}",
                lambda rows, start, s=swizzle, x=advance: Matrix(s, False, 16, 8 * s, start, x),
            )
        # Groups of eight rows further apart.
        yield (
            f"K-{swizzle}-spread",
            lambda rows, start, s=swizzle: Matrix(s, False, 16, 16 * s, start),
        )
    yield "K-0-tight", lambda rows, start: Matrix(0, False, 128, 256, start)
    yield "K-0-odd", lambda rows, start: Matrix(0, False, 128 * (rows // 8) + 48, 128, start + 16)
    for swizzle in (32, 64, 128):
        yield (
            f"MN-{swizzle}",
            lambda rows, start, s=swizzle: Matrix(s, True, 16 * s, 8 * s, start),
        )
        yield (
            f"MN-{swizzle}-other",
            lambda rows, start, s=swizzle: Matrix(s, True, 8 * s, 8 * s * (2 * rows // s), start),
        )
    yield "MN-0", lambda rows, start: Matrix(0, True, 128, 256, start)
    yield "MN-0-other", lambda rows, start: Matrix(0, True, 16 * rows, 128, start)


LAYOUTS = dict(layouts())
