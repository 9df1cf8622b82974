"""Integers, logic, bit fields, moves, comparisons: every instruction, modifier and type."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from corpus import Case, integers
from simulator_support import elementwise_ptx

BITS = {"b": "u", "u": "u", "s": "i"}


def dtype_of(kind: str) -> np.dtype:
    """NumPy's type for ``u32``, ``s64``, ``b16`` or ``pred``."""
    if kind == "pred":
        return np.dtype(bool)
    return np.dtype(f"{BITS[kind[0]]}{int(kind[1:]) // 8}")


def case(name: str, code: str, kinds: str, result: str, **limits: tuple[int, int]) -> Case:
    """An elementwise program; ``kinds`` lists the types of ``{a}``, ``{b}`` and so on.

    ``limits`` says from where to where an input goes (both included), by letter.
    """
    inputs = []
    for letter, kind in zip("abce", kinds.split(), strict=False):
        dtype = dtype_of(kind)
        values = integers(f"{name} {letter}", np.dtype("u1") if kind == "pred" else dtype)
        if kind == "pred":
            values = values & 1
        if letter in limits:
            low, high = limits[letter]
            values = (values.astype(object) % (high - low + 1) + low).astype(dtype)
        inputs.append(values)
    types = [dtype_of(kind) for kind in kinds.split()]
    ptx = elementwise_ptx(code, types, dtype_of(result))
    kept = np.dtype("u1") if result == "pred" else dtype_of(result)
    return Case(name, ptx, tuple(inputs), (kept, len(inputs[0])), grid=2)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from arithmetic()
    yield from wide_arithmetic()
    yield from bit_fields()
    yield from logic()
    yield from packed()
    yield from comparisons()
    yield from conversions()


def simple(
    name: str, types: tuple[str, ...], operands: int, **limits: tuple[int, int]
) -> Iterator[Case]:
    letters = ["{a}", "{b}", "{c}"][:operands]
    for kind in types:
        full = f"{name}.{kind}"
        yield case(
            full,
            f"{full} {{d}}, {', '.join(letters)};",
            " ".join([kind] * operands),
            kind,
            **limits,
        )


ALL = ("u16", "s16", "u32", "s32", "u64", "s64")
SIGNED = ("s16", "s32", "s64")


def arithmetic() -> Iterator[Case]:
    for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
        yield from simple(name, ALL, 2)
    yield from simple("mad.lo", ALL, 3)
    yield from simple("mad.hi", ("u32", "s32", "u64", "s64"), 3)
    yield from simple("sad", ALL, 3)
    for name in ("abs", "neg"):
        yield from simple(name, SIGNED, 1)
    for name in ("add.sat", "sub.sat"):
        yield from simple(name, ("s32",), 2)
    yield from simple("mad.hi.sat", ("s32",), 3)
    for kind in ALL:
        high = 2 ** (int(kind[1:]) - 1) - 1
        for name in ("div", "rem"):
            full = f"{name}.{kind}"
            # Neither zero nor, where the quotient overflows, -1.
            yield case(full, f"{full} {{d}}, {{a}}, {{b}};", f"{kind} {kind}", kind, b=(1, high))
            small = f"{full} small divisors"
            yield case(small, f"{full} {{d}}, {{a}}, {{b}};", f"{kind} {kind}", kind, b=(1, 100))
    for kind in ("u32", "s32"):
        for form in ("lo", "hi"):
            yield from simple(f"mul24.{form}", (kind,), 2)
            yield from simple(f"mad24.{form}", (kind,), 3)
        yield case(
            f"dp4a.{kind}.{kind}",
            f"dp4a.{kind}.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
            f"{kind} {kind} {kind}",
            kind,
        )
        for form in ("lo", "hi"):
            full = f"dp2a.{form}.{kind}.{kind}"
            yield case(full, f"{full} {{d}}, {{a}}, {{b}}, {{c}};", f"{kind} {kind} {kind}", kind)
    yield case("dp4a.u32.s32", "dp4a.u32.s32 {d}, {a}, {b}, {c};", "u32 u32 s32", "s32")
    yield case("dp2a.lo.s32.u32", "dp2a.lo.s32.u32 {d}, {a}, {b}, {c};", "s32 s32 s32", "s32")


def wide_arithmetic() -> Iterator[Case]:
    for kind, result in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
        yield case(
            f"mul.wide.{kind}", f"mul.wide.{kind} {{d}}, {{a}}, {{b}};", f"{kind} {kind}", result
        )
        yield case(
            f"mad.wide.{kind}",
            f"mad.wide.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
            f"{kind} {kind} {result}",
            result,
        )
    sum64 = """
        .reg .b32 %al, %ah, %bl, %bh, %dl, %dh;
        mov.b64 {{%al, %ah}}, {a};
        mov.b64 {{%bl, %bh}}, {b};
        %s.cc.u32 %dl, %al, %bl;
        %sc.u32 %dh, %ah, %bh;
        mov.b64 {d}, {{%dl, %dh}};
    """
    for name in ("add", "sub"):
        code = sum64.replace("%sc.u32", f"{name}c.u32").replace("%s.cc", f"{name}.cc")
        yield case(f"{name}.cc chain", code, "u64 u64", "u64")
    product = """
        .reg .b32 %lo, %hi, %al, %ah;
        mov.b64 {{%al, %ah}}, {c};
        mad.lo.cc.u32 %lo, {a}, {b}, %al;
        madc.hi.u32 %hi, {a}, {b}, %ah;
        mov.b64 {d}, {{%lo, %hi}};
    """
    yield case("mad.cc chain", product, "u32 u32 u64", "u64")


def bit_fields() -> Iterator[Case]:
    for kind, bits in (("b32", 32), ("b64", 64)):
        for name in ("popc", "clz"):
            yield case(f"{name}.{kind}", f"{name}.{kind} {{d}}, {{a}};", kind, "u32")
        yield case(f"brev.{kind}", f"brev.{kind} {{d}}, {{a}};", kind, kind)
        yield case(
            f"bfi.{kind}",
            f"bfi.{kind} {{d}}, {{a}}, {{b}}, {{c}}, {{e}};",
            f"{kind} {kind} u32 u32",
            kind,
            c=(0, bits + 9),
            e=(0, bits + 9),
        )
    for kind in ("u32", "s32", "u64", "s64"):
        bits = int(kind[1:])
        yield case(f"bfind.{kind}", f"bfind.{kind} {{d}}, {{a}};", kind, "u32")
        yield case(f"bfind.shiftamt.{kind}", f"bfind.shiftamt.{kind} {{d}}, {{a}};", kind, "u32")
        yield case(
            f"bfe.{kind}",
            f"bfe.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
            f"{kind} u32 u32",
            kind,
            b=(0, bits + 9),
            c=(0, bits + 9),
        )
    yield case("fns.b32", "fns.b32 {d}, {a}, {b}, {c};", "b32 u32 s32", "u32", b=(0, 31), c=(-8, 8))
    for mode in ("clamp", "wrap"):
        yield case(
            f"bmsk.{mode}.b32",
            f"bmsk.{mode}.b32 {{d}}, {{a}}, {{b}};",
            "u32 u32",
            "u32",
            a=(0, 70),
            b=(0, 70),
        )
        for kind in ("u32", "s32"):
            full = f"szext.{mode}.{kind}"
            yield case(full, f"{full} {{d}}, {{a}}, {{b}};", f"{kind} u32", kind, b=(0, 70))
    yield case("prmt.b32", "prmt.b32 {d}, {a}, {b}, {c};", "b32 b32 b32", "b32")
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        yield case(
            f"prmt.b32.{mode}", f"prmt.b32.{mode} {{d}}, {{a}}, {{b}}, {{c}};", "b32 b32 b32", "b32"
        )


def logic() -> Iterator[Case]:
    for name in ("and", "or", "xor"):
        yield from simple(name, ("b16", "b32", "b64", "pred"), 2)
    for name in ("not", "cnot"):
        yield from simple(name, ("b16", "b32", "b64"), 1)
    yield from simple("not", ("pred",), 1)
    for kind in ("b16", "b32", "b64"):
        yield case(
            f"shl.{kind}", f"shl.{kind} {{d}}, {{a}}, {{b}};", f"{kind} u32", kind, b=(0, 80)
        )
    for kind in ALL:
        yield case(
            f"shr.{kind}", f"shr.{kind} {{d}}, {{a}}, {{b}};", f"{kind} u32", kind, b=(0, 80)
        )
    for side in ("l", "r"):
        for mode in ("clamp", "wrap"):
            full = f"shf.{side}.{mode}.b32"
            yield case(full, f"{full} {{d}}, {{a}}, {{b}}, {{c}};", "b32 b32 u32", "b32", c=(0, 80))
    for table in (0x96, 0xE8, 0xCA, 0x1B, 0x00, 0xFE):
        yield case(
            f"lop3.b32 {table:#x}",
            f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};",
            "b32 b32 b32",
            "b32",
        )
    for kind in ("b16", "b32", "b64"):
        yield case(
            f"selp.{kind}", f"selp.{kind} {{d}}, {{a}}, {{b}}, {{c}};", f"{kind} {kind} pred", kind
        )
        yield case(
            f"slct.{kind}.s32",
            f"slct.{kind}.s32 {{d}}, {{a}}, {{b}}, {{c}};",
            f"{kind} {kind} s32",
            kind,
        )
    pack = "mov.b64 {{%lo, %hi}}, {a}; mov.b64 {d}, {{%hi, %lo}};"
    yield case("mov.b64 pair", ".reg .b32 %lo, %hi; " + pack, "b64", "b64")
    quarter = "mov.b64 {{%w, %x, %y, %z}}, {a}; mov.b64 {d}, {{%y, %z, %x, %w}};"
    yield case("mov.b64 quarters", ".reg .b16 %w, %x, %y, %z; " + quarter, "b64", "b64")
    half = "mov.b32 {{%w, %x}}, {a}; mov.b32 {d}, {{%x, %w}};"
    yield case("mov.b32 halves", ".reg .b16 %w, %x; " + half, "b32", "b32")


def packed() -> Iterator[Case]:
    for kind in ("u16x2", "s16x2"):
        for name in ("add", "min", "max"):
            yield case(f"{name}.{kind}", f"{name}.{kind} {{d}}, {{a}}, {{b}};", "b32 b32", "b32")
    for name in ("min", "max"):
        yield case(
            f"{name}.relu.s16x2", f"{name}.relu.s16x2 {{d}}, {{a}}, {{b}};", "b32 b32", "b32"
        )
        yield case(f"{name}.relu.s32", f"{name}.relu.s32 {{d}}, {{a}}, {{b}};", "s32 s32", "s32")


def comparisons() -> Iterator[Case]:
    for kind in (*ALL, "b32"):
        names = ("eq", "ne") if kind[0] == "b" else ("eq", "ne", "lt", "le", "gt", "ge")
        for name in names:
            yield case(
                f"setp.{name}.{kind}",
                f"setp.{name}.{kind} {{d}}, {{a}}, {{b}};",
                f"{kind} {kind}",
                "pred",
            )
    for name in ("lo", "ls", "hi", "hs"):
        yield case(f"setp.{name}.u32", f"setp.{name}.u32 {{d}}, {{a}}, {{b}};", "u32 u32", "pred")
    for operator in ("and", "or", "xor"):
        full = f"setp.lt.{operator}.s32"
        yield case(full, f"{full} {{d}}, {{a}}, {{b}}, {{c}};", "s32 s32 pred", "pred")
        code = f"{full} {{d}}, {{a}}, {{b}}, !{{c}};"
        yield case(f"{full} negated", code, "s32 s32 pred", "pred")
    both = """
        .reg .pred %p, %q;
        setp.le.xor.u32 %p|%q, {a}, {b}, {c};
        selp.b32 {d}, 1, 0, %p;
        @%q add.u32 {d}, {d}, 2;
    """
    yield case("setp.le.xor.u32 both", both, "u32 u32 pred", "u32")
    for kind in ("u32", "s32"):
        for name in ("eq", "gt"):
            full = f"set.{name}.u32.{kind}"
            yield case(full, f"{full} {{d}}, {{a}}, {{b}};", f"{kind} {kind}", "u32")


def narrows(source: str, target: str) -> bool:
    """Whether a target does not have all values of a source."""
    bits = int(target[1:]) - int(source[1:])
    if source[0] == target[0]:
        return bits < 0
    return source[0] == "s" or bits <= 0


def conversions() -> Iterator[Case]:
    types = ("u8", "s8", *ALL)
    for source in types:
        for target in types:
            if source == target:
                continue
            for suffix in ("", ".sat") if narrows(source, target) else ("",):
                full = f"cvt{suffix}.{target}.{source}"
                # 8-bit results are in 16-bit registers, whose upper half has the sign.
                result = target if target[1:] != "8" else f"{target[0]}16"
                origin = source if source[1:] != "8" else f"{source[0]}16"
                yield case(full, f"{full} {{d}}, {{a}};", origin, result)
