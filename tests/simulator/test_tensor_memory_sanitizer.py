"""What the sanitizer finds in tensor memory: each program is right, and wrong without the parts in
double brackets."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tensor_programs import matrix_descriptor, run_on_tensor_memory

from pallasite_simulator.errors import SimulationError
from pallasite_simulator.sanitizer import GROUPS, LaunchState
from pallasite_simulator.sanitizer.groups import FURTHER

MMA = "tcgen05.mma.cta_group::1.kind::f16"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];"

SETUP = (
    matrix_descriptor(0, 128, 256)
    + """
setp.eq.u32 %p6, %r0, 32;
mov.u32 %r10, 0x8080010;
setp.ne.u32 %p5, %r0, %r0;
add.u32 %r13, %r5, 32;
.reg .pred %q<4>;
"""
)
"""A of 128 rows and B of 32, both at the start of the data; D is not added to."""

SYNC = """
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
"""


def wait(phase, label):
    return f"""
{label}:
mbarrier.try_wait.parity.shared.b64 %p7, [done], {phase};
@!%p7 bra {label};
"""


WAIT = wait(0, "FIRST") + "tcgen05.fence::after_thread_sync;\n"

PRODUCT = f"@%p3 {MMA} [%r5], %a, %a, %r10, %p5;\n"
FROM_TENSOR_MEMORY = f"@%p3 {MMA} [%r5], [%r13], %a, %r10, %p5;\n"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v4}, [%r5];\n"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r13], {%r0};\n"
COPY = "@%p3 tcgen05.cp.cta_group::1.128x128b [%r13], %a;\n"
SCALED = """
@%p6 tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X
    [%r5], %a, %a, 0x8880000, [%r13], [%r13], %p5;
"""

CASES = {
    "stores that a product reads are not waited for": (
        STORE + "[[tcgen05.wait::st.sync.aligned;]]" + SYNC + FROM_TENSOR_MEMORY, 0,
        "plgpu.commit_tmem()",
    ),
    "no barrier between stores and a product": (
        STORE + "tcgen05.wait::st.sync.aligned;[[" + SYNC + "]]" + FROM_TENSOR_MEMORY, 0,
        "tensor memory",
    ),
    "stores are not waited for before they are loaded": (
        STORE + "[[tcgen05.wait::st.sync.aligned;]]"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v4}, [%r13];" + SYNC, 0, "plgpu.commit_tmem()",
    ),
    "a product overwrites what is being loaded": (
        LOAD + "[[tcgen05.wait::ld.sync.aligned;]]" + SYNC + PRODUCT, 0,
        "plgpu.wait_load_tmem()",
    ),
    "stores overwrite what is being loaded": (
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v4}, [%r13];"
        "[[tcgen05.wait::ld.sync.aligned;]]" + STORE
        + "tcgen05.wait::st.sync.aligned;" + SYNC, 0, "plgpu.wait_load_tmem()",
    ),
    "a result is loaded before it is there": (
        PRODUCT + "@%p3 " + COMMIT + "[[" + WAIT + "]]" + LOAD, 1, "tcgen05.commit",
    ),
    "many copies are not waited for": (
        80 * COPY + "@%p3 " + COMMIT + "[[" + WAIT + "]]"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v4}, [%r13];" + SYNC, 1, "tcgen05.commit",
    ),
    "stores overwrite what a product reads": (
        FROM_TENSOR_MEMORY + "@%p3 " + COMMIT + "[[" + WAIT + "]]" + STORE
        + "tcgen05.wait::st.sync.aligned;" + SYNC, 1, "tcgen05.commit",
    ),
    "a copy is not waited for before it is loaded": (
        COPY + "@%p3 " + COMMIT + "[[" + WAIT + "]]"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v4}, [%r13];" + SYNC, 1, "tcgen05.commit",
    ),
    "another thread's product reads what is being copied": (
        COPY + "@%p3 " + COMMIT + "[[" + WAIT + "]]" + SCALED
        + "@%p6 " + COMMIT + wait(1, "SECOND") + SYNC, 2, "tcgen05.commit",
    ),
    "products of two threads with the same D": (
        PRODUCT + "@%p3 " + COMMIT + "[[" + WAIT + "]]" + PRODUCT.replace("%p3", "%p6")
        + "@%p6 " + COMMIT + wait(1, "SECOND") + SYNC, 2, "tcgen05.commit",
    ),
    "a commit before the product": (
        "[[" + PRODUCT + "]]@%p3 " + COMMIT + WAIT + "{{" + PRODUCT + "}}" + LOAD
        + "tcgen05.wait::ld.sync.aligned;" + SYNC, 1, "tcgen05.commit",
    ),
    "operands are written, but not for the asynchronous proxy": (
        "add.u32 %off2, %r1, %r2; st.shared.b32 [%off2], %r0;"
        "[[fence.proxy.async.shared::cta;]]" + SYNC + PRODUCT, 0,
        "fence.proxy.async",
    ),
    "operands are overwritten while a product reads them": (
        PRODUCT + "@%p3 " + COMMIT + "[[" + WAIT + "]]@%p3 st.shared.b32 [%r1], %r0;" + SYNC, 1,
        "tcgen05.commit",
    ),
    "no fence before the barrier": (
        STORE + "tcgen05.wait::st.sync.aligned;[[tcgen05.fence::before_thread_sync;]]"
        "bar.sync 0; tcgen05.fence::after_thread_sync;" + FROM_TENSOR_MEMORY, 0,
        "lacks a tcgen05.fence::before_thread_sync",
    ),
    "no fence after the barrier": (
        STORE + "tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;"
        "bar.sync 0; [[tcgen05.fence::after_thread_sync;]]" + FROM_TENSOR_MEMORY, 0,
        "lacks a tcgen05.fence::after_thread_sync",
    ),
    "no fence after the wait for a commit": (
        PRODUCT + "@%p3 " + COMMIT + wait(0, "FIRST") + "[[tcgen05.fence::after_thread_sync;]]"
        + LOAD + "tcgen05.wait::ld.sync.aligned;" + SYNC, 1,
        "lacks a tcgen05.fence::after_thread_sync",
    ),
    "columns are used after they were released": (
        "{{" + SYNC + "@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 256;"
        + SYNC + "}}" + LOAD, 0, "not allocated",
    ),
    "columns are released while a product writes to them": (
        PRODUCT + "@%p3 " + COMMIT + "[[" + WAIT + "]]{{"
        "@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 256;"
        "@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 256;}}" + SYNC, 1,
        "tcgen05.commit",
    ),
    "blocks of one and of two in one kernel": (
        "{{@%p3 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [done];}}",
        0, "uses another group of blocks",
    ),
    "cells that nobody wrote": (
        "{{@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 256;"
        "@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 256;" + SYNC
        + "}}" + FROM_TENSOR_MEMORY, 0, "uninitialized tensor memory",
    ),
}  # fmt: skip


def found(code, phase):
    """What the sanitizer says."""
    state = LaunchState((*GROUPS, *FURTHER))
    inside = np.random.default_rng(0).integers(0, 2**32, (128, 256), np.uint32)
    shared = np.zeros(8192, np.uint8)
    try:
        run_on_tensor_memory(
            SETUP + code, shared, inside, sanitizer=state, phase=phase % 2, used=64
        )
    except SimulationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CASES)
def test_pair(name):
    code, phase, detail = CASES[name]
    right = re.sub(r"\{\{.*?\}\}", "", code, flags=re.DOTALL)
    right = right.replace("[[", "").replace("]]", "")
    assert found(right, phase) == ""
    wrong = re.sub(r"\[\[.*?\]\]", "", code, flags=re.DOTALL)
    wrong = wrong.replace("{{", "").replace("}}", "")
    assert detail in found(wrong, phase)


def test_a_block_makes_as_many_accesses_as_there_are_threads():
    """To release 256 columns is 8192 accesses of one thread, and 64 blocks have 8192 threads: only
    that one makes them."""
    state = LaunchState((*GROUPS, *FURTHER))
    inside, shared = np.zeros((128, 256), np.uint32), np.zeros(8192, np.uint8)
    code = SETUP + PRODUCT + "@%p3 " + COMMIT + WAIT
    run_on_tensor_memory(code, shared, inside, sanitizer=state, phase=1, used=32, grid=64)
