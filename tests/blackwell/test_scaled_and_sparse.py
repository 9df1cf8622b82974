"""Products with block scales and of sparse operands."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from tcgen05_support import (
    BF16,
    E4M3,
    E5M2,
    E8M0,
    F4,
    F16,
    F32,
    I8,
    I32,
    LANE,
    U2,
    WARPGROUP,
    bits,
    smem,
    values,
    wide,
)

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate


def scale_values(name, shape, dtype):
    """Random powers of two, which multiply exactly."""
    exponents = np.random.default_rng(len(name)).integers(-2, 3, shape)
    return (2.0**exponents).astype(np.float32).astype(dtype)


def formatted_scales(scales):
    """(rows, n) scales as they lie in shared memory."""
    rows, count = scales.shape
    padded = np.zeros((-(-rows // 128) * 128, count), scales.dtype)
    padded[:rows] = scales
    split = padded.reshape(-1, 4, 32, count // 4, 4)
    return np.ascontiguousarray(split.transpose(0, 3, 2, 1, 4)).reshape(-1, count // 4, 32, 16)


def formatted_scales_of_pairs(scales):
    """Those of b for pairs of blocks with 64 rows each."""
    rows, count = scales.shape
    columns = rows // 64
    split = scales.reshape(2, columns, 32, count // 4, 4).transpose(3, 0, 2, 1, 4)
    result = np.zeros((1, count // 4, 64, 16), scales.dtype)
    result[0, :, :, : columns * 4] = split.reshape(count // 4, 64, columns * 4)
    return result


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of ``blocks`` blocks with m rows each; see ``tcgen05_mma``."""

    m: int = 128
    n: int = 128
    k: int = 128
    a: Any = E4M3
    b: Any = None
    acc: Any = F32
    scale: Any = None
    block: int = 32
    sparse: bool = False
    pair: bool = False
    swizzle: int = 128
    a_in_tmem: bool = False
    warp: int | None = None
    """The one that starts the copies to tensor memory and the product; None for all together."""
    semantics: Any = LANE

    @property
    def b_dtype(self):
        return self.b or self.a

    def kernel(self):
        blocks = 2 if self.pair else 1
        rows, columns = self.m, self.n // blocks
        axis = "c" if self.pair else None
        count = self.k // self.block
        short = self.m == 64
        k_a = self.k // 2 if self.sparse else self.k

        def body(*refs, **scratch):
            *inputs, o = refs
            index = lax.axis_index("c") if self.pair else jnp.int32(0)
            a_part, b_part = index * rows, index * columns
            views = [inputs[0].at[pl.ds(a_part, rows)], inputs[1].at[pl.ds(b_part, columns)]]
            rest = inputs[2:]
            if self.scale is not None:
                views += [rest[0].at[pl.ds(index, 1)] if blocks == 2 else rest[0], rest[1]]
                rest = rest[2:]
            if self.sparse:
                views.append(rest[0].at[pl.ds(index, 1)])
            filled = scratch["filled"]
            for view, target in zip(views, scratch["smem"], strict=True):
                plgpu.copy_gmem_to_smem(view, target, filled)
            plgpu.barrier_wait(filled)
            if self.pair:
                plgpu.barrier_arrive(scratch["both"])
                plgpu.barrier_wait(scratch["both"])

            def start():
                a_smem, b_smem, *others = scratch["smem"]
                options = {}
                if self.a_in_tmem:
                    plgpu.async_copy_smem_to_tmem(a_smem, scratch["left"], axis)
                    a_smem = scratch["left"]
                if self.scale is not None:
                    for source, name in zip(others[:2], ("a_scale", "b_scale"), strict=True):
                        plgpu.async_copy_scales_to_tmem(source, scratch[name], axis)
                        options[name] = scratch[name]
                    others = others[2:]
                if self.sparse:
                    plgpu.async_copy_sparse_metadata_to_tmem(others[0], scratch["meta"], axis)
                    options["a_sparse_metadata"] = scratch["meta"]
                plgpu.tcgen05_mma(
                    scratch["acc"],
                    a_smem,
                    plgpu.transpose_ref(b_smem, (1, 0)),
                    scratch["done"],
                    accumulate=False,
                    collective_axis=axis,
                    **options,
                )

            if self.warp is None:
                start()
            else:
                plgpu.warp_map(lambda warp: pl.when(warp == self.warp)(start))
            plgpu.barrier_wait(scratch["done"])
            o[pl.ds(a_part, rows)] = plgpu.async_load_tmem(scratch["acc"])

        shared = [smem((rows, k_a), self.a, self.swizzle),
                  smem((columns, self.k), self.b_dtype, self.swizzle)]  # fmt: skip
        scratch: dict[str, Any] = dict(
            acc=plgpu.TMEM((rows, self.n), self.acc, packed=False, collective=self.pair),
            done=plgpu.Barrier(orders_tensor_core=True),
        )
        if self.a_in_tmem:
            scratch["left"] = plgpu.TMEM((rows, k_a), self.a, packed=True, collective=self.pair)
        if self.scale is not None:
            names = plgpu.TMEMLayout
            b_rows = 256 if short else -(-self.n // 128) * 128
            shared.append(plgpu.SMEM((1, count // 4, 32, 16), self.scale))
            shape = (1, count // 4, 64, 16) if short else (b_rows // 128, count // 4, 32, 16)
            shared.append(plgpu.SMEM(shape, self.scale))
            scratch["a_scale"] = plgpu.TMEM(
                (128, count), self.scale, layout=names.SCALES_LAYOUT, collective=self.pair
            )
            scratch["b_scale"] = plgpu.TMEM(
                (b_rows, count),
                self.scale,
                layout=names.SCALES_M64_COLLECTIVE_LAYOUT if short else names.SCALES_LAYOUT,
                collective=self.pair,
            )
        if self.sparse:
            entries = self.entries
            shared.append(plgpu.SMEM((1, entries // 64, 128, 64), U2))
            scratch["meta"] = plgpu.TMEM(
                (rows, entries),
                U2,
                layout=plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT,
                collective=self.pair,
            )
        if self.pair:
            scratch["both"] = plgpu.ClusterBarrier(collective_axes=("c",))
        scratch["smem"] = shared
        scratch["filled"] = plgpu.Barrier(num_arrivals=len(shared))
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((rows * blocks, self.n), self.acc),
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(lowering_semantics=self.semantics),
            **(dict(cluster=(2,), cluster_names=("c",)) if self.pair else {}),
        )

    @property
    def entries(self):
        """Numbers of metadata for each row."""
        return self.k // (8 if bits(self.a) == 4 else 4) * 2

    def check(self):
        blocks = 2 if self.pair else 1
        rows = self.m * blocks
        a = values("a", (rows, self.k // 2 if self.sparse else self.k), self.a)
        b = values("b", (self.n, self.k), self.b_dtype)
        inputs, left, right = [a, b], wide(a), wide(b)
        metadata = None
        if self.sparse:
            groups = self.entries // 2
            kept = np.array(
                [np.sort(np.random.default_rng(i).permutation(4)[:2]) for i in range(rows * groups)]
            )
            kept = kept.reshape(rows, groups, 2)
            size = self.k // groups // 4  # Neighbours that are kept together.
            full = np.zeros((rows, groups, 4, size))
            np.put_along_axis(full, kept[..., None], left.reshape(rows, groups, 2, size), axis=2)
            left = full.reshape(rows, self.k)
            metadata = plgpu.format_tcgen05_sparse_metadata(
                jnp.asarray(kept.astype(np.uint8).astype(ml_dtypes.uint2)), self.a
            )
        if self.scale is not None:
            a_scale = scale_values("a", (rows, self.k // self.block), self.scale)
            b_scale = scale_values("bb", (self.n, self.k // self.block), self.scale)
            parts = [formatted_scales(part) for part in np.split(a_scale, blocks)]
            inputs.append(np.concatenate(parts))
            pairs = formatted_scales_of_pairs if self.m == 64 else formatted_scales
            inputs.append(pairs(b_scale))
            left = left * np.repeat(a_scale.astype(np.float64), self.block, axis=1)
            right = right * np.repeat(b_scale.astype(np.float64), self.block, axis=1)
        if metadata is not None:
            inputs.append(np.asarray(metadata))
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
        made = pallasite.compile(self.kernel(), *types, target="sm_100a")
        (out,) = simulate(made, *inputs).outputs
        np.testing.assert_array_equal(wide(out), left @ right.T)
        return made


BOTH = pytest.mark.parametrize("semantics", [LANE, WARPGROUP], ids=["lane", "warpgroup"])


@BOTH
@pytest.mark.parametrize(
    ("a", "b", "scale", "block", "text"),
    [
        (E4M3, E5M2, E8M0, 32, "kind::mxf8f6f4.block_scale.scale_vec::1X"),
        (F4, F4, E8M0, 32, "kind::mxf4nvf4.block_scale.scale_vec::2X"),
        (F4, F4, E4M3, 16, "kind::mxf4nvf4.block_scale.scale_vec::4X"),
        (F4, F4, E8M0, 16, "kind::mxf4nvf4.block_scale.scale_vec::4X"),
    ],
    ids=["mxfp8", "mxfp4", "nvfp4", "e8m0-by-16"],
)
def test_scales(a, b, scale, block, text, semantics):
    made = Case(a=a, b=b, scale=scale, block=block, k=256, n=136 if a == F4 else 64,
                semantics=semantics).check()  # fmt: skip
    assert text in made.ptx


@pytest.mark.parametrize(("m", "n"), [(128, 128), (64, 64), (64, 192)])
def test_scales_of_pairs(m, n):
    Case(m=m, n=n, a=E5M2, scale=E8M0, pair=True).check()


def test_scales_of_several_parts_of_the_columns():
    Case(n=384, a=E4M3, scale=E8M0).check()


@BOTH
@pytest.mark.parametrize(
    ("dtype", "acc", "swizzle"), [(F16, F32, 128), (BF16, F32, 64), (E4M3, F16, 64), (I8, I32, 64)]
)
def test_sparse(dtype, acc, swizzle, semantics):
    Case(a=dtype, acc=acc, sparse=True, n=48, swizzle=swizzle, semantics=semantics).check()


@pytest.mark.parametrize("dtype", [F16, E5M2])
def test_sparse_pairs(dtype):
    Case(a=dtype, sparse=True, n=64, pair=True, swizzle=64).check()


@BOTH
@pytest.mark.parametrize(
    ("a", "options"),
    [
        (E5M2, dict(scale=E8M0, warp=0)),
        (F4, dict(scale=E4M3, block=16, k=256, a_in_tmem=True, pair=True, warp=3)),
        (E4M3, dict(scale=E8M0, block=64, sparse=True, k=256, a_in_tmem=True, warp=2)),
    ],
    ids=["scales", "pair", "metadata"],
)
def test_one_warp_copies_and_multiplies(a, options, semantics):
    """Scales, metadata and the left operand, which products of the same thread come after."""
    Case(a=a, n=64, semantics=semantics, **options).check()


@pytest.mark.parametrize(
    ("a", "scale", "block"), [(E5M2, E8M0, 64), (F4, E8M0, 64), (F4, E4M3, 32)]
)
def test_sparse_with_scales(a, scale, block):
    Case(a=a, scale=scale, block=block, sparse=True, k=256, n=64, swizzle=64).check()


@BOTH
@pytest.mark.parametrize(
    ("a", "options"),
    [
        (E5M2, dict(scale=E8M0)),
        (F4, dict(scale=E4M3, block=16, k=256)),
        (F4, dict(scale=E8M0, k=256, pair=True)),
        (F16, dict(sparse=True)),
        (E4M3, dict(sparse=True, pair=True, swizzle=64)),
        (E4M3, dict(scale=E8M0, block=64, sparse=True, k=256)),
    ],
    ids=str,
)
@pytest.mark.sampled(alone=("a", "options", "semantics"))
def test_the_left_operand_is_in_tensor_memory(a, options, semantics):
    made = Case(a=a, n=64, a_in_tmem=True, semantics=semantics, **options).check()
    assert "[a], b" in made.ptx
