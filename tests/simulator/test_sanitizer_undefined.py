"""The sanitizer: undefined values may be moved and discarded, but not used."""

from __future__ import annotations

import numpy as np
import pytest
from sanitizer_support import kinds, sanitize

REGISTERS = """
.reg .b16 %h<3>; .reg .b32 %r<4>, %never, %t, %a, %lane, %sel; .reg .b64 %x, %y, %p;
.reg .pred %k, %l, %m, %low;
mov.u32 %t, %tid.x;
and.b32 %lane, %t, 31;
setp.lt.u32 %low, %lane, 16;
mov.u32 %a, dynamic;
mad.lo.u32 %a, %t, 8, %a;
add.s64 %p, %array0, %offset4;
"""
STORE = "\nst.global.b32 [%p], %r0;"
VALUE = "read of a register without a value"
MEMORY = "read of uninitialized shared memory"
SHUFFLE = "misuse of shfl"


def run(body: str, **options) -> list[str]:
    x = np.zeros(256, np.uint32)
    return kinds(sanitize(REGISTERS + body + STORE, x, shared=4096, block=64, **options))


DISCARDED = {
    "a byte that is not selected": "prmt.b32 %r0, %t, %never, 0x3210;",
    "a byte that a register does not select": "mov.b32 %sel, 0x3210;"
    "prmt.b32 %r0, %t, %never, %sel;",
    "the other half of a pair": "mov.b64 %x, {%t, %never}; mov.b64 {%r0, %r1}, %x;",
    "a half that is cut off": "mov.b64 %x, {%t, %never}; cvt.u32.u64 %r0, %x;",
    "a half that is not stored": "mov.b64 %x, {%t, %never}; st.global.b32 [%p], %x;mov.u32 %r0, 1;",
    "bits that a field replaces": "bfi.b32 %r1, %t, %never, 16, 8;prmt.b32 %r0, %r1, %t, 0x4442;",
    "a half that is shifted out": "mov.b64 %x, {%never, %t}; shr.u64 %x, %x, 32;"
    "cvt.u32.u64 %r0, %x;",
    "bits that are masked": "mov.b32 %r1, 255; and.b32 %r0, %never, 0; or.b32 %r0, %r0, %t;",
    "bits that are set anyway": "or.b32 %r0, %never, 0xffffffff;",
    "the branch that is not chosen": "setp.ge.u32 %k, %t, 0; selp.b32 %r0, %t, %never, %k;",
    "a comparison that does not matter": "setp.lt.u32 %k, %never, 7; setp.lt.u32 %l, %t, 0;"
    "and.pred %m, %k, %l; selp.b32 %r0, 1, 2, %m;",
    "arithmetic before the choice": "add.u32 %r1, %never, 1; setp.ge.u32 %k, %t, 0;"
    "selp.b32 %r0, %t, %r1, %k;",
    "a register that only the source lane wrote": "setp.eq.u32 %k, %lane, 3;"
    "@%k mov.u32 %r1, 5; shfl.sync.idx.b32 %r0, %r1, 3, 31, -1;",
    "what lanes outside of the mask gave": "@!%low bra NEXT;"
    "shfl.sync.down.b32 %r1, %t, 8, 31, 0xffff;"
    "setp.lt.u32 %k, %lane, 8; selp.b32 %r0, %r1, %t, %k; bra DONE;\n"
    "NEXT: mov.u32 %r0, 0;\nDONE:",
    "shared memory that is not looked at": "ld.shared.b32 %r1, [%a]; setp.lt.u32 %k, %t, 0;"
    "selp.b32 %r0, %r1, %t, %k;",
    "a stored value that is not looked at": "st.shared.v2.b32 [%a], {%t, %never};"
    "ld.shared.v2.b32 {%r0, %r1}, [%a];",
    "a half that is not stored behind a store of two": "mov.b64 %x, {%t, %never};"
    "st.shared.v2.b32 [%a], {%t, %t}; st.shared.b32 [%a], %x; ld.shared.b32 %r0, [%a+4];",
    "a value that is stored again": "st.shared.b32 [%a], %never; st.shared.b32 [%a], %t;"
    "ld.shared.b32 %r0, [%a];",
    "an undefined value in local memory": ".local .align 8 .b8 stack[8];"
    "st.local.v2.b32 [stack], {%never, %t}; ld.local.b32 %r0, [stack+4];",
}


@pytest.mark.parametrize("name", DISCARDED)
def test_discarded(name):
    assert run(DISCARDED[name]) == []


USED = {
    "a byte that is selected": ("prmt.b32 %r0, %t, %never, 0x3214;", VALUE),
    "the sign of a byte": ("prmt.b32 %r0, %t, %never, 0x321f;", VALUE),
    "the undefined half": ("mov.b64 %x, {%t, %never}; mov.b64 {%r1, %r0}, %x;", VALUE),
    "the half that is stored": (
        "mov.b64 %x, {%never, %t}; st.global.b32 [%p], %x; mov.u32 %r0, 1;",
        VALUE,
    ),
    "a field": ("bfi.b32 %r1, %never, %t, 16, 8; prmt.b32 %r0, %r1, %t, 0x4442;", VALUE),
    "bits beside a field": (
        "bfi.b32 %r1, %t, %never, 16, 8; prmt.b32 %r0, %r1, %t, 0x4443;",
        VALUE,
    ),
    "an arithmetic shift": ("shr.s32 %r0, %never, 31;", VALUE),
    "bits that are kept": ("and.b32 %r0, %never, 1;", VALUE),
    "a choice by an undefined predicate": (
        "setp.lt.u32 %k, %never, 7; selp.b32 %r0, 1, 2, %k;",
        VALUE,
    ),
    "a branch": ("setp.lt.u32 %k, %never, 7; @%k mov.u32 %r1, 1; mov.u32 %r0, 1;", VALUE),
    "an address": ("mov.u32 %r0, 1; st.shared.b32 [%never], %r0;", VALUE),
    "a lane that did not write": (
        "setp.eq.u32 %k, %lane, 3; @%k mov.u32 %r1, 5; shfl.sync.idx.b32 %r0, %r1, 2, 31, -1;",
        VALUE,
    ),
    "what lanes outside of the mask gave": (
        "mov.u32 %r0, 0;\n@!%low bra NEXT;shfl.sync.down.b32 %r0, %t, 8, 31, 0xffff;\nNEXT:",
        SHUFFLE,
    ),
    "shared memory": ("ld.shared.b32 %r1, [%a]; add.u32 %r0, %r1, 1;", MEMORY),
    "a value that went through shared memory": (
        "st.shared.b32 [%a], %never; ld.shared.b32 %r0, [%a];",
        MEMORY,
    ),
    "shared memory that is loaded in vain": ("ld.shared.b32 %r1, [%a]; mov.u32 %r0, 1;", MEMORY),
}


@pytest.mark.parametrize("name", USED)
def test_used(name):
    body, found = USED[name]
    # A wild address may also be an error at once.
    if name == "an address":
        with pytest.raises(Exception, match="%never, which it has not written"):
            run(body)
    else:
        assert run(body) == [found]
