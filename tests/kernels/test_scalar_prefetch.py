"""Index maps of pallas_call that read arrays: scalar prefetch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallasite import gpu as plgpu

X = jnp.asarray(np.random.default_rng(0).normal(size=(40, 16)).astype(jnp.float32))
TABLE = jnp.asarray([3, 1, 4, 0, 2], jnp.int32)


@pytest.mark.parametrize("order", ["parallel", "sequential"])
def test_blocks_in_the_order_of_a_table(order: str) -> None:
    def kernel(table: Any, x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * table[pl.program_id(0)].astype(jnp.float32)

    specification = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(5,),
        in_specs=[pl.BlockSpec((8, 16), lambda i, table: (table[i], 0))],
        out_specs=pl.BlockSpec((8, 16), lambda i, table: (i, 0)),
    )
    function = pl.pallas_call(
        kernel,
        grid_spec=specification,
        out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype),
        compiler_params=plgpu.CompilerParams(dimension_semantics=(order,)),
    )
    blocks = np.asarray(X).reshape(5, 8, 16)
    want = blocks[np.asarray(TABLE)] * np.asarray(TABLE)[:, None, None]
    np.testing.assert_allclose(np.asarray(function(TABLE, X)).reshape(5, 8, 16), want)
