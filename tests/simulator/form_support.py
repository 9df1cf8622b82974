"""Instructions of single threads against references that are computed with Python's integers."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from cubin import assemble
from simulator_support import body_ptx, run_elementwise

from pallasite_simulator.programs import load


@dataclasses.dataclass(frozen=True)
class Form:
    """One instruction with its modifiers.

    Attributes:
      name: dotted.
      operands: types of the sources (``"u32"``, ``"pred"``).
      result: type of the destination.
      reference: from Python integers (of the types' sign) to one, of which the lower bits count.
      pools: for operands (by number), the values to try instead of all kinds of them.
      extra: further operands as written, behind the others.
    """

    name: str
    operands: tuple[str, ...]
    result: str
    reference: Callable[..., int]
    pools: dict[int, Sequence[int]] = dataclasses.field(default_factory=dict)
    extra: str = ""

    def __str__(self) -> str:
        return self.name + self.extra

    @property
    def code(self) -> str:
        """The instruction for ``run_elementwise``."""
        sources = ", ".join(f"{{{letter}}}" for letter in "abce"[: len(self.operands)])
        return f"{self.name} {{d}}, {sources}{self.extra};"


def dtype_of(kind: str) -> np.dtype:
    """NumPy's type of ``u32``, ``s16``, ``b64`` or ``pred``."""
    if kind == "pred":
        return np.dtype(bool)
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")


def values_of(kind: str, count: int, seed: int) -> list[int]:
    """Values of all magnitudes of a type, with its extremes among them."""
    generator = random.Random(f"{kind} {seed}")
    if kind == "pred":
        return [generator.randrange(2) for _ in range(count)]
    bits = int(kind[1:])
    found = []
    for _ in range(count):
        value = generator.choice(edges(kind)) if generator.random() < 0.4 else None
        if value is None:
            value = generator.getrandbits(generator.randint(1, bits))
            value ^= -generator.randrange(2)
        found.append(wrapped(value, kind))
    return found


def edges(kind: str) -> list[int]:
    """Extreme values of an integer type, and small ones."""
    bits = int(kind[1:])
    top = 1 << bits - 1
    close = [0, 1, 2, 3, 5, -1, -2, -7, top, top - 1, top + 1, 1 << bits // 2, (1 << bits // 2) - 1]
    return [wrapped(one, kind) for one in close]


def wrapped(value: int, kind: str) -> int:
    """The lower bits of an integer, as a value of a type."""
    if kind == "pred":
        return int(bool(value))
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> bits - 1 else value


def inputs_of(form: Form, count: int = 600) -> list[list[int]]:
    """Values for each operand: pairs of extremes, then values of all kinds."""
    columns = [values_of(kind, count, number) for number, kind in enumerate(form.operands)]
    if len(form.operands) == 2 and "pred" not in form.operands:
        pairs = list(itertools.product(*[edges(kind) for kind in form.operands]))
        columns = [
            [pair[number] for pair in pairs] + column for number, column in enumerate(columns)
        ]
    for number, pool in form.pools.items():
        generator = random.Random(number)
        columns[number] = [generator.choice(pool) for _ in columns[number]]
    return columns


def check(form: Form, **options: str) -> None:
    """Runs an instruction on many values and compares with the reference."""
    columns = inputs_of(form)
    arrays = [
        np.array(column, dtype_of(kind))
        for column, kind in zip(columns, form.operands, strict=True)
    ]
    found = run_elementwise(form.code, arrays, dtype_of(form.result), **options)
    expected = [wrapped(form.reference(*row), form.result) for row in zip(*columns, strict=True)]
    wrong = [
        (row, int(one), other)
        for row, one, other in zip(zip(*columns, strict=True), found, expected, strict=True)
        if int(one) != other
    ]
    assert not wrong, f"{form}: {wrong[:5]}"


REGISTERS = (
    ".reg .pred %p<4>; .reg .b8 %b<4>; .reg .b16 %h<5>; .reg .b32 %r<6>; .reg .b64 %x<6>;"
    " .reg .b128 %q<3>; .reg .f32 %f<4>; .reg .f64 %g<4>;"
    " .local .align 8 .b32 here[4];"
)
VARIABLES = (
    ".global .align 8 .b32 everywhere[4]; .const .align 8 .b32 fixed[4];"
    " .shared .align 8 .b32 ours[4];"
)


def bind(*lines: str, target: str = "sm_90a") -> None:
    """Loads a kernel with these instructions, on the registers and variables above."""
    load(ptx_of(*lines, target=target))


def ptx_of(*lines: str, target: str = "sm_90a") -> str:
    """A kernel with these instructions."""
    return body_ptx("\n".join([REGISTERS, *lines]), 1, variables=VARIABLES, target=target)


def assemble_forms(forms: Sequence[Form], folder: Path, target: str = "sm_90a") -> None:
    """Checks that ptxas knows all of the instructions."""
    lines = []
    for form in forms:
        used = {"pred": 0, "16": 0, "32": 0, "64": 0}
        names = []
        for kind in (form.result, *form.operands):
            size = kind if kind == "pred" else kind[1:]
            letter = {"pred": "p", "16": "h", "32": "r", "64": "x"}[size]
            names.append(f"%{letter}{used[size]}")
            used[size] += 1
        lines.append(f"{form.name} {', '.join(names)}{form.extra};")
    assemble(ptx_of(*lines, target=target), folder, target)
