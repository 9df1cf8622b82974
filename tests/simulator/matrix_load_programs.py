"""Programs that move small matrices between shared memory and registers."""

from __future__ import annotations

import numpy as np
from simulator_support import body_ptx

WARPS = 6  # three blocks of two
SHARED = 4096
"""Bytes of a block; each warp has its own half."""

SETUP = """
    .reg .b32 %base, %place, %own, %v<4>, %i<4>, %size; .reg .b64 %at, %generic; .reg .pred %more;
    mov.u32 %base, dynamic;
    mov.u32 %i0, %tid.x; shl.b32 %i0, %i0, 4;
    mov.u32 %i1, %ctaid.x; mul.wide.u32 %at, %i1, 4096; add.s64 %array0, %array0, %at;
"""
FILL = """
$fill:
    cvt.u64.u32 %at, %i0; add.s64 %at, %at, %array0;
    ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%at];
    add.u32 %place, %base, %i0; st.shared.v4.b32 [%place], {%v0, %v1, %v2, %v3};
    add.u32 %i0, %i0, 1024; setp.lt.u32 %more, %i0, 4096; @%more bra $fill;
    bar.sync 0;
"""
ADDRESS = """
    mul.wide.u32 %at, %thread, 4; add.s64 %at, %at, %array1; ld.global.u32 %own, [%at];
    add.u32 %own, %own, %base;
"""


def listed(prefix, count):
    return "{" + ", ".join(f"%{prefix}{number}" for number in range(count)) + "}"


def row_offsets(random, rows):
    """Places of rows of 16 bytes, by warp; lanes without a row have places out of bounds."""
    places = np.full((WARPS, 32), 0x7FFFFFF1, np.uint32)
    for warp in range(WARPS):
        chosen = random.permutation(2048 // 16)[:rows] * 16
        places[warp, :rows] = warp % 2 * 2048 + chosen
    return places


def load_program(name, registers, rows, address="[%own]", setup="", target="sm_90a"):
    """A kernel that loads matrices from random shared memory: its PTX and its first two arrays."""
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (WARPS // 2, SHARED), np.uint8)
    places = row_offsets(random, rows)
    body = [
        SETUP,
        FILL,
        ADDRESS,
        f".reg .b32 %d<{registers}>;",
        setup,
        f"{name} {listed('d', registers)}, {address};",
        f"mul.wide.u32 %at, %thread, {4 * registers}; add.s64 %at, %at, %array2;",
        *[f"st.global.b32 [%at+{4 * i}], %d{i};" for i in range(registers)],
    ]
    return body_ptx("\n".join(body), 3, shared=SHARED, target=target), images, places
