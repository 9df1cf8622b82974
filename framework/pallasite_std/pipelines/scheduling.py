"""``dynamic_scheduling_loop``: blocks that take over the work of others which were not launched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks, traced_mesh
from pallasite_std.barriers.types import Barrier, ClusterBarrier
from pallasite_std.pipelines.helpers import NDLoopInfo
from pallasite_std.primitives.barriers import barrier_arrive, barrier_wait, commit_smem
from pallasite_std.primitives.cluster_launch import (
    TryClusterCancelResult,
    query_cluster_cancel,
    try_cluster_cancel,
)

STAGES = 2
"""An answer is read by one thread while another already asks again."""


def dynamic_scheduling_loop(
    grid_names: Sequence[Hashable],
    thread_axis: Hashable | None = None,
    cluster_axes: tuple[Any, ...] = (),
    init_carry: Any = None,
) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that runs a function for this block's indices, and for those it can take over.

    The kernel has a block for each piece of work. Those that run first go on with the work of those
    that wait for a free multiprocessor, so that nothing is set up anew, and blocks with little work
    do more of it. On targets without the feature ``cluster_launch_control``, every block does its
    own work only.

    Args:
      grid_names: the axes of the kernel's grid.
      thread_axis: the kernel's ``thread_name``, if it has more than one thread; all threads run the
        loop.
      cluster_axes: all cluster axes, if there are any; they may be left out. The blocks of a
        cluster do the same work, and all of them run the loop.
      init_carry: a value to carry from step to step. The function then takes ``carry=`` and returns
        the next one, and the decorator's result is the last.

    Returns:
      A decorator for ``function(loop_info)``, with :class:`NDLoopInfo`, whose ``num_local_steps``
      is None; it runs the loop at once.

    Raises:
      InvalidValueError: an unknown axis.
    """
    names = tuple(grid_names) if isinstance(grid_names, tuple | list) else (grid_names,)
    mesh = traced_mesh()
    if not cluster_axes and mesh is not None and math.prod(mesh.cluster) > 1:
        cluster_axes = tuple(mesh.cluster_names)  # What is taken over is a whole cluster.
    axes = checks.axis_names(tuple(cluster_axes) or None, "cluster_axes") or ()
    threads = () if thread_axis is None else (thread_axis,)
    flat = [member for axis in axes for member in (axis if isinstance(axis, tuple) else (axis,))]
    for name in (*names, *flat, *threads):
        if not _jax.axis_exists(name):
            raise checks.value_error(
                f"there is no axis named {name!r}",
                expected="an axis of the kernel's grid, cluster or threads",
            )
    num_threads = 1 if thread_axis is None else _jax.axis_size(thread_axis)
    kind: Any = Barrier
    if axes:
        kind = functools.partial(ClusterBarrier, collective_axes=axes)
    used = kind(num_arrivals=num_threads, num_barriers=STAGES)

    def decorator(function: Callable[..., Any]) -> Any:
        def loop(results: Any, answered: Any, read: Any) -> Any:
            def step(carry: Any) -> Any:
                index, _, number, stage, user_carry = carry

                pl.when(number >= STAGES)(lambda: barrier_wait(read.at[stage]))
                try_cluster_cancel(
                    results.at[stage], answered.at[stage], collective_axes=(*axes, *threads)
                )
                info = NDLoopInfo(index, number, None)
                if init_carry is None:
                    function(info)
                else:
                    user_carry = function(info, carry=user_carry)
                barrier_wait(answered.at[stage])
                index, found = query_cluster_cancel(results.at[stage], names)
                commit_smem()  # The next answer in this stage comes after the reads.
                barrier_arrive(read.at[stage])
                return (
                    index,
                    found,
                    number + jnp.int32(1),
                    jnp.int32(STAGES - 1) - stage,
                    user_carry,
                )

            own = tuple(lax.axis_index(name) for name in names)
            start = (own, jnp.bool_(True), jnp.int32(0), jnp.int32(0), init_carry)
            _, _, count, _, last = lax.while_loop(lambda carry: carry[1], step, start)

            rounds = jnp.minimum(count, jnp.int32(STAGES))
            lax.fori_loop(0, rounds, lambda stage, _: barrier_wait(read.at[stage]), None)
            return last

        return pl.run_scoped(
            loop,
            TryClusterCancelResult(STAGES),
            Barrier(num_arrivals=num_threads, num_barriers=STAGES),
            used,
            collective_axes=threads,
        )

    return decorator
