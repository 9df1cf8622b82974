"""Arrays in global memory that lanes store to, and asynchronous copies read or overwrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import pallasite
from pallasite import gpu as plgpu

RNG = np.random.default_rng()
X = RNG.normal(size=(16, 32)).astype(np.float32)
BOTH = pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
FENCE = "fence.proxy.async.global"


def _kernel(body: Callable[..., None], semantics: Any, result: Any, **options: Any) -> Any:
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(result.shape, result.dtype),
        scratch_types=[plgpu.SMEM(result.shape, result.dtype), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics, target="sm_90a"),
        **options,
    )


def _back(out: Any, tile: Any, loaded: Any) -> Any:
    """What a copy reads of the result."""
    plgpu.copy_gmem_to_smem(out, tile, loaded)
    plgpu.barrier_wait(loaded)
    return tile[...]


def _stored(x: Any, out: Any, tile: Any, loaded: Any) -> None:
    out[...] = x[...] * 2
    out[...] = _back(out, tile, loaded) + 1


def _masked(x: Any, out: Any, tile: Any, loaded: Any) -> None:
    out[...] = x[...]
    triton.store(out, x[...] * 3, mask=x[...] > 0)
    out[...] = _back(out, tile, loaded) + 1


def _atomic(x: Any, out: Any, tile: Any, loaded: Any) -> None:
    tile[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out)
    plgpu.wait_smem_to_gmem(0)
    plgpu.atomic_add(out, x[...])
    plgpu.commit_smem()
    out[...] = _back(out, tile, loaded) + 1


def _in_a_loop(x: Any, out: Any, tile: Any, loaded: Any) -> None:
    out[...] = x[...]

    @pl.loop(0, 3)
    def _(step: Any) -> None:
        y = _back(out, tile, loaded)
        plgpu.commit_smem()
        out[...] = y * 2


def _reduced(x: Any, out: Any, tile: Any, loaded: Any) -> None:
    out[...] = x[...]
    tile[...] = x[...] * 4
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out, reduction_op="add")
    plgpu.wait_smem_to_gmem(0)


def _overwritten(x: Any, out: Any, tile: Any, loaded: Any) -> None:
    out[...] = x[...]
    tile[...] = x[...] * 4
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile.at[0:8], out.at[0:8])
    plgpu.wait_smem_to_gmem(0)


CASES = {
    _stored: 2 * X + 1,
    _masked: np.where(X > 0, 3 * X, X) + 1,
    _atomic: 2 * X + 1,
    _in_a_loop: 8 * X,
    _reduced: 5 * X,
    _overwritten: np.concatenate([4 * X[:8], X[8:]]),
}


@BOTH
@pytest.mark.parametrize("body", CASES)
def test_what_lanes_stored_is_visible_to_copies(body: Any, semantics: Any) -> None:
    kernel = _kernel(body, semantics, X)
    with pallasite.config.scoped(sanitize=True):
        np.testing.assert_allclose(kernel(X), CASES[body], rtol=1e-6)
    assert FENCE in pallasite.compile(kernel, X).ptx


@BOTH
def test_an_input_that_is_the_output(semantics: Any) -> None:
    def body(x: Any, out: Any, tile: Any, loaded: Any) -> None:
        out[...] = out[...] * 2
        out[...] = _back(x, tile, loaded) + 1

    kernel = _kernel(body, semantics, X, input_output_aliases={0: 0})
    with pallasite.config.scoped(sanitize=True):
        np.testing.assert_allclose(kernel(jnp.asarray(X)), 2 * X + 1, rtol=1e-6)
    assert FENCE in pallasite.compile(kernel, X).ptx


@BOTH
def test_rows_that_lanes_copy_are_read_by_a_copy(semantics: Any) -> None:
    """Copies of 26 bytes are made by all lanes; 16 bytes of that are one bulk copy."""
    x = RNG.integers(-99, 99, (1, 13)).astype(np.int16)

    def body(x_ref: Any, out: Any, tile: Any, loaded: Any) -> None:
        tile[...] = x_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out)
        plgpu.wait_smem_to_gmem(0)
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(out.at[:, 0:8], tile.at[:, 0:8], loaded)
        plgpu.barrier_wait(loaded)
        out[...] = tile[...] * 2

    kernel = _kernel(body, semantics, x)
    with pallasite.config.scoped(sanitize=True):
        np.testing.assert_array_equal(kernel(x), 2 * x)


@BOTH
def test_other_arrays_need_no_fence(semantics: Any) -> None:
    def body(x: Any, out: Any, tile: Any, loaded: Any) -> None:
        out[...] = _back(x, tile, loaded) * 2

    assert FENCE not in pallasite.compile(_kernel(body, semantics, X), X).ptx
