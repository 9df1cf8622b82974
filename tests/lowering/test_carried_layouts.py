"""Branches and loops whose arrays end up in other layouts than they began with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

SEMANTICS = list(plgpu.LoweringSemantics)


def sliced_or_turned(x: Any) -> Any:
    part = x[54:64:1, 9:12:2]
    return lax.cond(jnp.max(part) > 1, lambda: part + part, lambda: jnp.flip(-x[:10, 1:3]))


def one_of_three(x: Any) -> Any:
    ways = [lambda: x[1:11, 2:4] * 3, lambda: x[:20:2, :2], lambda: jnp.zeros((10, 2), x.dtype)]
    return lax.switch(jnp.argmax(x[0, :3]), ways)


def turned_often(x: Any) -> Any:
    return lax.fori_loop(0, 5, lambda _, y: y.T.reshape(y.shape) + x, x)


def turned_while(x: Any) -> Any:
    def turn(carry: Any) -> Any:
        return carry[0] + 1, carry[1].T.reshape(x.shape) - x

    return lax.while_loop(lambda carry: carry[0] * carry[0] < 5, turn, (jnp.int32(0), x))[1]


@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
@pytest.mark.parametrize("function", [sliced_or_turned, one_of_three, turned_often, turned_while])
def test_results_have_one_layout(function: Callable[[Any], Any], semantics: Any) -> None:
    x = np.random.default_rng(5).integers(-40, 40, (64, 13)).astype(np.float32)

    def body(in_ref: Any, out_ref: Any) -> None:
        out_ref[...] = function(in_ref[...])

    kernel = plgpu.kernel(
        body,
        out_type=jax.eval_shape(function, x),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    found = simulate(pallasite.compile(kernel, x, target="sm_90a"), x).outputs[0]
    np.testing.assert_array_equal(found, jax.jit(function)(x))


@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_scratch_memory_grows_in_place(semantics: Any) -> None:
    def body(in_ref: Any, out_ref: Any) -> None:
        for rows in (65, 129, 193):
            out_ref[:rows] = jnp.flip(in_ref[:rows], 0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((193, 33), jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    x = np.random.default_rng(6).standard_normal((193, 33)).astype(np.float32)
    compiled = pallasite.compile(kernel, x, target="sm_90a")
    # Of the largest array, once or twice (in memory's order, and in the one that is wanted), each
    # with room for what all lanes hold: 16 bytes in each register of vectors.
    assert compiled.launch.shared_memory_bytes <= 2 * (x.nbytes + 128 * 16) + 1024
    assert sum("scratch" in row.what for row in compiled.resources.allocations) == 1
    np.testing.assert_array_equal(simulate(compiled, x).outputs[0], x[::-1])
