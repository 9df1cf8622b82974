"""Floats: arithmetic with every rounding, approximations, conversions, comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from corpus import Case, floats, integers
from corpus_integers import dtype_of
from simulator_support import elementwise_ptx

WIDTH = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4, "tf32": 4}
ELEMENT = {"f16x2": "f16", "bf16x2": "bf16", "tf32": "f32"}

# Twice the documented largest errors of the approximations, in units of the last place or absolute
# (PTX ISA 9.7.3): hardware and simulator may each be that far from the truth.
APPROXIMATIONS = (
    ("rcp.approx.f32", 2, 0.0),
    ("rcp.approx.ftz.f32", 2, 0.0),
    ("sqrt.approx.f32", 2, 0.0),
    ("sqrt.approx.ftz.f32", 2, 0.0),
    ("rsqrt.approx.f32", 2.2, 0.0),
    ("rsqrt.approx.ftz.f32", 2.2, 0.0),
    ("ex2.approx.f32", 4, 0.0),
    ("ex2.approx.ftz.f32", 4, 0.0),
    ("lg2.approx.f32", 4, 2.0**-21),
    ("lg2.approx.ftz.f32", 4, 2.0**-21),
    ("sin.approx.f32", 0, 2.0**-19.5),
    ("cos.approx.f32", 0, 2.0**-19.5),
    ("tanh.approx.f32", 2.0**13, 0.0),
)


def bits_of(name: str, kind: str, count: int = 256, spread: float = 0.5) -> np.ndarray:
    """Random bits of a float type, or of two in one register."""
    if kind.endswith("x2"):
        halves = floats(name, ELEMENT[kind], 2 * count, spread)
        return halves.view(np.uint32)
    return floats(name, ELEMENT.get(kind, kind), count, spread)


def unsigned(kind: str) -> np.dtype:
    """The register's type."""
    return np.dtype(f"u{WIDTH[kind]}") if kind in WIDTH else dtype_of(kind)


def case(
    name: str,
    code: str,
    kinds: str,
    result: str,
    *,
    ulp: float | None = None,
    absolute: float = 0.0,
    spread: float = 0.5,
) -> Case:
    """An elementwise program; kinds are types of floats, integers or ``pred``."""
    inputs = []
    for letter, kind in zip("abce", kinds.split(), strict=False):
        if kind in WIDTH:
            inputs.append(bits_of(f"{name} {letter}", kind, spread=spread))
        elif kind == "pred":
            inputs.append(integers(f"{name} {letter}", np.uint8) & 1)
        else:
            inputs.append(integers(f"{name} {letter}", dtype_of(kind)))
    types = [np.dtype(bool) if k == "pred" else unsigned(k) for k in kinds.split()]
    ptx = elementwise_ptx(code, types, np.dtype(bool) if result == "pred" else unsigned(result))
    kept = np.dtype("u1") if result == "pred" else unsigned(result)
    if ulp is not None:
        kept = np.dtype(f"f{WIDTH[result]}")
    return Case(
        name, ptx, tuple(inputs), (kept, len(inputs[0])), grid=2, ulp=ulp, absolute=absolute
    )


def operation(full: str, kind: str, operands: int, **options: float) -> Case:
    """``full d, a, b, c`` on one type."""
    listed = ", ".join(["{a}", "{b}", "{c}"][:operands])
    return case(full, f"{full} {{d}}, {listed};", " ".join([kind] * operands), kind, **options)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from exact()
    yield from halves()
    yield from order()
    yield from approximations()
    yield from between_floats()
    yield from with_integers()
    yield from small_floats()
    yield from comparisons()


ROUNDINGS = ("rn", "rz", "rm", "rp")


def exact() -> Iterator[Case]:
    for rounding in ROUNDINGS:
        for ending in ("f32", "ftz.f32", "sat.f32", "ftz.sat.f32", "f64"):
            kind = ending[-3:]
            for name, operands in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
                yield operation(f"{name}.{rounding}.{ending}", kind, operands)
            if "sat" in ending:
                continue
            for name, operands in (("div", 2), ("rcp", 1), ("sqrt", 1)):
                yield operation(f"{name}.{rounding}.{ending}", kind, operands)
    for name, operands in (("add", 2), ("mul", 2), ("mad.rn", 3)):
        yield operation(f"{name}.f32", "f32", operands)
    yield case(
        "fma.rn.f64 near", "fma.rn.f64 {d}, {a}, {b}, {c};", "f64 f64 f64", "f64", spread=0.0
    )
    yield case(
        "fma.rn.f32 near", "fma.rn.f32 {d}, {a}, {b}, {c};", "f32 f32 f32", "f32", spread=0.0
    )


def halves() -> Iterator[Case]:
    for kind in ("f16", "f16x2"):
        for middle in ("", ".ftz", ".sat", ".ftz.sat"):
            for name, operands in (("add.rn", 2), ("sub.rn", 2), ("mul.rn", 2), ("fma.rn", 3)):
                yield operation(f"{name}{middle}.{kind}", kind, operands)
        yield operation(f"fma.rn.relu.{kind}", kind, 3)
    for kind in ("bf16", "bf16x2"):
        for name, operands in (("add.rn", 2), ("sub.rn", 2), ("mul.rn", 2), ("fma.rn", 3)):
            yield operation(f"{name}.{kind}", kind, operands)
        yield operation(f"fma.rn.relu.{kind}", kind, 3)
    for kind in ("f16", "bf16", "f16x2", "bf16x2"):
        yield operation(f"neg.{kind}", kind, 1)
        yield operation(f"abs.{kind}", kind, 1)


def order() -> Iterator[Case]:
    for name in ("min", "max"):
        for middle in ("", ".ftz", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs", ".ftz.NaN"):
            yield operation(f"{name}{middle}.f32", "f32", 2)
        yield operation(f"{name}.f64", "f64", 2)
        for kind in ("f16", "bf16", "f16x2", "bf16x2"):
            for middle in ("", ".NaN", ".xorsign.abs"):
                yield operation(f"{name}{middle}.{kind}", kind, 2)
    for kind in ("f32", "f64"):
        for name, operands in (("abs", 1), ("neg", 1), ("copysign", 2)):
            yield operation(f"{name}.{kind}", kind, operands)
        for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            full = f"testp.{test}.{kind}"
            yield case(full, f"{full} {{d}}, {{a}};", kind, "pred")
    for name in ("abs", "neg"):
        yield operation(f"{name}.ftz.f32", "f32", 1)


def approximations() -> Iterator[Case]:
    for full, ulp, absolute in APPROXIMATIONS:
        made = operation(full, "f32", 1, ulp=ulp, absolute=absolute, spread=0.4)
        if full[:3] in ("sin", "cos"):
            # Their error has a bound within one period to either side of zero.
            angles = np.random.default_rng(len(full)).uniform(-2 * np.pi, 2 * np.pi, 256)
            angles[:6] = 0, -0.0, np.inf, -np.inf, np.nan, 1e-40
            inputs = (angles.astype(np.float32).view(np.uint32),)
            made = dataclasses.replace(made, inputs=inputs)
        yield made
    for full in ("div.approx.f32", "div.full.f32"):
        yield operation(full, "f32", 2, ulp=4, spread=0.0)
    # Of subnormal results, the last place is always worth this much.
    yield operation("ex2.approx.f16", "f16", 1, ulp=2.2, absolute=2.0**-24, spread=0.0)
    yield operation("tanh.approx.f16", "f16", 1, ulp=0, absolute=2.0**-9.98, spread=0.0)
    yield operation("rcp.approx.ftz.f64", "f64", 1, ulp=2.0**33, spread=0.0)
    yield operation("rsqrt.approx.ftz.f64", "f64", 1, ulp=2.0**33, spread=0.0)
    yield operation("rsqrt.approx.f64", "f64", 1, ulp=2.0**33, spread=0.0)


def between_floats() -> Iterator[Case]:
    def convert(modifiers: str, target: str, source: str) -> Case:
        full = f"cvt{modifiers}.{target}.{source}"
        return case(full, f"{full} {{d}}, {{a}};", source, target)

    for rounding in ROUNDINGS:
        yield convert(f".{rounding}", "f32", "f64")
        yield convert(f".{rounding}.ftz", "f32", "f64")
        yield convert(f".{rounding}", "f16", "f64")
        yield convert(f".{rounding}", "f16", "f32")
    for modifiers in (".rn.ftz", ".rn.sat", ".rn.ftz.sat", ".rn.relu", ".rz.relu"):
        yield convert(modifiers, "f16", "f32")
    for modifiers in (".rn", ".rz", ".rn.relu", ".rz.relu"):
        yield convert(modifiers, "bf16", "f32")
    for target, source in (("f32", "f16"), ("f64", "f32"), ("f64", "f16"), ("f32", "bf16")):
        yield convert("", target, source)
    for modifiers in (".ftz", ".sat", ".ftz.sat"):
        yield convert(modifiers, "f32", "f16")
    for modifiers in (".rna", ".rn", ".rz", ".rn.relu", ".rz.relu"):
        yield convert(modifiers, "tf32", "f32")
    for rounding in ("rni", "rzi", "rmi", "rpi"):
        for kind in ("f32", "f64", "f16"):
            yield convert(f".{rounding}", kind, kind)
        yield convert(f".{rounding}.ftz", "f32", "f32")
        yield convert(f".{rounding}.sat", "f32", "f32")
    for target in ("f16x2", "bf16x2"):
        for modifiers in (".rn", ".rz", ".rn.relu", ".rz.relu"):
            full = f"cvt{modifiers}.{target}.f32"
            yield case(full, f"{full} {{d}}, {{a}}, {{b}};", "f32 f32", target)


def with_integers() -> Iterator[Case]:
    kinds = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
    for source in kinds:
        origin = source if source[1:] != "8" else f"{source[0]}16"
        for target in ("f16", "f32", "f64", "bf16"):
            if target == "bf16" and source[1:] == "8":
                continue
            for rounding in ROUNDINGS if target != "bf16" else ("rn",):
                full = f"cvt.{rounding}.{target}.{source}"
                yield case(full, f"{full} {{d}}, {{a}};", origin, target)
    for target in kinds:
        result = target if target[1:] != "8" else f"{target[0]}16"
        for source in ("f16", "f32", "f64"):
            for rounding in ("rni", "rzi", "rmi", "rpi"):
                full = f"cvt.{rounding}.{target}.{source}"
                yield case(full, f"{full} {{d}}, {{a}};", source, result)
        full = f"cvt.rzi.ftz.{target}.f32"
        yield case(full, f"{full} {{d}}, {{a}};", "f32", result)
    yield case("cvt.rzi.sat.u32.f32", "cvt.rzi.sat.u32.f32 {d}, {a};", "f32", "u32")


def small_floats() -> Iterator[Case]:
    for kind in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            full = f"cvt.rn.satfinite{relu}.{kind}"
            yield case(f"{full}.f32", f"{full}.f32 {{d}}, {{a}}, {{b}};", "f32 f32", "u16")
            near = f"{full}.f32 near"
            yield case(near, f"{full}.f32 {{d}}, {{a}}, {{b}};", "f32 f32", "u16", spread=0.0)
            yield case(f"{full}.f16x2", f"{full}.f16x2 {{d}}, {{a}};", "f16x2", "u16")
            back = f"cvt.rn{relu}.f16x2.{kind}"
            yield case(back, f"{back} {{d}}, {{a}};", "u16", "f16x2")


def comparisons() -> Iterator[Case]:
    names = ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in ("f32", "f64", "f16", "bf16"):
        for name in (*names, *[f"{one}u" for one in names], "num", "nan"):
            full = f"setp.{name}.{kind}"
            yield case(full, f"{full} {{d}}, {{a}}, {{b}};", f"{kind} {kind}", "pred")
    for name in ("lt", "equ"):
        full = f"setp.{name}.ftz.f32"
        yield case(full, f"{full} {{d}}, {{a}}, {{b}};", "f32 f32", "pred")
        yield case(
            f"set.{name}.f32.f32", f"set.{name}.f32.f32 {{d}}, {{a}}, {{b}};", "f32 f32", "f32"
        )
        yield case(
            f"set.{name}.u32.f32", f"set.{name}.u32.f32 {{d}}, {{a}}, {{b}};", "f32 f32", "u32"
        )
    both = """
        .reg .pred %p, %q;
        setp.NAME.KIND %p|%q, {a}, {b};
        selp.b32 {d}, 1, 0, %p;
        @%q add.u32 {d}, {d}, 2;
    """
    for kind in ("f16x2", "bf16x2"):
        for name in ("lt", "geu"):
            code = both.replace("NAME", name).replace("KIND", kind)
            yield case(f"setp.{name}.{kind}", code, f"{kind} {kind}", "u32")
    yield case("selp.f32", "selp.f32 {d}, {a}, {b}, {c};", "f32 f32 pred", "f32")
    yield case("slct.f32.f32", "slct.f32.f32 {d}, {a}, {b}, {c};", "f32 f32 f32", "f32")
