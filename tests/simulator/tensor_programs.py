"""PTX around one instruction on tensor memory: operands go in, all of tensor memory comes out."""

from __future__ import annotations

import numpy as np
from simulator_support import module, run_ptx

COLUMNS = 256
SHARED = 96 * 1024

_SETUP = """
.reg .b32 %r<20>, %v<64>, %off<8>; .reg .b64 %rd<20>, %a, %b, %m, %out, %inside; .reg .pred %p<8>;
.shared .align 8 .b64 done;
.shared .align 4 .b32 place;
mov.u32 %r0, %tid.x;
setp.lt.u32 %p0, %r0, 32;
@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 256;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [done], 1;
ld.param.u64 %rd0, [shared_in];
ld.param.u64 %out, [tensor_out];
ld.param.u64 %inside, [tensor_in];
mov.u32 %r1, data;
shl.b32 %r2, %r0, 4;
mov.u32 %r3, %r2;
LOAD:
cvt.u64.u32 %rd1, %r3;
add.u64 %rd2, %rd0, %rd1;
ld.global.v4.b32 {%v0,%v1,%v2,%v3}, [%rd2];
add.u32 %r4, %r1, %r3;
st.shared.v4.b32 [%r4], {%v0,%v1,%v2,%v3};
add.u32 %r3, %r3, 2048;
setp.lt.u32 %p2, %r3, %BYTES%;
@%p2 bra LOAD;
fence.proxy.async.shared::cta;
bar.sync 0;
ld.shared.b32 %r5, [place];
mul.lo.u32 %r6, %r0, 1024;
cvt.u64.u32 %rd3, %r6;
add.u64 %inside, %inside, %rd3;
add.u64 %out, %out, %rd3;
mov.u32 %r7, 0;
FILL:
ld.global.v4.b32 {%v0,%v1,%v2,%v3}, [%inside];
add.u32 %r8, %r5, %r7;
tcgen05.st.sync.aligned.32x32b.x4.b32 [%r8], {%v0,%v1,%v2,%v3};
add.u64 %inside, %inside, 16;
add.u32 %r7, %r7, 4;
setp.lt.u32 %p2, %r7, %USED%;
@%p2 bra FILL;
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
setp.eq.u32 %p3, %r0, 0;
"""

_END = """
@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];
WAIT:
mbarrier.try_wait.parity.shared.b64 %p4, [done], 0;
@!%p4 bra WAIT;
tcgen05.fence::after_thread_sync;
mov.u32 %r7, 0;
DRAIN:
add.u32 %r8, %r5, %r7;
tcgen05.ld.sync.aligned.32x32b.x4.b32 {%v0,%v1,%v2,%v3}, [%r8];
tcgen05.wait::ld.sync.aligned;
st.global.v4.b32 [%out], {%v0,%v1,%v2,%v3};
add.u64 %out, %out, 16;
add.u32 %r7, %r7, 4;
setp.lt.u32 %p2, %r7, %USED%;
@%p2 bra DRAIN;
bar.sync 0;
@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 256;
"""


def run_on_tensor_memory(
    code: str,
    shared: np.ndarray,
    inside: np.ndarray,
    *,
    target: str = "sm_100a",
    phase: int = 0,
    used: int = COLUMNS,
    **options: object,
) -> np.ndarray:
    """Runs instructions of one thread.

    Args:
      code: instructions, executed by thread 0 under ``@%p3``, which each must have; ``%r5`` is the
        address of 256 columns, ``%r1`` that of ``shared`` in shared memory.
      shared: bytes.
      inside: what tensor memory holds, uint32 of shape (128, 256).
      target: of the module.
      phase: parity of the phase of ``done`` that the last commit completes.
      used: how many columns are filled before and read after.

    Returns:
      What it holds then.
    """
    size = -(-shared.nbytes // 2048) * 2048
    held = np.zeros(size, np.uint8)
    held[: shared.nbytes] = np.ascontiguousarray(shared).reshape(-1).view(np.uint8)
    out = np.full((128, COLUMNS), 0xCDCDCDCD, np.uint32)
    whole = _SETUP + code + _END.replace("[done], 0;", f"[done], {phase};")
    ptx = module(
        whole.replace("%BYTES%", str(size)).replace("%USED%", str(used)),
        [f".u64 {name}" for name in ("shared_in", "tensor_in", "tensor_out")],
        target=target,
        variables=f".shared .align 1024 .b8 data[{size}];\n",
    )
    run_ptx(ptx, held, inside.astype(np.uint32).copy(), out, block=128, **options)
    return out


def matrix_descriptor(offset: int, leading: int, stride: int, swizzle: int = 0) -> str:
    """Instructions that make a descriptor in ``%a``, of a matrix at an offset of the data."""
    high = (stride >> 4) | 1 << 14 | swizzle << 29
    low = (leading >> 4) << 16
    return f"""
add.u32 %off0, %r1, {offset};
and.b32 %off0, %off0, 0x3FFFF;
shr.u32 %off0, %off0, 4;
or.b32 %off0, %off0, {low:#x};
mov.u32 %off1, {high:#x};
mov.b64 %a, {{%off0, %off1}};
"""


def k_major(matrix: np.ndarray) -> np.ndarray:
    """The bytes of rows of a matrix, in groups of eight rows by 16 bytes: no swizzle, leading
    offset 128, stride offset 128 times the chunks of a row."""
    held = np.ascontiguousarray(matrix).view(np.uint8).reshape(len(matrix), -1)
    chunks = held.reshape(len(matrix) // 8, 8, -1, 16).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(chunks).reshape(-1)


def product(
    instruction: str,
    a: np.ndarray,
    b: np.ndarray,
    descriptor: int,
    inside: np.ndarray,
    *,
    extra: str = "",
    before: str = "",
    keep: bool = True,
    d: int = 0,
    **options: object,
) -> np.ndarray:
    """Runs one product of K-major matrices in shared memory.

    Args:
      instruction: its name.
      a, b: their rows, as they are in memory.
      descriptor: of the instruction.
      inside: contents of tensor memory; D is at its column ``d``.
      extra: operands after the descriptor of the instruction; ``%p5`` says whether D is added to.
    """
    first, second = k_major(a), k_major(b)
    start = -(-len(first) // 1024) * 1024
    shared = np.concatenate([first, np.zeros(start - len(first), np.uint8), second])
    strides = [128 * (held.size // len(matrix) // 16) for held, matrix in ((first, a), (second, b))]
    code = (
        before
        + matrix_descriptor(0, 128, strides[0])
        + "mov.b64 %m, %a;\n"
        + matrix_descriptor(start, 128, strides[1])
        + f"""
mov.b64 %b, %a;
mov.u32 %r10, {descriptor:#x};
mov.u32 %r11, {int(keep)};
setp.ne.u32 %p5, %r11, 0;
add.u32 %r12, %r5, {d};
@%p3 {instruction} [%r12], %m, %b, {extra or "%r10, %p5"};
"""
    )
    return run_on_tensor_memory(code, shared, inside, **options)
