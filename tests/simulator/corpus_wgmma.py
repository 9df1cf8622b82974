"""Warpgroup products: every combination of types, A from either place, every layout of operands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from corpus import Case, generator
from wgmma_forms import FORMS, LAYOUTS, initial, plain, register_kind, suffix, tail
from wgmma_programs import (
    DEPTH,
    DTYPES,
    WAIT,
    accumulator_words,
    descriptor_code,
    listed,
    load_words,
    multiplicand_words,
    program,
    random_values,
    store,
    store_words,
)

ABSOLUTE = {"f32": 2.0**-18, "f16": 2.0**-6}
"""How far sums of around 20 may be off: the hardware cuts bits off while it adds, the simulator
rounds the exact result once."""

EIGHT_BITS = 2.0**-7
"""The same for sums of products of 8-bit floats, which the hardware keeps with fewer bits."""


def cases() -> Iterator[Case]:
    """All of them."""
    for kinds in FORMS:
        for in_registers in (False, True):
            yield form(kinds, in_registers)
    for name in LAYOUTS:
        yield layout(name)


def form(kinds: tuple[str, str, str], in_registers: bool) -> Case:
    """``D = A B + D`` with 16 columns."""
    d, a_kind, b_kind = kinds
    name = f"wgmma {'.'.join(kinds)}{' registers' if in_registers else ''}"
    random, n = generator(name), 16
    a, b = random_values(random, a_kind, 64), random_values(random, b_kind, n)
    matrix_a, matrix_b = plain(64, 0), plain(n, 2048)
    image = np.zeros((1, 4096), np.uint8)
    store(image[0], matrix_a, a)
    store(image[0], matrix_b, b)
    held = accumulator_words(initial(random, d, n))
    count = held.shape[1]
    code = [
        *descriptor_code("a", matrix_a),
        *descriptor_code("b", matrix_b),
        *load_words("ra", 4, 0),
        *load_words("d", count, 4, register_kind(d)),
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n{n}k{DEPTH[a_kind]}.{'.'.join(kinds)}{suffix(kinds)}"
        f" {listed('d', count)}, {listed('ra', 4) if in_registers else '%a'}, %b,"
        f" {tail(kinds, in_registers=in_registers)};",
        *WAIT,
        *store_words("d", count, 0),
    ]
    words = np.concatenate([multiplicand_words(a, a_kind), held], axis=1)
    if d == "s32":
        return finished(name, code, image, words, count)
    absolute = max(ABSOLUTE[d], EIGHT_BITS if a_kind.startswith("e") else 0)
    return finished(name, code, image, words, count, {"f32": "f4", "f16": "f2"}[d], absolute)


def layout(name: str) -> Case:
    """Both operands in one layout; small integers, so that the result is exact."""
    random, n = generator(name), 64
    a, b = (random.integers(-4, 5, (64, 16)).astype(DTYPES["f16"]) for _ in range(2))
    matrix_a, matrix_b = LAYOUTS[name](64, 0), LAYOUTS[name](n, 32768)
    image = random.integers(0, 60, (1, 65536), np.uint8)
    store(image[0], matrix_a, a)
    store(image[0], matrix_b, b)
    kinds = ("f32", "f16", "f16")
    transposed = (int(matrix_a.transposed), int(matrix_b.transposed))
    code = [
        *descriptor_code("a", matrix_a),
        *descriptor_code("b", matrix_b),
        ".reg .f32 %d<32>;",
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {listed('d', 32)}, %a, %b,"
        f" {tail(kinds, '0', transposed=transposed)};",
        *WAIT,
        *store_words("d", 32, 0),
    ]
    return finished(f"wgmma layout {name}", code, image, np.zeros((128, 1), np.uint32), 32)


def finished(
    name: str,
    code: list[str],
    image: np.ndarray,
    words: np.ndarray,
    outputs: int,
    result: str = "u4",
    absolute: float | None = None,
) -> Case:
    """The case of a program, which compares bit for bit unless a difference is allowed."""
    made = program(code, image, words, outputs)
    count = 4 * outputs * len(words) // np.dtype(result).itemsize
    return Case(
        name,
        made.ptx,
        (made.arrays[0], made.arrays[1]),
        (np.dtype(result), count),
        block=made.block,
        shared=made.shared,
        ulp=None if absolute is None else 0,
        absolute=absolute or 0.0,
    )
