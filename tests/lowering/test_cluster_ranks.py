"""Ranks of blocks in their cluster, by coordinates, and the masks that are made of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu
from pallasite.plugin import KernelLifecycle, hookimpl, manager
from pallasite.plugin.ir import ops
from pallasite_simulator import simulate

GRID = (2, 1, 3)
CLUSTERS = [(2,), (1, 4), (2, 2), (2, 3, 1), (2, 1, 2), (2, 2, 2)]
"""In the user's order: the last axis is CUDA's x."""


def nothing(array, kernel):
    """Takes a hidden result."""


class Numbers:
    """At the end of a kernel, one lane of each block stores numbers."""

    def __init__(self, functions):
        self._functions = functions

    def _store(self, kernel):
        launch, (x, y, _) = kernel.launch, kernel.geometry.cuda_grid
        size = kernel.geometry.blocks
        count = len(self._functions)
        out = launch.hidden_result("numbers", (size, count), np.int32, consumer=nothing)
        found = [function(launch) for function in self._functions]
        block = ops.add(ops.multiply(launch.block_id(2), y), launch.block_id(1))
        block = ops.add(ops.multiply(block, x), launch.block_id(0))
        with ops.when(launch.block_leader):
            first = ops.multiply(block, ops.constant(count, ops.i32()))
            for place, number in enumerate(found):
                index = ops.add(first, ops.constant(place, ops.i32()))
                pointer = ops.element_pointer(launch.array_pointer(out), index, ops.i32())
                ops.store(ops.cast_integer(number, ops.i32(), signed=False), pointer, alignment=4)

    @hookimpl
    def pallasite_lifecycles(self):
        return [KernelLifecycle(name="numbers", epilogue=self._store)]


def numbers(cluster, functions):
    """What each of ``functions`` makes of a launch in each block, with the blocks' places in their
    clusters."""

    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    names = "abc"[: len(cluster)]
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        grid=GRID,
        grid_names=tuple("uvw"),
        cluster=cluster,
        cluster_names=tuple(names),
    )
    manager().register(Numbers(functions), "numbers")
    try:
        x = jax.ShapeDtypeStruct((128,), jnp.float32)
        compiled = pallasite.compile(kernel, x, target="sm_90")
    finally:
        manager().unregister("numbers")
    found = simulate(compiled, np.zeros(128, np.float32)).outputs[1]
    places = np.indices(compiled.launch.grid[::-1]).reshape(3, -1)[::-1]
    return found.T, [tuple(p % compiled.launch.cluster) for p in places.T], compiled.launch.cluster


def rank(place, extents):
    return place[0] + extents[0] * (place[1] + extents[1] * place[2])


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_rank_of_coordinates(cluster):
    extents = (*reversed(cluster), 1, 1)[:3]
    several = [
        {dimension: min(at, extents[dimension] - 1) for dimension, at in chosen.items()}
        for chosen in ({}, {0: 0}, {1: 0}, {0: 1}, {2: 1, 0: 0}, {0: 1, 1: 1, 2: 1})
    ]
    found, places, actual = numbers(
        cluster, [lambda launch, one=one: launch.cluster_rank(one) for one in several]
    )
    assert actual == extents
    for chosen, ranks in zip(several, found, strict=True):
        expected = [rank([chosen.get(d, p[d]) for d in range(3)], extents) for p in places]
        np.testing.assert_array_equal(ranks, expected, str(chosen))


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_masks_have_the_ranks_of_their_blocks(cluster):
    several = [(), (0,), (1,), (0, 1), (2, 0), (0, 1, 2)]
    found, places, extents = numbers(
        cluster, [lambda launch, one=one: launch.multicast_mask(one) for one in several]
    )
    for dimensions, masks in zip(several, found, strict=True):
        expected = [
            sum(
                1 << rank(other, extents)
                for other in set(places)
                if all(other[d] == place[d] for d in range(3) if d not in dimensions)
            )
            for place in places
        ]
        np.testing.assert_array_equal(masks, expected, str(dimensions))
