"""How many barriers the estimator counts: as many as lowering makes, which decides what fits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from kernels import array, compile_kernel, make, spec_of
from pallasite import plugins
from pallasite.errors import ResourceError
from pallasite.language.memory import SMEM
from pallasite.lowering.entry import estimate_kernel
from pallasite.lowering.launch import BARRIER_BYTES
from pallasite.lowering.memory_plan import SHARED_MEMORY_ALIGNMENT
from pallasite.lowering.resources import Resources, nothing
from pallasite.resource import BARRIERS
from pallasite_std.barriers.types import Barrier
from pallasite_std.primitives.barriers import barrier_arrive, barrier_wait


def using(count, then=lambda: None):
    """Allocates so many barriers for a scope, and uses the first."""

    def scope(barriers):
        barrier_arrive(barriers.at[0])
        barrier_wait(barriers.at[0])
        then()

    pl.run_scoped(scope, Barrier(num_barriers=count))


def one_after_the_other():
    using(3)
    using(2)


def nested():
    using(3, lambda: using(2))


def branches():
    lax.switch(pl.program_id(0), [lambda: using(3), lambda: using(2), lambda: using(4)])


def branches_without():
    lax.cond(pl.program_id(0) == 0, lambda: using(3), lambda: None)


def branches_in_branches():
    def inner():
        lax.cond(pl.program_id(0) == 1, lambda: using(5), lambda: using(1))

    lax.cond(pl.program_id(0) == 0, lambda: using(3), inner)


def branches_of_one_scope():
    """Both branches call one function, which is traced once: its scope is one scope."""
    shared = jax.jit(lambda: using(3))
    lax.cond(pl.program_id(0) == 0, lambda: (shared(), using(2))[1], shared)


def one_scope_twice():
    shared = jax.jit(lambda: using(3))
    shared()
    shared()


def loop():
    lax.fori_loop(0, 4, lambda i, c: (using(3), c)[1], 0)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (one_after_the_other, 5), (nested, 5), (branches, 9), (branches_without, 3),
        (branches_in_branches, 9), (branches_of_one_scope, 5), (one_scope_twice, 3), (loop, 3),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_as_many_as_are_made(body, count):
    kernel = make((4,), grid=(3,), grid_names=("i",))(lambda x, o: body())
    target = plugins.registry().targets["sm_90"]
    assert estimate_kernel(spec_of(kernel, array(4)), target).amount(BARRIERS) == count
    assert compile_kernel(kernel, array(4)).resources.barriers == count


@pytest.mark.parametrize("more", [0, 1])
def test_barriers_of_branches_count_for_what_fits(more):
    """Those of all branches lie beside the scratch memory, which leaves room for 128."""
    target = plugins.registry().targets["sm_90"]
    size = target.max_shared_memory - 128 * BARRIER_BYTES
    assert size % SHARED_MEMORY_ALIGNMENT == 0

    @make((4,), grid=(5,), grid_names=("i",), scratch_types=[SMEM((size,), jnp.int8)])
    def kernel(x, o, scratch):
        counts = [32, 32, 32, 32, *[1] * more]
        lax.switch(pl.program_id(0), [functools.partial(using, count) for count in counts])

    spec = spec_of(kernel, array(4))
    if more:
        with pytest.raises(ResourceError, match=str(target.max_shared_memory + BARRIER_BYTES)):
            estimate_kernel(spec, target)
    else:
        assert estimate_kernel(spec, target).amount(BARRIERS) == 128
        assert compile_kernel(kernel, array(4)).resources.barriers == 128


def _barriers(**amounts):
    return Resources(kept={(BARRIERS, name): amount for name, amount in amounts.items()})


def test_sums_and_alternatives():
    """By variable: others add up in either case; the same one counts once, where it is larger."""
    one, other = _barriers(a=2, b=1), _barriers(a=1, c=4)
    assert (one + other).kept == _barriers(a=3, b=1, c=4).kept
    assert (one | other).kept == (other | one).kept == _barriers(a=2, b=1, c=4).kept
    assert (one | other).amount(BARRIERS) == 7
    for part in (one, other):
        assert (part | nothing()) is (nothing() | part) is part
