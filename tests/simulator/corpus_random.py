"""Random straight-line programs with branches: many instructions, fed by one another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from corpus import Case, floats, generator, integers
from simulator_support import body_ptx

PROGRAMS = 60
LENGTH = 30
THREADS = 128

INTEGER = (
    "add.u32 {d}, {a}, {b};",
    "sub.s32 {d}, {a}, {b};",
    "mul.lo.u32 {d}, {a}, {b};",
    "mul.hi.s32 {d}, {a}, {b};",
    "mad.lo.s32 {d}, {a}, {b}, {c};",
    "and.b32 {d}, {a}, {b};",
    "or.b32 {d}, {a}, {b};",
    "xor.b32 {d}, {a}, {b};",
    "not.b32 {d}, {a};",
    "shl.b32 {d}, {a}, {n};",
    "shr.u32 {d}, {a}, {n};",
    "shr.s32 {d}, {a}, {n};",
    "shf.l.wrap.b32 {d}, {a}, {b}, {c};",
    "lop3.b32 {d}, {a}, {b}, {c}, {table};",
    "prmt.b32 {d}, {a}, {b}, {n};",
    "bfe.u32 {d}, {a}, {n}, 9;",
    "bfi.b32 {d}, {a}, {b}, {n}, 7;",
    "popc.b32 {d}, {a};",
    "brev.b32 {d}, {a};",
    "clz.b32 {d}, {a};",
    "min.s32 {d}, {a}, {b};",
    "max.u32 {d}, {a}, {b};",
    "sad.s32 {d}, {a}, {b}, {c};",
    "dp4a.s32.u32 {d}, {a}, {b}, {c};",
    "abs.s32 {d}, {a};",
    "shfl.sync.bfly.b32 {d}, {a}, {n}, 31, -1;",
    "cvt.s32.s8 {d}, {a};",
    "cvt.u32.u16 {d}, {a};",
)
FLOAT = (
    "add.rn.f32 {d}, {a}, {b};",
    "sub.rz.f32 {d}, {a}, {b};",
    "mul.rn.f32 {d}, {a}, {b};",
    "fma.rn.f32 {d}, {a}, {b}, {c};",
    "fma.rp.f32 {d}, {a}, {b}, {c};",
    "min.f32 {d}, {a}, {b};",
    "max.NaN.f32 {d}, {a}, {b};",
    # Not neg and abs: of two in a row the assembler makes none, which shows in what NaN becomes.
    "sub.rn.f32 {d}, 0f00000000, {a};",
    "mul.rm.f32 {d}, {a}, 0f3FAAAAAB;",
    "div.rn.f32 {d}, {a}, {b};",
    "sqrt.rn.f32 {d}, {a};",
    "cvt.rn.f32.s32 {d}, {a};",
    "cvt.rni.s32.f32 {d}, {a};",
    "cvt.rn.f16x2.f32 {d}, {a}, {b};",
    "cvt.rn.bf16x2.f32 {d}, {a}, {b};",
    "fma.rn.f16x2 {d}, {a}, {b}, {c};",
    "add.rn.bf16x2 {d}, {a}, {b};",
    "cvt.rmi.f32.f32 {d}, {a};",
)
REGISTERS = 12


def cases() -> Iterator[Case]:
    """All of them."""
    for number in range(PROGRAMS):
        yield program(number)


def program(number: int) -> Case:
    """A program with its own seed: integers in even ones, floats too in odd ones."""
    name = f"random program {number}"
    random = generator(name)
    pool = INTEGER if number % 2 == 0 else (*FLOAT, *FLOAT, *INTEGER)
    lines = [f".reg .b32 %v<{REGISTERS}>; .reg .b64 %at; .reg .pred %p<{LENGTH}>;"]
    for register in range(4):
        lines += [
            f"add.s64 %at, %array{register}, %offset4;",
            f"ld.global.b32 %v{register}, [%at];",
        ]
    for register in range(4, REGISTERS):
        lines.append(f"add.u32 %v{register}, %v{register - 4}, {register};")

    def pick() -> str:
        return f"%v{random.integers(REGISTERS)}"

    def instruction(shuffles: bool) -> str:
        while True:
            text = pool[random.integers(len(pool))]
            if shuffles or "shfl" not in text:
                break
        return text.format(
            d=pick(),
            a=pick(),
            b=pick(),
            c=pick(),
            n=random.integers(32),
            table=random.integers(256),
        )

    for step in range(LENGTH):
        kind = random.integers(8)
        if kind == 0:
            lines += [
                f"setp.lt.s32 %p{step}, {pick()}, {pick()};",
                f"@%p{step} bra OTHER{step};",
                *[instruction(False) for _ in range(3)],
                f"bra JOIN{step};",
                f"OTHER{step}:",
                *[instruction(False) for _ in range(2)],
                f"JOIN{step}:",
            ]
        elif kind == 1:
            lines += [
                f"setp.ne.u32 %p{step}, {pick()}, {pick()};",
                f"@!%p{step} {instruction(False)}",
            ]
        else:
            lines.append(instruction(True))
    for register in range(1, REGISTERS):
        lines.append(f"mad.lo.u32 %v0, %v0, 31, %v{register};")
    lines += ["add.s64 %at, %array4, %offset4;", "st.global.b32 [%at], %v0;"]
    inputs = tuple(
        floats(f"{name} {letter}", "f32", THREADS, 0.2)
        if number % 2 and letter in "xy"
        else integers(f"{name} {letter}", np.uint32, THREADS)
        for letter in "xyzw"
    )
    return Case(name, body_ptx("\n".join(lines), 5), inputs, (np.dtype("u4"), THREADS))
