"""Arrays of more than 2**31 elements: offsets have 64 bits, indices along a dimension 32."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import UnsupportedError

BIG = 2**31 + 4096


def _compiled(kernel, *shapes):
    operands = [jax.ShapeDtypeStruct(shape, jnp.int8) for shape in shapes]
    return pallasite.compile(kernel, *operands, target="sm_90a")


def _kernel(body, shape, blocks):
    out_type = jax.ShapeDtypeStruct(shape, jnp.int8)
    return plgpu.kernel(body, out_type=out_type, grid=(blocks,), grid_names=("block",))


def test_offsets_have_64_bits():
    def row(x_ref, out_ref):
        block = lax.axis_index("block")
        out_ref[block] = x_ref[block]

    rows, columns = 2**21, 2048
    ptx = _compiled(_kernel(row, (rows, columns), rows), (rows, columns)).ptx
    assert "mul.lo.s32" not in ptx


def test_offsets_of_lanes_have_64_bits():
    def column(x_ref, out_ref):
        out_ref[...] = x_ref[:, lax.axis_index("block")]

    ptx = _compiled(_kernel(column, (128,), 8), (128, 2**26)).ptx
    assert re.search(rf"mul\.wide\.u32 .*, {2**26};", ptx)


def _by_index(x_ref, out_ref):
    where = pl.ds(lax.axis_index("block") * 128, 128)
    out_ref[where] = x_ref[where]


def _copy(x_ref, out_ref):
    out_ref[...] = x_ref[...]


def _by_block_spec(x):
    spec = pl.BlockSpec((2048,), lambda i: (i,))
    return pl.pallas_call(
        _copy,
        grid=(BIG // 2048,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((BIG,), jnp.int8),
        compiler_params=plgpu.CompilerParams(),
    )(x)


@pytest.mark.parametrize("kernel", [_kernel(_by_index, (BIG,), BIG // 128), _by_block_spec])
def test_indices_that_wrap_around_are_refused(kernel):
    with pytest.raises(UnsupportedError, match="a computed index along dimension 0") as raised:
        _compiled(kernel, (BIG,))
    assert "reshape the array" in str(raised.value)
