"""What tests of refused products share."""

from __future__ import annotations

from jax.experimental import pallas as pl
from products_support import BF16, transforms
from refusals import build, make

from pallasite import gpu as plgpu

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
TILES = transforms(128, BF16)
TILE = plgpu.SMEM((64, 64), BF16, transforms=TILES)


def product(
    multiply,
    a=TILE,
    b=TILE,
    acc=lambda: plgpu.ACC((64, 64)),
    *,
    shape=(64, 64),
    target="sm_90a",
    **options,
) -> None:
    """Compiles a kernel that calls ``multiply(acc, a, b)``, the first two scratches in memory."""

    @make(shape, scratch_types=[a, b], **options)
    def kernel(x_ref, o_ref, a_smem, b_smem):
        def scope(acc):
            multiply(acc, a_smem, b_smem)
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, acc())

    build(kernel, target=target)


def smem(shape, dtype=BF16, swizzle=128):
    return plgpu.SMEM(shape, dtype, transforms=transforms(swizzle, dtype))
