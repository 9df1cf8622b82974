"""Products of the tensor core: dtypes, places and forms of operands, shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from tcgen05_support import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    I8,
    I32,
    LANE,
    U8,
    WARPGROUP,
    Case,
    smem,
    values,
    wide,
)

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

BOTH = pytest.mark.parametrize("semantics", [LANE, WARPGROUP], ids=["lane", "warpgroup"])


@pytest.mark.parametrize(
    ("a", "b", "acc"),
    [
        (F16, F16, F32),
        (F16, F16, F16),
        (BF16, BF16, F32),
        (F32, F32, F32),
        (E4M3, E5M2, F32),
        (E5M2, E5M2, F16),
        (E5M2, E4M3, F32),
        (I8, I8, I32),
        (U8, I8, I32),
        (I8, U8, I32),
        (U8, U8, I32),
    ],
    ids=str,
)
def test_dtypes(a, b, acc):
    # Elements of 32 bits have to be contiguous along k.
    turned = np.dtype(a).itemsize == 4
    Case(a=a, b=b, acc=acc, k=128, n=32 if turned else 128, b_turned=turned).check()


@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
@pytest.mark.parametrize(
    ("dtype", "swizzles"), [(F16, (64, 128)), (I8, (32, 64)), (E4M3, (128, 32))]
)
@pytest.mark.sampled
def test_major_dimensions_and_swizzles(dtype, swizzles, a_turned, b_turned):
    acc = I32 if dtype == I8 else F32
    a, b = swizzles
    Case(
        a=dtype, acc=acc, k=128, n=128, a_swizzle=a, b_swizzle=b, a_turned=a_turned,
        b_turned=b_turned,
    ).check()  # fmt: skip


def test_without_a_swizzle():
    Case(a_swizzle=16, b_swizzle=16, k=32, n=32).check()
    Case(a_swizzle=16, b_swizzle=16, k=32, n=32, a_turned=True, b_turned=True).check()


@BOTH
@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 32, 16), (64, 192, 48), (128, 48, 16), (128, 512, 16), (256, 144, 32)]
)
def test_shapes(m, n, k, semantics):
    swizzle = 32 if semantics is LANE else 128
    if semantics is WARPGROUP:  # Layouts in shared memory are inferred, too.
        n, k = (n + 127) // 128 * 128, 64
    Case(m=m, n=n, k=k, a_swizzle=swizzle, b_swizzle=swizzle, semantics=semantics).check()


@pytest.mark.parametrize(
    ("n", "dtype", "pair"),
    [(8, F16, False), (264, E4M3, False), (24, F32, False), (80, BF16, True)],
)
def test_columns_in_multiples_of_8(n, dtype, pair):
    Case(n=n, k=128, a=dtype, b_turned=True, pair=pair).check()


@BOTH
@pytest.mark.parametrize("dtype", [F16, I8])
def test_the_left_operand_is_in_tensor_memory(dtype, semantics):
    acc = I32 if dtype == I8 else F32
    Case(a=dtype, acc=acc, k=128, n=128, a_in_tmem=True, semantics=semantics).check()


@BOTH
def test_one_warp_starts_it(semantics):
    made = Case(warp=True, semantics=semantics).check()
    assert made.ptx.count("tcgen05.mma.") == 4
    assert made.ptx.count("tcgen05.commit.") == 1


def test_tensor_memory_is_allocated_once_and_given_back():
    made = Case(n=96, k=16, a_swizzle=32, b_swizzle=32).compiled()
    (used,) = made.resources.reserved
    assert (used.name, used.amount, used.limit) == ("tmem_columns", 128, 512)
    lines = [line.strip() for line in made.ptx.splitlines() if "tcgen05." in line]
    names = [line.split()[0].removeprefix("tcgen05.") for line in lines]
    assert names[0].startswith("alloc.cta_group::1") and lines[0].endswith(", 128;")
    assert names[1].startswith("relinquish_alloc_permit.cta_group::1")
    assert names[-1].startswith("dealloc.cta_group::1") and lines[-1].endswith(", 128;")


@BOTH
def test_accumulating_is_a_value(semantics):
    steps, k = 3, 16

    def body(a, b, o, a_smem, b_smem, acc, filled, done):
        plgpu.copy_gmem_to_smem(a, a_smem, filled)
        plgpu.copy_gmem_to_smem(b, b_smem, filled)
        plgpu.barrier_wait(filled)

        def step(i, carry):
            part = pl.ds(pl.multiple_of(i * k, k), k)
            plgpu.tcgen05_mma(acc, a_smem.at[:, part], b_smem.at[part], accumulate=i > 0)
            return carry

        jax.lax.fori_loop(0, steps, step, 0)
        plgpu.tcgen05_mma(acc, a_smem.at[:, :k], b_smem.at[:k])
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        o[...] = plgpu.async_load_tmem(acc)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128, 64), jnp.float32),
        scratch_types=[
            smem((128, steps * k), F16, 32),
            smem((steps * k, 64), F16, 128),
            plgpu.TMEM((128, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    a, b = values("a", (128, steps * k), F16), values("b", (steps * k, 64), F16)
    made = pallasite.compile(kernel, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)),
                             target="sm_100a")  # fmt: skip
    (out,) = simulate(made, a, b).outputs
    np.testing.assert_array_equal(wide(out), wide(a) @ wide(b) + wide(a[:, :k]) @ wide(b[:k]))


# Pairs of blocks ----------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("m", "n", "cluster", "a_in_tmem"),
    [
        (128, 128, (2,), False),
        (64, 64, (2,), False),
        (128, 256, (2, 2), False),
        (128, 128, (3, 2), False),
        (128, 128, (2,), True),
    ],
)
def test_pairs(m, n, cluster, a_in_tmem, semantics):
    case = Case(m=m, n=n, pair=True, cluster=cluster, a_in_tmem=a_in_tmem, semantics=semantics,
                a_swizzle=64, b_swizzle=64)  # fmt: skip
    made = case.check()
    assert "cta_group::1" not in made.ptx
