"""Formats of ``printf`` whose output on hardware is recorded."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from simulator_support import module

# Each format with its arguments: integers of four bytes, those of eight bytes as ("l", value),
# floats, and strings (None for a null pointer).
FORMATS: tuple[tuple[object, ...], ...] = (
    ("nothing",),
    ("%d %i %u", -5, -6, -7),
    ("%5d|%-5d|%05d|%+d|% d|%+5d|%- 6d|", 42, 42, 42, 42, 42, 42, 42),
    ("%.3d|%8.5d|%08.5d|%.0d|%-8.3d|%+.2d", 7, 42, 42, 0, 5, 3),
    ("%x %X %#x %#X %#x %08x %#10x|%-#10x|", 0xABC, 0xABC, 0xABC, 0xABC, 0, 0xABC, 0xABC, 0xABC),
    ("%o %#o %#o %#.5o", 8, 8, 0, 8),
    ("%hd %hu %hhd %hhu %hx", 0x18001, 0x18001, 0x181, 0x181, -1),
    ("%ld %lu %lld %llx", ("l", -(1 << 40)), ("l", 1 << 63), ("l", -1), ("l", 0xDEADBEEFCAFE)),
    ("%zu %jd %td", ("l", 1 << 40), ("l", -1), ("l", -2)),
    ("%d %lld %d", 1, ("l", 2), 3),
    ("%c%c%c|%3c|%-3c|", 65, 98, 0x143, 66, 67),
    ("%f %F %e %E %g %G", 1.5, 2.5, 12345.678, 1e-10, 1e10, 1e-5),
    ("%.0f %.0f %.0f %.1f %#.0f %10.3f|%-10.3f|%010.3f", 0.5, 1.5, 2.5, 0.25, 3.0, *[3.14159] * 3),
    ("%+f % f %+e % g", 1.0, 1.0, -1.0, 2.0),
    ("%g %g %g %g %#g %.3g %.10g", 100000.0, 1e6, 1e-4, 1e-5, 1.0, 1234.5, 0.1),
    ("%f %e %g %5f|%-5f|%05f", *[float("inf")] * 6),
    ("%f %F %E %+f %010f", *[float("-inf")] * 5),
    ("%f %F %5g|", *[float("nan")] * 3),
    ("%f %g %e", -0.0, -0.0, -0.0),
    ("%a %A %a %a %a", 1.0, -2.5, 0.0, 1e-310, 0.1),
    ("%.2a %.0a %.15a %20a|%-20a|%020a", *[3.14159] * 6),
    ("%e %g %f", 5e-324, 1.7976931348623157e308, 1e20),
    ("%s|%10s|%-10s|%.2s|%5.1s|", *["word"] * 5),
    ("%s", None),
    ("%s and %s", "first", ""),
    ("%p %20p|%-20p|", ("l", 0x7F0012345678), ("l", 0x1000), ("l", 0xFFFFFFFFFFFFFFFF)),
    ("%*d|%-*d|%*d|%.*f|%*.*f|%.*d", 6, 42, 6, 42, -6, 42, 2, 3.14159, 9, 3, 3.14159, -1, 5),
    ("100%% %d%%", 5),
    ("%%d %d", 5),
    ("%08s|%+s|%#s", "a", "b", "c"),
    ("%-05d|%+ d|%+u|% x", 5, 5, 5, 5),
    ("%5%|%d", 1),
)


def prints_ptx(numbers: Sequence[int] = range(len(FORMATS))) -> str:
    """A kernel whose one thread prints formats, with their numbers before them, and stores what
    ``printf`` returned."""
    variables = [".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);"]
    code = [
        ".local .align 8 .b8 frame[256]; .reg .b64 %at, %generic, %format; .reg .b32 %count;",
        "mov.u64 %at, frame; cvta.local.u64 %generic, %at;",
        ".reg .b64 %out; ld.param.u64 %out, [out];",
    ]

    def string(name: str, text: str) -> str:
        data = text.encode() + b"\0"
        listed = ", ".join(map(str, data))
        return f".global .align 1 .b8 {name}[{len(data)}] = {{{listed}}};"

    for number in numbers:
        form, *arguments = FORMATS[number]
        variables.append(string(f"format_{number}", f"{number}: {form}\n"))
        offset = 0
        for place, argument in enumerate(arguments):
            bits, size = "0", 8
            if isinstance(argument, int):
                bits, size = f"{argument % 2**32:#x}", 4
            elif isinstance(argument, tuple):
                bits = f"{argument[1] % 2**64:#x}"
            elif isinstance(argument, float):
                bits = f"{struct.unpack('<Q', struct.pack('<d', argument))[0]:#x}"
            offset = -(-offset // size) * size
            if isinstance(argument, str):
                name = f"text_{number}_{place}"
                variables.append(string(name, argument))
                code.append(f"mov.u64 %format, {name}; cvta.global.u64 %format, %format;")
                bits = "%format"
            code.append(f"st.local.b{8 * size} [frame+{offset}], {bits};")
            offset += size
        code += [
            f"mov.u64 %format, format_{number}; cvta.global.u64 %format, %format;",
            "{ .param .b64 f; .param .b64 a; .param .b32 r;",
            "st.param.b64 [f], %format; st.param.b64 [a], %generic;",
            "call (r), vprintf, (f, a); ld.param.b32 %count, [r]; }",
            f"st.global.b32 [%out+{4 * number}], %count;",
        ]
    return module("\n".join(code), [".u64 out"], variables="\n".join(variables))
