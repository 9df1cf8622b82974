"""Products whose tiles are sent as they are made, and configurations of products."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import gradients, mesh_of, numbers
from jax.sharding import PartitionSpec

import pallasite
from pallasite import config
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_multigpu import ops
from pallasite_multigpu.ops import fused_choice, gathered_product, scattered_product


@pytest.mark.parametrize(
    ("count", "m", "n", "k", "out"),
    [(2, 256, 256, 128, jnp.float32), (3, 384, 256, 64, jnp.bfloat16)],
)
def test_a_product_whose_tiles_are_sent(count, m, n, k, out, monkeypatch):
    monkeypatch.setattr(fused_choice, "APART", 10**9)
    x, y = numbers((count, m, k), jnp.bfloat16), numbers((count, k, n), jnp.bfloat16, 1)
    d_out = numbers((count, m // count, n), jnp.bfloat16, 2)
    mesh, spec = mesh_of(x=count), PartitionSpec("x")
    operation = functools.partial(ops.matmul_reduce_scatter, axis_name="x", out_dtype=out)

    def one(a, b):
        return operation(a[0], b[0])[None]

    call = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    wide, right, d_wide = (each.astype(np.float64) for each in (x, y, d_out))
    with pallasite.target("sm_90a"), config.scoped(sanitize=True):
        (kernel,) = pallasite.compile_all(call, x, y)
        assert kernel.name == "matmul_reduce_scatter"
        found = np.asarray(jax.jit(call)(x, y))
        of_x, _ = gradients(operation, [x, y], d_out.astype(out))
    expected = np.einsum("dmk,dkn->mn", wide, right).reshape(found.shape)
    tolerance = 1e-4 if out == jnp.float32 else 2e-2
    assert found.dtype == out
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()
    if out == jnp.bfloat16:  # Only what travels is rounded, and the sum.
        each = np.einsum("dmk,dkn->dmn", wide, right).reshape(count, *found.shape)
        rounded, own = each.astype(out).astype(np.float64), np.arange(count)
        total = rounded.sum(0) - rounded[own, own] + each[own, own]
        assert (found != total.astype(out)).mean() < 0.005
    expected = np.einsum("mn,dkn->dmk", d_wide.reshape(m, n), right)
    assert np.abs(of_x - expected).max() < 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize(("n", "tile_n"), [(512, 128), (384, 192)])
def test_blocks_that_send_several_tiles_and_sum_up_several(n, tile_n):
    count, m, k = 2, 512, 64
    x, y = numbers((count, m, k), np.float16), numbers((count, k, n), np.float16, 1)
    mesh, spec = mesh_of(x=count), PartitionSpec("x")
    chosen = MatmulConfig(tile_n=tile_n, stages=2, group=3, epilogue_n=32, grid_minor="n")

    def one(a, b):
        return scattered_product.scattered_product(a[0], b[0], "x", count, jnp.float32, 3, chosen)[
            None
        ]

    call = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pallasite.target("sm_90a"), config.scoped(sanitize=True):
        found = np.asarray(jax.jit(call)(x, y)).reshape(m, n)
    expected = np.einsum("dmk,dkn->mn", x.astype(np.float64), y.astype(np.float64))
    np.testing.assert_allclose(found, expected, 1e-5, 1e-4)


@pytest.mark.parametrize(
    ("chosen", "fused"),
    [
        (MatmulConfig(tile_m=64, tile_n=128, tile_k=64, stages=2, split="n"), True),
        (MatmulConfig(tile_m=128, tile_n=128, stages=2, cluster=2, epilogue_n=32), False),
        (MatmulConfig(tile_m=128, tile_n=256, stages=2, split_k=2), False),
    ],
    ids=["tiles", "clusters", "split-k"],
)
def test_configurations_of_products(chosen, fused):
    x, y = numbers((2, 256, 128), jnp.bfloat16), numbers((2, 128, 256), jnp.bfloat16, 1)
    mesh, spec = mesh_of(x=2), PartitionSpec("x")
    options = {"axis_name": "x", "out_dtype": jnp.float32, "config": chosen}

    def both(a, b):
        gathered = ops.all_gather_matmul(a[0], b[0], **options)
        return gathered[None], ops.matmul_reduce_scatter(a[0], b[0], **options)[None]

    call = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)
    with pallasite.target("sm_90a"):
        names = [one.name for one in pallasite.compile_all(call, x, y)]
        gathered, scattered = (np.asarray(one) for one in jax.jit(call)(x, y))
    assert ("all_gather_matmul" in names) == (fused or chosen.cluster == 2), names
    assert ("matmul_reduce_scatter" in names) == fused
    wide, right = x.astype(np.float64), y.astype(np.float64)
    whole = wide.reshape(512, 128)
    for device in range(2):
        np.testing.assert_allclose(gathered[device], whole @ right[device], 1e-5, 1e-4)
    total = sum(wide[device] @ right[device] for device in range(2))
    np.testing.assert_allclose(scattered.reshape(256, 256), total, 1e-5, 1e-4)


@pytest.mark.parametrize(
    ("m", "n", "k", "gathered", "scattered"),
    [
        (1024, 4096, 4096, (128, 256), (128, 256)),
        (512, 4096, 4096, (128, 128), (128, 128)),
        (128, 4096, 4096, None, None),
        (256, 1024, 4096, None, None),
        (1000, 4096, 4096, None, None),
    ],
)
def test_one_kernel_or_two(m, n, k, gathered, scattered):
    """Few tiles do not occupy the GPU; two kernels share k among blocks, or take few rows."""

    def tile(config):
        return config and (config.tile_m, config.tile_n)

    types = jnp.bfloat16, jnp.bfloat16
    with pallasite.target("sm_90a"):
        assert tile(gathered_product.default(m, n, k, *types, 2)) == gathered
        assert tile(scattered_product.default(2 * m, n, k, *types, 2)) == scattered
