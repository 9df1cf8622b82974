"""Which layout counts where several sources give one: the first in the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from kernels import array, compile_kernel, make
from pallasite import plugins
from pallasite.errors import InvalidValueError
from pallasite.target_selection import find_target
from pallasite_std.lane_layouts.known_layouts import KnownLayouts
from pallasite_std.primitives.layouts import Layout, layout_cast

SHAPE = (64, 32)
WGMMA = Layout.WGMMA
STRIDED = Layout.WG_STRIDED(SHAPE, vec_size=4)


def known(function):
    """The known layouts of the last result, and of the last input, of a function of arrays."""
    jaxpr = jax.make_jaxpr(function)(*[jnp.zeros(SHAPE)] * 3).jaxpr
    layouts = KnownLayouts(plugins.registry(), find_target("sm_90a"))
    layouts.add(jaxpr)
    return layouts.layout(jaxpr.outvars[-1]), layouts.layout(jaxpr.invars[-1])


def one_after_the_other(first, second):
    return lambda x, y, z: layout_cast(x, first) + (layout_cast(y, second) + z)


def the_second_in_a_call(first, second):
    inner = jax.jit(lambda y, z: layout_cast(y, second) + z)
    return lambda x, y, z: layout_cast(x, first) + inner(y, z)


def the_first_in_a_branch(first, second):
    def function(x, y, z):
        chosen = jax.lax.cond(x[0, 0] > 0, lambda: layout_cast(x, first), lambda: x)
        return chosen + (layout_cast(y, second) + z)

    return function


@pytest.mark.parametrize(
    "make_function", [one_after_the_other, the_second_in_a_call, the_first_in_a_branch]
)
@pytest.mark.parametrize(
    ("first", "second"), [(WGMMA, STRIDED), (STRIDED, WGMMA)], ids=["WGMMA", "STRIDED"]
)
def test_the_first_source_counts(make_function, first, second):
    expected = first.resolve(SHAPE, jnp.dtype("float32"))
    assert expected != second.resolve(SHAPE, jnp.dtype("float32"))
    assert known(make_function(first, second)) == (expected, expected)


@pytest.mark.parametrize("between", [True, False])
def test_the_only_source_counts_wherever_it_is(between):
    """A source that knows nothing, here a part of an array without a layout, is passed over."""

    def function(x, y, z):
        part = jnp.concatenate([y, y])[:64] if between else y
        return part + layout_cast(x, WGMMA) + z

    expected = WGMMA.resolve(SHAPE, jnp.dtype("float32"))
    assert known(function) == (expected, expected)


def test_a_load_begins_in_the_layout_of_the_first(lane_semantics):
    """Then the line with the second cast is the wrong one, not the one with the load."""

    @make(SHAPE)
    def kernel(x, y, z, o):
        total = layout_cast(x[...], WGMMA) + z[...]
        o[...] = total + layout_cast(y[...], STRIDED)

    with pytest.raises(InvalidValueError, match="in different ways") as caught:
        compile_kernel(kernel, *[array(*SHAPE)] * 3)
    with open(__file__) as file:
        line = file.read().splitlines()[caught.value.location.line - 1]
    assert "total + layout_cast(y" in line
