"""Texts around what the tests of the PTX parser read."""

from __future__ import annotations

HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"
MODULE_VARIABLES = """
.extern .shared .align 1024 .b8 dynamic[];
.global .align 4 .b32 counter;
.global .align 16 .b8 bytes[64];
.extern .func (.param .b32 result) vprintf(.param .b64 format, .param .b64 values);
.func (.reg .b32 sum) add_two(.reg .b32 x, .reg .b32 y) { add.s32 sum, x, y; ret; }
.func nothing() { ret; }
.global .u64 callees[1] = {add_two};
"""
REGISTERS = (
    ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .b64 %rd<9>; "
    ".reg .f32 %f<9>; .reg .f64 %fd<9>;\n"
)


def kernel_text(body: str) -> str:
    return (
        f"{HEADER}{MODULE_VARIABLES}.visible .entry kernel(.param .u64 pointer, "
        f".param .align 64 .b8 map[128])\n{{\n{REGISTERS}{body}\nret;\n}}\n"
    )
