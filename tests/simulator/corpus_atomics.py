"""Atomic operations on floats: what hardware does with subnormal numbers, zeros and NaN."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from corpus import Case, floats, generator
from simulator_support import body_ptx

THREADS = 256

# Type of the operation to the bytes of a vector's element, and the type of its floats.
TYPES = {
    "f32": (4, "f32"),
    "f64": (8, "f64"),
    "f16": (2, "f16"),
    "bf16": (2, "bf16"),
    "f16x2": (4, "f16"),
    "bf16x2": (4, "bf16"),
}
SPACES = ("global", "shared", "shared::cluster", "generic", "generic shared")


def cases() -> Iterator[Case]:
    """All of them."""
    for kind in TYPES:
        for space in SPACES:
            yield update(space, "add", kind)
            yield update(space, "add", kind, opcode="red")
    for kind, count in (("f32", 2), ("f32", 4), ("f16", 4), ("bf16", 8), ("bf16x2", 4)):
        yield update("global", "add", kind, count)
        yield update("global", "add", kind, count, opcode="red")
        yield update("generic", "add", kind, count)
    for operation in ("min", "max"):
        for kind, count in (("f16", 2), ("bf16", 4), ("f16x2", 2), ("bf16x2", 4), ("f16", 8)):
            yield update("global", operation, kind, count)
            yield update("global", operation, kind, count, opcode="red")


def update(space: str, operation: str, kind: str, count: int = 1, opcode: str = "atom") -> Case:
    """Each thread updates a place of its own, and stores there what was read before.

    The result is the old values of all threads, then the new ones.
    """
    width, element = TYPES[kind]
    size = width * count
    bits = 8 * width
    vector = f".v{count}" if count > 1 else ""
    noftz = "" if kind in ("f32", "f64") else ".noftz"
    name = f"{opcode}.{space}.{operation}{vector}.{kind}"
    inputs = pairs(name, element, THREADS * size)

    def listed(letter: str) -> str:
        names = [f"%{letter}{number}" for number in range(count)]
        return "{" + ", ".join(names) + "}" if count > 1 else names[0]

    def load(space: str, letter: str, place: str) -> str:
        return "\n".join(
            f"ld.{space}{part}.b{bits} {names}, [{place}+{offset}];"
            for part, names, offset in parts(letter, count, width)
        )

    def store(space: str, letter: str, place: str) -> str:
        return "\n".join(
            f"st.{space}{part}.b{bits} [{place}+{offset}], {names};"
            for part, names, offset in parts(letter, count, width)
        )

    named = {"generic": "", "generic shared": ""}.get(space, f".{space}")
    old = f"{listed('o')}, " if opcode == "atom" else ""
    code = [
        ".reg .b64 %a, %b, %old, %new, %at; .reg .b32 %place;",
        f".reg .b{bits} %x<{count}>, %y<{count}>, %o<{count}>, %n<{count}>;",
        f"mul.wide.u32 %at, %thread, {size};",
        "add.s64 %a, %array0, %at;",
        "add.s64 %b, %array1, %at;",
        "add.s64 %old, %array2, %at;",
        f"add.s64 %new, %old, {THREADS * size};",
        load("global", "x", "%a"),
        load("global", "y", "%b"),
    ]
    memory, place, where = "global", "%new", "%new"
    if "shared" in space:
        memory, place = "shared", "%place"
        where = "%place" if named else "%at"
        code += [
            f"mul.lo.u32 %place, %thread, {size};",
            "mov.u32 %prologue0, dynamic;",
            "add.u32 %place, %place, %prologue0;",
            "cvt.u64.u32 %at, %place;",
            "cvta.shared.u64 %at, %at;",
        ]
    code.append(store(memory, "x", place))
    if opcode == "red":
        code += [f"mov.b{bits} %o{number}, 0;" for number in range(count)]
    code += [
        f"{opcode}{named}.{operation}{noftz}{vector}.{kind} {old}[{where}], {listed('y')};",
        load(memory, "n", place),
        store("global", "o", "%old"),
        store("global", "n", "%new"),
    ]
    shared = THREADS * size if "shared" in space else 0
    return Case(
        f"{name} of a place",
        body_ptx("\n".join(code), 3, shared=shared),
        inputs,
        (np.dtype(f"u{bits // 8}"), 2 * THREADS * count),
        block=THREADS,
        shared=shared,
    )


def parts(letter: str, count: int, width: int) -> list[tuple[str, str, int]]:
    """Loads and stores of ``count`` registers, at most four each: the vector's part of the
    instruction, the registers, and the offset."""
    found = []
    for first in range(0, count, 4):
        names = [f"%{letter}{number}" for number in range(first, min(first + 4, count))]
        vector = f".v{len(names)}" if len(names) > 1 else ""
        listed = "{" + ", ".join(names) + "}" if vector else names[0]
        found.append((vector, listed, first * width))
    return found


def pairs(name: str, element: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of floats' bits with ``size`` bytes, where many pairs are close or special."""
    first = floats(f"{name} a", element, size, 0.3)[: size // TYPES[element][0]]
    second = floats(f"{name} b", element, len(first), 0.3)
    random = generator(name)
    sign = second.dtype.type(1 << (8 * second.itemsize - 1))
    near = first ^ random.integers(0, 4, len(first)).astype(first.dtype) ^ sign
    second = np.where(random.random(len(first)) < 0.2, near, second)
    small = first.dtype.type((1 << {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}[element]) - 1)
    tiny = random.random(len(first)) < 0.2
    return np.where(tiny, first & (small | sign), first), np.where(
        tiny, second & (small | sign), second
    )
