"""Waiting for, arriving on and testing barriers, and fences for asynchronous operations.

Bound arguments: ``barrier_arrive`` (barrier, predicate or None), ``barrier_wait`` (barrier),
``barrier_test`` (barrier); ``commit_smem`` and the griddepcontrol pair have none.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks, memory_effect, programmatic_launch_effect
from pallasite_std.primitives import arguments

barrier_arrive_p = _jax.Primitive("barrier_arrive")
barrier_arrive_p.multiple_results = True


@_jax.abstract_eval(barrier_arrive_p)
def _barrier_arrive_abstract_eval(*avals: Any, args_tree: Any, by: str | None) -> Any:
    del avals, args_tree, by
    return (), {memory_effect}


arguments.no_discharge(barrier_arrive_p)
arguments.pretty(
    barrier_arrive_p, lambda args, _: [args[0], *([] if args[1] is None else ["if", args[1]])]
)


ARRIVERS = ("lanes", "warps")
"""Values of ``by`` of :func:`barrier_arrive`."""


def barrier_arrive(barrier: Any, *, predicate: Any = None, by: str | None = None) -> None:
    """Records one arrival of this thread on a barrier.

    Everything that the thread did to memory before is visible to those who wait for the phase that
    this arrival helps to complete. On a ``ClusterBarrier``, the arrival reaches the barrier of
    every block along its collective axes.

    Args:
      barrier: a reference to one Barrier or ClusterBarrier.
      predicate: a boolean scalar; without it the arrival always takes place.
      by: how a warpgroup arrives at a barrier of its block, which makes no difference but in time.
        ``"lanes"``: each lane as soon as it gets there; ``"warps"``: one lane of each warp, once
        its lanes have converged, which are fewer arrivals. By default, under warpgroup semantics
        lanes arrive where the barrier tells other threads only, otherwise warps.

    Raises:
      InvalidTypeError: not a barrier, or the predicate is not a boolean scalar.
      InvalidValueError: a group of barriers without an index, or another word for ``by``.

    PTX ISA: ``mbarrier.arrive``.
    """
    ref = arguments.barrier(barrier)
    if by is not None and by not in ARRIVERS:
        raise checks.value_error(
            "by is unknown", got=repr(by), expected=" or ".join(map(repr, ARRIVERS))
        )
    arguments.bind(barrier_arrive_p, ref, arguments.predicate(predicate), by=by)


barrier_wait_p = _jax.Primitive("barrier_wait")
barrier_wait_p.multiple_results = True


@_jax.abstract_eval(barrier_wait_p)
def _barrier_wait_abstract_eval(*avals: Any, args_tree: Any) -> Any:
    del avals, args_tree
    return (), {memory_effect}


arguments.no_discharge(barrier_wait_p)
arguments.pretty(barrier_wait_p, lambda args, _: [args[0]])


def barrier_wait(barrier: Any) -> None:
    """Waits until the next phase of a barrier is complete.

    Each thread counts for itself which phase comes next, so a thread that waits on a barrier at all
    must wait for every one of its phases, and two phases must not complete between two waits.

    Raises:
      InvalidTypeError: not a barrier.
      InvalidValueError: a group of barriers without an index.

    PTX ISA: ``mbarrier.try_wait.parity``.
    """
    arguments.bind(barrier_wait_p, arguments.barrier(barrier))


barrier_test_p = _jax.Primitive("barrier_test")


@_jax.abstract_eval(barrier_test_p)
def _barrier_test_abstract_eval(*avals: Any, args_tree: Any) -> Any:
    del avals, args_tree
    return _jax.ShapedArray((), jnp.bool_), {memory_effect}


arguments.no_discharge(barrier_test_p)
arguments.pretty(barrier_test_p, lambda args, _: [args[0]])


def barrier_test(barrier: Any) -> Any:
    """Whether the next phase of a barrier is complete; a boolean scalar, without waiting.

    It does not count as a wait: ``barrier_wait`` for the same phase must follow. For code that runs
    per warp. Raises the errors of :func:`barrier_wait`.

    PTX ISA: ``mbarrier.test_wait.parity``.
    """
    return arguments.bind(barrier_test_p, arguments.barrier(barrier))


def _plain_primitive(name: str, *effects: Any) -> Any:
    primitive = _jax.Primitive(name)
    primitive.multiple_results = True
    result = ((), set(effects))
    primitive.def_effectful_abstract_eval(lambda: result)
    return primitive


commit_smem_p = _plain_primitive("commit_smem", memory_effect)


def commit_smem() -> None:
    """Makes the thread's accesses to shared memory visible to asynchronous operations.

    Needed between writes to shared memory and a TMA copy or wgmma that reads them, and
    between reads and a copy that overwrites what was read. Covers all lanes of this thread, and no
    other thread.

    PTX ISA: ``fence.proxy.async``, followed by a barrier of the warpgroup.
    """
    commit_smem_p.bind()


griddepcontrol_wait_p = _plain_primitive(
    "griddepcontrol_wait", memory_effect, programmatic_launch_effect
)


def griddepcontrol_wait() -> None:
    """Waits until the kernels that this one depends on have ended and their memory is visible.

    PTX ISA: ``griddepcontrol.wait``.
    """
    griddepcontrol_wait_p.bind()


griddepcontrol_launch_dependents_p = _plain_primitive(
    "griddepcontrol_launch_dependents", memory_effect
)


def griddepcontrol_launch_dependents() -> None:
    """Lets the kernels that depend on this one begin, once all blocks said so or ended.

    PTX ISA: ``griddepcontrol.launch_dependents``.
    """
    griddepcontrol_launch_dependents_p.bind()
