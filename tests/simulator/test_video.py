"""Video instructions, by their definitions (PTX ISA 9.7.17 and 9.7.18) in Python's integers."""

from __future__ import annotations

import operator
import random

import numpy as np
import pytest
from cubin import assemble
from simulator_support import module, run_ptx

ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "absdiff": lambda a, b: abs(a - b),
    "min": min,
    "max": max,
    "avrg": lambda a, b: (a + b + 1 if a + b >= 0 else a + b) >> 1,
}
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
SPECIAL = (0, 1, 31, 32, 33, 127, 128, 255, 32767, 32768, 65535, 2**31 - 1, 2**31, 2**32 - 1)


def field(value, first, bits, signed):
    value = value >> first & (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def clamp(value, bits, signed):
    least = -(1 << bits - 1) if signed else 0
    return min(max(value, least), least + (1 << bits) - 1)


class Maker:
    """Makes instructions for ``%r0 = f(%r1, %r2, %r3)``, and what they are in Python."""

    def __init__(self, seed):
        self.choose = random.Random(seed)

    def instruction(self):
        return self.choose.choice([self.scalar, self.scalar, self.mad, self.parts, self.parts])()

    def type(self):
        return self.choose.choice(["u32", "s32"])

    def part(self):
        text = self.choose.choice(["", "", ".b0", ".b1", ".b2", ".b3", ".h0", ".h1"])
        return text, *self.place(text)

    def place(self, text):
        bits = {"": 32, "b": 8, "h": 16}[text[1:2]]
        return int(text[2:] or 0) * bits, bits

    def scalar(self):
        pick = self.choose.choice
        kind = pick(["arithmetic", "arithmetic", "shift", "set"])
        types = [self.type() for _ in range(3)]
        a, b = self.part(), self.part()
        saturates = kind != "set" and pick([False, True])
        if kind == "arithmetic":
            name = pick(["add", "sub", "absdiff", "min", "max"])
            function = ARITHMETIC[name]
            text = f"v{name}.{'.'.join(types)}"
        elif kind == "shift":
            name, mode = pick(["shl", "shr"]), pick(["clamp", "wrap"])
            types[2] = "u32"
            text = f"v{name}.{'.'.join(types)}"

            def function(x, n):
                n = min(n, 32) if mode == "clamp" else n & 31
                return x << n if name == "shl" else x >> n
        else:
            name = pick(sorted(COMPARISONS))
            function = lambda x, y: int(COMPARISONS[name](x, y))  # noqa: E731
            types[0] = types[1]
            text = f"vset.{types[1]}.{types[2]}.{name}"
        text += ".sat" * saturates + (f".{mode}" if kind == "shift" else "")
        signed = types[0] == "s32"
        end = pick(["", "add", "min", "max", "merge"])
        into = pick([".b0", ".b2", ".h0", ".h1"]) if end == "merge" else ""
        first, bits = self.place(into)
        text += f".{end}" if end in ARITHMETIC else ""
        text += f" %r0{into}, %r1{a[0]}, %r2{b[0]}" + (", %r3;" if end else ";")

        def reference(x, y, z):
            value = function(
                field(x, *a[1:], types[1] == "s32"), field(y, *b[1:], types[2] == "s32")
            )
            value = clamp(value, bits, signed) if saturates else value
            if end in ARITHMETIC:
                return ARITHMETIC[end](value, field(z, 0, 32, signed))
            mask = (1 << bits) - 1
            return z & ~(mask << first) | (value & mask) << first if end else value

        return text, reference

    def mad(self):
        pick = self.choose.choice
        types = [self.type() for _ in range(3)]
        a, b = self.part(), self.part()
        plus, saturates, shift = pick([0, 1]), pick([0, 1]), pick([0, 7, 15])
        signs = [1, 1, 1]
        if not plus and pick([0, 1]):
            signs[self.choose.randrange(3)] = -1
        signed = "s32" in types[1:] or -1 in signs
        text = f"vmad.{'.'.join(types)}" + ".po" * plus + ".sat" * saturates
        text += f".shr{shift}" if shift else ""
        minus = ["-" if sign < 0 else "" for sign in signs]
        text += f" %r0, {minus[0]}%r1{a[0]}, {minus[1]}%r2{b[0]}, {minus[2]}%r3;"

        def reference(x, y, z):
            x, y = field(x, *a[1:], types[1] == "s32"), field(y, *b[1:], types[2] == "s32")
            z = field(z, 0, 32, signed)
            value = (signs[0] * signs[1] * x * y + signs[2] * z + plus) >> shift
            return clamp(value, 32, signed) if saturates else value

        return text, reference

    def parts(self):
        pick, count = self.choose.choice, self.choose.choice([2, 4])
        bits, letter = 32 // count, "bh"[count == 2]
        types = [self.type() for _ in range(3)]
        end = pick(["", "sat", "add"])
        if pick([0, 0, 1]):
            name = pick(sorted(COMPARISONS))
            function = lambda x, y: int(COMPARISONS[name](x, y))  # noqa: E731
            text = f"vset{count}.{types[1]}.{types[2]}.{name}"
            end = "" if end == "sat" else end
        else:
            name = pick(sorted(ARITHMETIC))
            function = ARITHMETIC[name]
            text = f"v{name}{count}.{'.'.join(types)}"
        text += f".{end}" if end else ""
        chosen = sorted(self.choose.sample(range(count), self.choose.randint(1, count)))
        taken = [[self.choose.randrange(2 * count) for _ in range(count)] for _ in range(2)]

        def shown(numbers):
            return f".{letter}" + "".join(map(str, reversed(numbers)))

        if pick([0, 1]):
            chosen, mask = list(range(count)), ""
        else:
            mask = shown(chosen)
        if pick([0, 1]):
            taken = [list(range(count)), list(range(count, 2 * count))]
            text += f" %r0{mask}, %r1, %r2, %r3;"
        else:
            text += f" %r0{mask}, %r1{shown(taken[0])}, %r2{shown(taken[1])}, %r3;"

        def reference(x, y, z):
            both, result = x | y << 32, z
            for place in chosen:
                one, other = (
                    field(both, numbers[place] * bits, bits, kind == "s32")
                    for numbers, kind in zip(taken, types[1:], strict=True)
                )
                value = function(one, other)
                value = clamp(value, bits, types[0] == "s32") if end == "sat" else value
                if end == "add":
                    result += value
                else:
                    ones = (1 << bits) - 1 << place * bits
                    result = result & ~ones | value << place * bits & ones
            return result

        return text, reference


@pytest.mark.parametrize("seed", range(3))
def test_random_instructions(seed, tmp_path):
    maker, values = Maker(seed), np.random.default_rng(seed)
    made = [maker.instruction() for _ in range(120)]
    operands = values.integers(0, 2**32, (3, 64), dtype=np.uint32)
    special = values.random((3, 64)) < 0.4
    operands[special] = values.choice(SPECIAL, int(special.sum()))
    body = """
        .reg .b32 %r<5>; .reg .b64 %rd<3>;
        ld.param.u64 %rd1, [operands]; ld.param.u64 %rd2, [results];
        mov.u32 %r4, %tid.x; mad.wide.u32 %rd1, %r4, 4, %rd1; mad.wide.u32 %rd2, %r4, 4, %rd2;
        ld.global.u32 %r1, [%rd1]; ld.global.u32 %r2, [%rd1+256]; ld.global.u32 %r3, [%rd1+512];
    """
    body += "\n".join(
        f"{text} st.global.u32 [%rd2+{256 * number}], %r0;" for number, (text, _) in enumerate(made)
    )
    ptx = module(body, [".u64 operands", ".u64 results"])
    results = np.zeros((len(made), 64), np.uint32)
    run_ptx(ptx, operands, results, block=64)
    for (text, reference), found in zip(made, results.tolist(), strict=True):
        expected = [reference(*one) & 0xFFFFFFFF for one in operands.T.tolist()]
        assert found == expected, text
    assemble(ptx, tmp_path)
