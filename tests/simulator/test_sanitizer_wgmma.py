"""The sanitizer: ``wgmma`` in PTX, its operands in shared memory and its registers."""

from __future__ import annotations

import numpy as np
import pytest
from sanitizer_support import kinds, sanitize

NOT_WAITED = "asynchronous operation not waited for, in shared memory"
FENCE = "missing fence.proxy.async in shared memory"
WITH_OPERATION = "data race with an asynchronous operation in shared memory"
REGISTERS = "register of a wgmma in flight"
OPEN = "thread ends before its asynchronous operation"
MISUSE = "misuse of wgmma"

# A has 2048 bytes at the beginning of the dynamic shared memory, B 256 bytes behind it: matrices of
# 8 rows and 16 bytes, two next to each other along K, then the next rows.
PROLOGUE = """
.reg .b32 %a, %b, %s, %t, %v, %w, %m<4>;
.reg .b64 %p, %da, %db, %wide;
.reg .f32 %f<4>, %g<4>, %sum;
.reg .pred %k, %yes;
mov.u32 %t, %tid.x;
mov.u32 %s, dynamic;
shl.b32 %a, %t, 4;
add.u32 %a, %a, %s;
add.u32 %b, %s, 2048;
mov.b32 %v, 0x3c003c00;
cvt.u64.u32 %da, %s;
shr.u64 %da, %da, 4;
or.b64 %da, %da, 0x1000080000;
cvt.u64.u32 %db, %b;
shr.u64 %db, %db, 4;
or.b64 %db, %db, 0x1000080000;
shl.b32 %w, %t, 4;
add.u32 %b, %b, %w;
"""
FILL = """
st.shared.v4.b32 [%a], {%v, %v, %v, %v};
setp.lt.u32 %k, %t, 16;
@%k st.shared.v4.b32 [%b], {%v, %v, %v, %v};
"""
PROXY = "fence.proxy.async.shared::cta;\n"
MEET = "bar.sync 0;\n"
WGMMA_FENCE = "wgmma.fence.sync.aligned;\n"
PRODUCT = """
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %da, %db, 0, 1, 1, 0, 0;
"""
MORE = PRODUCT.replace(" 0, 1, 1, 0, 0;", " 1, 1, 1, 0, 0;")
OTHER = PRODUCT.replace("%f", "%g")
COMMIT = "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned 0;\n"
USE = """
add.s64 %p, %array0, %offset4;
st.global.f32 [%p], %f0;
"""
READY = FILL + PROXY + MEET
WHOLE = READY + WGMMA_FENCE + PRODUCT + COMMIT + WAIT + USE


def run(body: str, **options) -> str:
    y = np.zeros(256, np.float32)
    message = sanitize(PROLOGUE + body, y, shared=4096, **options)
    if not message:
        assert set(y[:128]) <= {16.0, 32.0}
    return message


def replaced(body: str, *parts: str) -> str:
    for part in parts:
        assert part in body
        body = body.replace(part, "")
    return body


def test_product():
    assert run(WHOLE) == ""
    assert (
        run(
            WHOLE.replace("%offset4", "%wide").replace(
                "add.s64 %p", "mul.wide.u32 %wide, %t, 4;\nadd.s64 %p"
            ),
            grid=3,
        )
        == ""
    )


def test_operands_without_a_proxy_fence():
    message = run(replaced(WHOLE, PROXY))
    assert kinds(message) == [FENCE, FENCE]
    assert "a wgmma of the warpgroup of thread 0 of block (0, 0, 0) reads byte 0 of" in message
    assert "in: wgmma.mma_async" in message


def test_operands_without_a_barrier():
    """Each warp of the warpgroup may begin before the others have written."""
    assert set(kinds(run(replaced(WHOLE, MEET)))) == {WITH_OPERATION}


def test_operands_that_another_warpgroup_writes():
    body = """
    setp.lt.u32 %k, %t, 128;
    @%k bra MULTIPLY;
    sub.u32 %a, %a, 2048;
    sub.u32 %t, %t, 128;
    sub.u32 %b, %b, 2048;
    """
    body += FILL + PROXY + "ARRIVE\nbra.uni END;\nMULTIPLY:\nMEET\n"
    body += WGMMA_FENCE + PRODUCT + COMMIT + WAIT + USE + "END:\n"
    assert (
        run(
            body.replace("ARRIVE", "bar.arrive 1, 256;").replace("MEET", "bar.sync 1, 256;"),
            block=256,
        )
        == ""
    )
    found = kinds(run(body.replace("ARRIVE", "").replace("MEET", ""), block=256))
    assert set(found) & {WITH_OPERATION, "read of uninitialized shared memory"}


def test_uninitialized_operand():
    message = run(READY.replace("%t, 16;", "%t, 15;") + WHOLE[len(READY) :])
    assert kinds(message) == ["read of uninitialized shared memory"]
    assert "reads byte 2288 of" in message


def test_operand_is_written_before_the_product_is_waited_for():
    start = READY + WGMMA_FENCE + PRODUCT + COMMIT
    assert run(start + WAIT + MEET + FILL + USE) == ""
    message = run(start + FILL + WAIT + USE)
    assert set(kinds(message)) == {NOT_WAITED}
    assert "which read it" in message
    assert "wgmma.wait_group" in message


@pytest.mark.parametrize(
    ("left", "register", "clean"), [(1, "%f0", True), (1, "%g0", False), (0, "%g0", True)]
)
def test_wait_leaves_the_last_group_in_flight(left, register, clean):
    body = READY + WGMMA_FENCE + PRODUCT + COMMIT + OTHER + COMMIT
    body += WAIT.replace("0;", f"{left};") + f"add.f32 %sum, {register}, {register};\n"
    assert kinds(run(body + WAIT + USE)) == ([] if clean else [REGISTERS])


def test_accumulator_is_read_in_flight():
    message = run(READY + WGMMA_FENCE + PRODUCT + COMMIT + USE + WAIT)
    assert kinds(message) == [REGISTERS]
    assert "thread 0 of block (0, 0, 0) (and 127 more threads) uses %f0" in message


def test_accumulator_is_written_in_flight():
    body = READY + WGMMA_FENCE + PRODUCT + COMMIT + "mov.f32 %f3, 0f00000000;\n" + WAIT + USE
    assert kinds(run(body)) == [REGISTERS]


def test_accumulating_products_need_no_wait():
    assert run(READY + WGMMA_FENCE + PRODUCT + MORE + COMMIT + WAIT + USE) == ""


def test_matrix_in_registers_is_changed_in_flight():
    product = PRODUCT.replace("%da, %db, 0, 1, 1, 0, 0;", "{%m0, %m1, %m2, %m3}, %db, 0, 1, 1, 0;")
    fill = "".join(f"mov.b32 %m{n}, %v;\n" for n in range(4))
    start = READY + fill + WGMMA_FENCE + product + COMMIT
    change = "mov.b32 %m2, 0;\n"
    assert run(start + WAIT + change + USE) == ""
    assert kinds(run(start + change + WAIT + USE)) == [REGISTERS]


def test_product_without_a_fence():
    message = run(replaced(WHOLE, WGMMA_FENCE))
    assert kinds(message) == [MISUSE]
    assert "without a wgmma.fence" in message


@pytest.mark.parametrize("change", ["mov.f32 %f3, %f2;", "ld.shared.f32 %f1, [%s];"])
@pytest.mark.parametrize("fenced", [True, False])
def test_registers_that_are_changed_between_products(change, fenced):
    """What was written since the last fence need not be seen by the next product."""
    body = READY + WGMMA_FENCE + PRODUCT + COMMIT + WAIT + change + "\n"
    message = run(body + WGMMA_FENCE * fenced + PRODUCT + COMMIT + WAIT + USE)
    assert kinds(message) == ([] if fenced else [MISUSE])
    if not fenced:
        assert f"uses %{change.split('%')[1][:2]}, written since the last wgmma.fence" in message


def test_other_registers_are_changed_between_products():
    body = READY + WGMMA_FENCE + PRODUCT + COMMIT + WAIT + "add.f32 %sum, %f0, %f1;\n"
    assert run(body + PRODUCT + COMMIT + WAIT + USE) == ""


def test_accumulator_in_flight_is_matrix_of_another_product():
    fill = "".join(f"mov.b32 %m{n}, %v;\n" for n in range(4))
    other = PRODUCT.replace("%f", "%g").replace(
        "%da, %db, 0, 1, 1, 0, 0;", "{%f0, %f1, %f2, %f3}, %db, 0, 1, 1, 0;"
    )
    start = READY + fill + WGMMA_FENCE + PRODUCT + COMMIT
    assert (
        kinds(sanitize(PROLOGUE + start + WAIT + WGMMA_FENCE + other + COMMIT + WAIT, shared=4096))
        == []
    )
    message = sanitize(PROLOGUE + start + other + COMMIT + WAIT, shared=4096)
    assert kinds(message) == [MISUSE]
    assert "uses %f0, %f1, %f2, %f3 as A in one product and as accumulator in another" in message


def test_matrix_in_flight_is_accumulator_of_another_product():
    fill = "".join(f"mov.b32 %f{n}, %v;\n" for n in range(4))
    first = PRODUCT.replace("%f", "%g").replace(
        "%da, %db, 0, 1, 1, 0, 0;", "{%f0, %f1, %f2, %f3}, %db, 0, 1, 1, 0;"
    )
    start = READY + fill + WGMMA_FENCE + first + COMMIT
    assert kinds(sanitize(PROLOGUE + start + WAIT + PRODUCT + COMMIT + WAIT, shared=4096)) == []
    message = sanitize(PROLOGUE + start + PRODUCT + COMMIT + WAIT, shared=4096)
    assert kinds(message) == [MISUSE]


@pytest.mark.parametrize("missing", [WAIT, COMMIT])
def test_end_with_a_product_in_flight(missing):
    message = run(replaced(WHOLE, missing, USE))
    assert kinds(message) == [OPEN]
    assert "wgmma.wait_group 0" in message


PIPELINE = """
.reg .b32 %i, %stage;
.reg .b64 %sa, %sb;
mov.u32 %i, 0;
LOOP:
rem.u32 %stage, %i, BUFFERS;
mul.lo.u32 %stage, %stage, 4096;
add.u32 %w, %a, %stage;
st.shared.v4.b32 [%w], {%v, %v, %v, %v};
add.u32 %w, %b, %stage;
@%k st.shared.v4.b32 [%w], {%v, %v, %v, %v};
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %stage, %stage, 4;
cvt.u64.u32 %wide, %stage;
add.s64 %sa, %da, %wide;
add.s64 %sb, %db, %wide;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
    {%f0, %f1, %f2, %f3}, %sa, %sb, %yes, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
setp.eq.u32 %yes, %i, %i;
wgmma.wait_group.sync.aligned LEFT;
bar.sync 1;
add.u32 %i, %i, 1;
setp.lt.u32 %k, %i, 6;
@%k bra AGAIN;
bra.uni END;
AGAIN:
setp.lt.u32 %k, %t, 16;
bra.uni LOOP;
END:
wgmma.wait_group.sync.aligned 0;
"""


@pytest.mark.parametrize(
    ("left", "buffers", "clean"),
    [(0, 1, True), (1, 1, False), (1, 3, True), (2, 3, True), (3, 3, False)],
)
def test_buffers_in_turn(left, buffers, clean):
    """A buffer may be filled again when the product that read it is over, in all warps."""
    body = PROLOGUE + "setp.ne.u32 %yes, %t, %t;\nsetp.lt.u32 %k, %t, 16;\n"
    body += PIPELINE.replace("LEFT", str(left)).replace("BUFFERS", str(buffers))
    message = sanitize(body, shared=12288)
    assert set(kinds(message)) == (set() if clean else {NOT_WAITED})
