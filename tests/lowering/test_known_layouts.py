"""What meets an array whose layout is known is loaded in that layout, in either semantics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError
from pallasite.language.memory import SMEM
from pallasite_std.primitives.layouts import Layout, layout_cast

SHAPE = (64, 32)

pytestmark = pytest.mark.usefixtures("semantics")


def run(body, *inputs, scratch=()):
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=list(scratch),
    )
    return kernel(*inputs)


def inputs(*shapes):
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.standard_normal(shape).astype(jnp.float32)) for shape in shapes]


@pytest.mark.runs_kernels
def test_load_beside_a_cast():
    """One operand is cast, the other is loaded in its layout."""

    def body(x, y, o):
        o[...] = layout_cast(x[...], Layout.WGMMA) + y[...]

    x, y = inputs(SHAPE, SHAPE)
    np.testing.assert_array_equal(run(body, x, y), x + y)


@pytest.mark.runs_kernels
def test_load_beside_a_part():
    """The part of an array has the layout that its part of the layout is."""

    def body(x, y, o):
        whole = layout_cast(x[...], Layout.WGMMA)
        o[...] = whole[:, 32:64] * 2 - y[...]

    x, y = inputs((64, 64), SHAPE)
    np.testing.assert_array_equal(run(body, x, y), x[:, 32:] * 2 - y)


@pytest.mark.runs_kernels
def test_through_a_call_and_shared_memory():
    """Layouts are known on both sides of a nested jit, and for shared memory."""

    @jax.jit
    def add(x, y):
        return x + y

    def body(x, y, o, scratch):
        scratch[...] = y[...]
        o[...] = add(layout_cast(x[...], Layout.WGMMA), scratch[...])

    x, y = inputs(SHAPE, SHAPE)
    np.testing.assert_array_equal(run(body, x, y, scratch=[SMEM(SHAPE, jnp.float32)]), x + y)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("first", [True, False])
def test_through_branches(first):
    """A branch knows the layouts of what it captures, and the other one that of its result."""

    def body(x, y, o, scratch):
        scratch[...] = y[...]
        known = layout_cast(x[...], Layout.WGMMA)
        total = jax.lax.cond(
            (x[0, 0] > -100) == first, lambda: scratch[...] + known, lambda: scratch[...] * 2
        )
        o[...] = total + y[...]

    x, y = inputs(SHAPE, SHAPE)
    expected = (y + x if first else y * 2) + y
    result = run(body, x, y, scratch=[SMEM(SHAPE, jnp.float32)])
    np.testing.assert_array_equal(result, expected)


@pytest.mark.runs_kernels
def test_wishes_come_first(semantics):
    """Two casts that disagree are an error in lane semantics; inference converts an array."""

    def body(x, y, o):
        left = layout_cast(x[...], Layout.WGMMA)
        right = layout_cast(y[...], Layout.WG_STRIDED(SHAPE, vec_size=4))
        o[...] = left + right

    x, y = inputs(SHAPE, SHAPE)
    if semantics is plgpu.LoweringSemantics.Warpgroup:
        np.testing.assert_array_equal(run(body, x, y), x + y)
        return
    with pytest.raises(InvalidValueError, match="distributed over the lanes in different ways"):
        run(body, x, y)
