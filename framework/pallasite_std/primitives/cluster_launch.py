"""Asking for the work of a cluster that has not been launched yet (cluster launch control).

Bound arguments: ``try_cluster_cancel`` (result, barrier); ``query_cluster_cancel`` (result).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax.numpy as jnp

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import SMEM, checks, element_bits, memory_effect
from pallasite_std.primitives import arguments

RESULT_BYTES = 16

try_cluster_cancel_p = _jax.Primitive("try_cluster_cancel")
try_cluster_cancel_p.multiple_results = True


@_jax.abstract_eval(try_cluster_cancel_p)
def _try_cluster_cancel_abstract_eval(
    *avals: Any, args_tree: Any, collective_axes: tuple[Hashable, ...]
) -> Any:
    del collective_axes
    effects = arguments.reference_effects(args_tree, len(avals), written=(0,))
    return (), effects | {memory_effect}


arguments.no_discharge(try_cluster_cancel_p)
arguments.pretty(
    try_cluster_cancel_p,
    lambda args, params: [
        *(args[0], "using", args[1]),
        *([f"collective_axes={params['collective_axes']}"] if params["collective_axes"] else []),
    ],
)

query_cluster_cancel_p = _jax.Primitive("query_cluster_cancel")
query_cluster_cancel_p.multiple_results = True


@_jax.abstract_eval(query_cluster_cancel_p)
def _query_cluster_cancel_abstract_eval(
    *avals: Any, args_tree: Any, grid_names: tuple[Hashable, ...]
) -> Any:
    indices = (_jax.ShapedArray((), jnp.int32),) * len(grid_names)
    effects = arguments.reference_effects(args_tree, len(avals), read=(0,))
    return (*indices, _jax.ShapedArray((), jnp.bool_)), effects | {memory_effect}


arguments.no_discharge(query_cluster_cancel_p)
arguments.pretty(query_cluster_cancel_p, lambda args, params: [args[0], params["grid_names"]])


def TryClusterCancelResult(num_buffers: int | None = None) -> Any:  # noqa: N802
    """Describes shared memory for the result of ``try_cluster_cancel``.

    Args:
      num_buffers: how many results there is room for, along a first dimension; None is one result
        without that dimension.
    """
    if num_buffers is None:
        return SMEM((RESULT_BYTES,), jnp.int8)
    return SMEM((checks.count(num_buffers, "num_buffers", minimum=1), RESULT_BYTES), jnp.int8)


def _result(value: Any) -> Any:
    ref = arguments.reference(value, "result_ref", SMEM, views=(_jax.NDIndexer,))
    bits = element_bits(ref.dtype, tuple(ref.shape))
    if bits != 8 * RESULT_BYTES:
        raise checks.type_error(
            f"result_ref has {bits} bits",
            got=f"{ref.dtype}{list(ref.shape)}",
            expected="128 bits, such as TryClusterCancelResult()",
            hint="select one of several results: result_ref.at[slot]",
        )
    return ref


def try_cluster_cancel(
    result_ref: Any, barrier: Any, *, collective_axes: Hashable | tuple[Hashable, ...] = ()
) -> None:
    """Asks for the work of a cluster that waits for its launch, and takes it over if there is one.

    The answer arrives in shared memory; each call counts as one arrival on the barrier, which
    completes when the answer is there. Targets without the feature ``cluster_launch_control`` find
    nothing to take over.

    Args:
      result_ref: an SMEM reference of 16 bytes (:func:`TryClusterCancelResult`), not in use.
      barrier: a reference to one Barrier, whose ``num_arrivals`` is the number of threads that call
        this.
      collective_axes: the axis of the threads, if all of them call this; and all cluster axes, if
        there are any: the blocks of a cluster get the same answer, on barriers and in memory of
        their own. Threads that can be seen to call this together, with the same result and barrier,
        also ask once.

    Raises:
      InvalidTypeError: an argument of the wrong kind or size.
      InvalidValueError: a wrong memory space, a group of barriers, an unknown axis.

    PTX ISA: ``clusterlaunchcontrol.try_cancel``.
    """
    axes = collective_axes if isinstance(collective_axes, tuple) else (collective_axes,)
    for name in axes:
        for member in name if isinstance(name, tuple) else (name,):
            if not _jax.axis_exists(member):
                raise checks.value_error(
                    f"there is no axis named {member!r}",
                    expected="the axis of the kernel's threads, and its cluster axes",
                )
    arguments.bind(
        try_cluster_cancel_p,
        _result(result_ref),
        arguments.barrier(barrier, counts_bytes=True),
        collective_axes=axes,
    )


def query_cluster_cancel(
    result_ref: Any, grid_names: Sequence[Hashable]
) -> tuple[tuple[Any, ...], Any]:
    """Reads the answer to ``try_cluster_cancel``, after waiting for its barrier.

    Args:
      result_ref: the SMEM reference with the answer.
      grid_names: names of grid axes.

    Returns:
      The indices along these axes of the cluster whose work was taken over (int32 scalars, which
      mean nothing if there was none), and whether there was one (a boolean scalar).

    Raises:
      InvalidTypeError: an argument of the wrong kind or size.
      InvalidValueError: a wrong memory space, an unknown axis.

    PTX ISA: ``clusterlaunchcontrol.query_cancel``.
    """
    names = tuple(grid_names) if isinstance(grid_names, tuple | list) else (grid_names,)
    for name in names:
        if not _jax.axis_exists(name):
            raise checks.value_error(
                f"there is no axis named {name!r}", expected="an axis of the kernel's grid"
            )
    *indices, success = arguments.bind(
        query_cluster_cancel_p, _result(result_ref), grid_names=names
    )
    return tuple(indices), success
