"""Stores over earlier stores to arrays in global memory that the kernel does not read."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite._jax import masked_swap
from pallasite_simulator import simulate

Semantics = plgpu.LoweringSemantics
BOTH = pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
N = 512
RNG = np.random.default_rng()
X = RNG.normal(size=(N,)).astype(np.float32)
ROWS = RNG.permutation(N)[:64].astype(np.int32)


def _kernel(body: Callable[..., None], semantics: Any) -> Any:
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((N,), jnp.float32),
        compiler_params=plgpu.CompilerParams(target="sm_90a", lowering_semantics=semantics),
    )


def _barriers(body: Callable[..., None], semantics: Any) -> int:
    """How many barriers a kernel of X and ROWS has."""
    compiled = pallasite.compile(
        _kernel(body, semantics),
        jax.ShapeDtypeStruct(X.shape, X.dtype),
        jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype),
    )
    return len(re.findall(r"\bbar\.sync|\bbarrier\.sync", compiled.ptx))


def _window(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.zeros((N,), jnp.float32)
    out_ref[pl.ds(3, 64)] = x_ref[pl.ds(0, 64)]


def _stride(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...]
    out_ref[3:50:7] = jnp.full((7,), 2.0)


def _scalar(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * 2
    out_ref[5] = x_ref[9]


def _window_over_scalar(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[pl.ds(256, 256)] = x_ref[pl.ds(256, 256)]
    out_ref[77] = x_ref[9]
    out_ref[pl.ds(0, 256)] = x_ref[pl.ds(0, 256)] + 1


def _indexed(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.zeros((N,), jnp.float32)
    out_ref[rows_ref[...]] = x_ref[pl.ds(0, 64)]


def _over_indexed(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.zeros((N,), jnp.float32)
    out_ref[rows_ref[...]] = x_ref[pl.ds(0, 64)]
    out_ref[pl.ds(100, 200)] = x_ref[pl.ds(100, 200)]


def _masked(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.zeros((N,), jnp.float32)
    value = x_ref[pl.ds(1, 65)]
    masked_swap(out_ref, pl.ds(64, 65), value, mask=value > 0)


def _computed(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    row = rows_ref[0]
    out_ref[...] = x_ref[...]
    out_ref[pl.ds(lax.div(row, 64) * 8 + 1, 64)] = x_ref[pl.ds(0, 64)] * 3
    out_ref[pl.ds(lax.div(row, 64) * 8 + 8, 64)] = x_ref[pl.ds(64, 64)]


def _after_branch(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.zeros((N,), jnp.float32)

    @pl.when(rows_ref[0] >= 0)
    def _() -> None:
        out_ref[pl.ds(1, 65)] = x_ref[pl.ds(0, 65)]

    out_ref[pl.ds(30, 64)] = x_ref[pl.ds(0, 64)]


def _both_conditions(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    """The second branch is chosen where the first one is, and in other cases, too."""
    first = rows_ref[0]
    out_ref[...] = x_ref[...]

    @pl.when(first > -3)
    def _() -> None:
        out_ref[pl.ds(0, 128)] = x_ref[pl.ds(0, 128)] * 2

    @pl.when(first != -3)
    def _() -> None:
        out_ref[pl.ds(1, 65)] = x_ref[pl.ds(0, 65)]


def _after_loop(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    @pl.loop(0, 8)
    def _(i: Any) -> None:
        out_ref[pl.ds(i * 64, 64)] = x_ref[pl.ds(i * 64, 64)]

    out_ref[...] = x_ref[...] * 2


def _in_a_loop(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    """The first store of an iteration overwrites what the second one of the last wrote."""
    x = x_ref[...]

    @pl.loop(0, 3)
    def _(_):
        out_ref[...] = x
        out_ref[4:60] = x[5:61]


def _by_turns(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    """No iteration has both stores."""
    x = x_ref[...]

    @pl.loop(0, 4)
    def _(i):
        @pl.when(i % 2 == 0)
        def _():
            out_ref[...] = x

        @pl.when(i % 2 == 1)
        def _():
            out_ref[4:60] = x[5:61]


def _in_inner_loops(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    x = x_ref[...]

    @pl.loop(0, 2)
    def _(_):
        @pl.loop(0, 2)
        def _(_):
            out_ref[0:50] = x[3:53]

        out_ref[:300] = x[:300]

        @pl.loop(0, 2)
        def _(_):
            out_ref[2:400] = x[1:399]

    out_ref[400:] = x[400:]


def _sliding(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    """Each iteration stores where the next one does, and a part of that anew."""

    @pl.loop(0, 8)
    def _(i):
        out_ref[pl.ds(i * 64, 64)] = x_ref[pl.ds(i * 64, 64)]
        out_ref[pl.ds(i * 64 + 3, 9)] = x_ref[pl.ds(0, 9)]


def _expected(body: Any) -> np.ndarray:
    out = np.zeros(N, np.float32)
    if body is _window:
        out[3:67] = X[:64]
    elif body is _stride:
        out[:] = X
        out[3:50:7] = 2
    elif body is _scalar:
        out[:] = X * 2
        out[5] = X[9]
    elif body is _window_over_scalar:
        out[:] = np.concatenate([X[:256] + 1, X[256:]])
    elif body in (_indexed, _over_indexed):
        out[ROWS] = X[:64]
        if body is _over_indexed:
            out[100:300] = X[100:300]
    elif body in (_in_a_loop, _by_turns):
        out[:] = X
        out[4:60] = X[5:61]
    elif body is _in_inner_loops:
        out[:] = X
        out[2:400] = X[1:399]
    elif body is _sliding:
        out[:] = X
        for start in range(3, N, 64):
            out[start : start + 9] = X[:9]
    elif body is _masked:
        out[64:129] = np.where(X[1:66] > 0, X[1:66], 0)
    elif body is _computed:
        start = int(ROWS[0]) // 64 * 8
        out[:] = X
        out[start + 1 : start + 65] = X[:64] * 3
        out[start + 8 : start + 72] = X[64:128]
    elif body is _after_branch:
        out[1:66] = X[:65]
        out[30:94] = X[:64]
    elif body is _both_conditions:
        out[:] = X
        out[:128] *= 2
        out[1:66] = X[:65]
    else:
        out[:] = X * 2
    return out


OVERWRITES = [
    _window,
    _stride,
    _scalar,
    _window_over_scalar,
    _indexed,
    _over_indexed,
    _masked,
    _computed,
    _after_branch,
    _both_conditions,
    _after_loop,
    _in_a_loop,
    _by_turns,
    _in_inner_loops,
    _sliding,
]


@BOTH
@pytest.mark.parametrize("body", OVERWRITES)
def test_later_stores_win(body: Any, semantics: Any) -> None:
    compiled = pallasite.compile(_kernel(body, semantics), X, ROWS)
    simulation = simulate(compiled, X, ROWS, sanitize=True)
    assert not simulation.findings
    np.testing.assert_array_equal(simulation.outputs[0], _expected(body))


def _disjoint(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[pl.ds(0, 256)] = x_ref[pl.ds(0, 256)]
    out_ref[pl.ds(256, 255)] = x_ref[pl.ds(256, 255)]
    out_ref[511] = x_ref[0]


def _interleaved(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[0:512:2] = jnp.full((256,), 1.0)
    out_ref[1:512:2] = jnp.full((256,), 2.0)


def _exclusive(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    def first() -> None:
        out_ref[...] = x_ref[...]

    def second() -> None:
        out_ref[pl.ds(1, 65)] = x_ref[pl.ds(0, 65)]

    def third() -> None:
        out_ref[9] = x_ref[0]

    lax.cond(rows_ref[0] > 3, first, lambda: lax.cond(rows_ref[1] > 3, second, third))


def _other_conditions(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    first, second = rows_ref[0], rows_ref[1]

    @pl.when(first * 8 + 3 < second)
    def _() -> None:
        out_ref[...] = x_ref[...]

    @pl.when(first * 8 + 2 == second)
    def _() -> None:
        out_ref[pl.ds(0, 65)] = x_ref[pl.ds(0, 65)]

    @pl.when(first * 8 + 3 == second)
    def _() -> None:
        out_ref[pl.ds(1, 65)] = x_ref[pl.ds(1, 65)]


def _same_place(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...]
    out_ref[...] = x_ref[...] * 2


def _same_scalar(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[7] = x_ref[0]
    out_ref[7] = x_ref[1]


def _in_loop(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    @pl.loop(0, 4)
    def _(i: Any) -> None:
        out_ref[pl.ds(i * 128, 64)] = x_ref[pl.ds(i * 128, 64)]
        out_ref[pl.ds(i * 128 + 64, 64)] = x_ref[pl.ds(i * 128 + 64, 64)]


NO_OVERWRITES = [
    _disjoint,
    _interleaved,
    _exclusive,
    _other_conditions,
    _same_place,
    _same_scalar,
    _in_loop,
]


@BOTH
@pytest.mark.parametrize("body", NO_OVERWRITES)
def test_other_stores_have_no_barrier(body: Any, semantics: Any) -> None:
    assert _barriers(body, semantics) == 0


def _one_barrier(x_ref: Any, rows_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.zeros((N,), jnp.float32)

    @pl.loop(0, rows_ref[0])
    def _(i: Any) -> None:
        for place in range(4):
            out_ref[pl.ds(100 * place + 1, 64)] = x_ref[pl.ds(i, 64)]


@BOTH
def test_one_barrier_for_several_stores(semantics: Any) -> None:
    assert _barriers(_one_barrier, semantics) == 1


@BOTH
def test_no_barriers_where_they_are_left_out(semantics: Any) -> None:
    kernel = plgpu.kernel(
        _window,
        out_type=jax.ShapeDtypeStruct((N,), jnp.float32),
        compiler_params=plgpu.CompilerParams(
            target="sm_90a", lowering_semantics=semantics, unsafe_no_auto_barriers=True
        ),
    )
    compiled = pallasite.compile(
        kernel,
        jax.ShapeDtypeStruct(X.shape, X.dtype),
        jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype),
    )
    assert "bar.sync" not in compiled.ptx


@BOTH
def test_lanes_that_store_the_same_are_not_late(semantics: Any) -> None:
    """Several threads store each element; none stores an earlier one after a later one."""

    def body(x_ref: Any, out_ref: Any) -> None:
        x = x_ref[...]
        store = functools.partial(out_ref.__setitem__, ...)
        lax.fori_loop(0, 2, lambda _, none: store(x), None)
        out_ref[...] = x + x

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((7,), np.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    with pallasite.config.scoped(sanitize=True):
        np.testing.assert_array_equal(kernel(X[:7]), 2 * X[:7])


@BOTH
def test_one_array_by_two_references(semantics: Any) -> None:
    """An operand and the result in its place are both stored to, and never loaded."""

    def body(given_ref: Any, x_ref: Any, out_ref: Any) -> None:
        x = x_ref[...]
        given_ref[...] = x
        out_ref[...] = x.T

    x = X[:49].reshape(7, 7)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    with pallasite.config.scoped(sanitize=True):
        np.testing.assert_array_equal(kernel(np.zeros_like(x), x), x.T)
