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


def small_or_taken(x: Any) -> Any:
    few = x[0, :4]
    return lax.cond(few[1] > 0, lambda: few + 1, lambda: taken(few))


def taken(x: Any) -> Any:
    """By numbers that all lanes hold, so that they may hold the result, too."""
    return jnp.take(x * 2, x.astype(jnp.int32) & 3, 0, mode="clip")


def taken_often(x: Any) -> Any:
    return lax.fori_loop(0, (x[0, 0] > 0).astype(jnp.int32) + 2, lambda _, y: taken(y), x[1, :4])


@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
@pytest.mark.parametrize(
    "function",
    [sliced_or_turned, one_of_three, turned_often, turned_while, small_or_taken, taken_often],
)
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


WIDE = plgpu.Layout.WG_STRIDED((16, 8), vec_size=1)
STEPS: dict[str, Callable[[Any], Any]] = {
    "sums": lambda x: lax.cumsum(x, 0),
    "products": lambda x: lax.cumprod(x, 1),
    "maxima": lambda x: lax.cummax(x, 0, reverse=True) + 1,
    "padded": lambda x: lax.pad(x, np.int32(5), [(1, -1, 0), (0, 0, 0)]),
    "cast": lambda x: plgpu.layout_cast(x, WIDE) * 2,
}


@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_equal_elements_become_different_ones(name: str, semantics: Any) -> None:
    """What a loop carries holds one number first, and is distributed by what its body does."""
    count = np.array([3], np.int32)

    def repeated(trips: Any, step: Callable[[Any], Any]) -> Any:
        start = jnp.full((16, 8), 2, jnp.int32)
        return lax.fori_loop(0, trips, lambda _, x: step(x), start)

    def body(in_ref: Any, out_ref: Any) -> None:
        out_ref[...] = repeated(in_ref[0], STEPS[name])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((16, 8), jnp.int32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    found = simulate(pallasite.compile(kernel, count, target="sm_90a"), count).outputs[0]
    expected = repeated(3, STEPS[name] if name != "cast" else lambda x: x * 2)
    np.testing.assert_array_equal(found, expected)


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
