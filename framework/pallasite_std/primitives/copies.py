"""Asynchronous copies between global and shared memory, and waiting for them.

Bound arguments:
  ``copy_gmem_to_smem``: (src, dst, barrier or None, predicate or None); parameters
    ``collective_axes`` (tuple or None), ``leader_tracked`` (CopyPartition or None), ``oob_mode``
    (OOBFillMode or None).
  ``copy_smem_to_gmem``: (src, dst, predicate or None); parameters ``commit_group``,
    ``reduction_op`` (str or None), ``discard`` (bool).
  ``async_prefetch``: (ref, predicate or None); parameters ``collective_axes``, ``leader_tracked``.
  ``async_store_smem``: (value, ref, barrier, cluster_idx); parameters ``cluster_dim``,
    ``optimized``, ``atomic``.
  ``wait_smem_to_gmem``, ``wait_gmem_to_smem``: no operands; parameters ``n``, ``wait_read_only``.
  ``commit_group``: nothing.
"""

from __future__ import annotations

from typing import Any

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import GMEM, SMEM, checks, element_bits, memory_effect
from pallasite_std.primitives import arguments
from pallasite_std.primitives.copy_options import CopyPartition, OOBFillMode, Partitioned

REDUCTION_OPS = (
    *("add", "min", "max", "umin", "umax", "smin", "smax"),
    *("inc", "dec", "and", "or", "xor"),
)
ATOMIC_STORE_OPS = ("add", "max", "min", "and", "or", "xor")

MAXIMUM_EXPECTED_BYTES = 2**20
"""What the transaction count of an mbarrier stays below (PTX ISA, "tx-count")."""

copy_gmem_to_smem_p = _jax.Primitive("copy_gmem_to_smem")
copy_gmem_to_smem_p.multiple_results = True


@_jax.abstract_eval(copy_gmem_to_smem_p)
def _copy_gmem_to_smem_abstract_eval(*avals: Any, args_tree: Any, **params: Any) -> Any:
    del params
    return (), arguments.reference_effects(args_tree, len(avals), read=(0,), written=(1,))


arguments.no_discharge(copy_gmem_to_smem_p)
arguments.pretty(
    copy_gmem_to_smem_p,
    lambda args, params: [
        *(args[0], "->", args[1]),
        *([] if args[2] is None else ["using", args[2]]),
        *([] if args[3] is None else ["if", args[3]]),
        *(
            f"{name}={params[name]}"
            for name in ("collective_axes", "leader_tracked", "oob_mode")
            if params[name] is not None
        ),
        *([] if params["arrive"] else ["arrive=False"]),
        *(["evict_first"] if params["evict_first"] else []),
    ],
)


def _check_partition(leader_tracked: Any, collective_axes: Any) -> None:
    if leader_tracked is None:
        return
    if not isinstance(leader_tracked, CopyPartition):
        raise checks.type_error(
            "leader_tracked is unknown",
            got=leader_tracked,
            expected="CopyPartition.PARTITIONED(axis) or CopyPartition.REPLICATED",
        )
    if collective_axes is None:
        raise checks.value_error(
            "leader_tracked is given without collective_axes",
            expected="the cluster axis over which the copy is partitioned",
        )
    if len(collective_axes) != 1:
        raise checks.value_error(
            f"a copy that its leader tracks is partitioned over one cluster axis, not "
            f"{len(collective_axes)}",
            got=collective_axes,
            hint="put the names in a tuple of their own to use them as one axis",
        )


def _collective_size(collective_axes: tuple[Any, ...] | None) -> int:
    size = 1
    for axis in collective_axes or ():
        for name in axis if isinstance(axis, tuple) else (axis,):
            if not _jax.axis_exists(name):
                raise checks.value_error(
                    f"there is no axis named {name!r}", expected="a cluster axis of the kernel"
                )
            size *= _jax.axis_size(name)
    return size


def copy_gmem_to_smem(
    src: Any,
    dst: Any,
    barrier: Any = None,
    *,
    collective_axes: str | tuple[str, ...] | None = None,
    leader_tracked: CopyPartition | None = None,
    oob_mode: OOBFillMode | None = None,
    predicate: Any = None,
    arrive: bool = True,
    evict_first: bool = False,
) -> None:
    """Starts a copy from global to shared memory that completes on a barrier.

    The call counts as one arrival on the barrier, which completes when all bytes have landed too.
    With ``arrive=False`` it does not: one ``barrier_expect`` before arrives for several copies.
    ``dst`` must not be in use: other threads' accesses have to be over, and committed with
    ``commit_smem`` where they were writes.

    Args:
      src: a window of a GMEM reference. Its first index may be a one-dimensional integer array,
        which gathers rows. The array's row length must be a multiple of 16 bytes, and so must be
        what lies before the window in its rows. Where ``dst`` has tiles beside each other, one
        instruction copies a window that begins with a tile: if its start is computed and is always
        a multiple of 8, say, but the kernel does not show it, ``pl.multiple_of(start, 8)`` does.
        From other starts each row of tiles takes an instruction. A window that lies in one piece,
        in ``dst`` too, may also be part of an array with rows of any length, as long as it begins
        at a multiple of 16 bytes; it needs no tensor map then.
      dst: an SMEM reference of the same dtype and shape.
      barrier: a reference to one Barrier. None on targets without mbarriers, where
        ``wait_gmem_to_smem`` waits instead.
      collective_axes: cluster axes; blocks that differ only along them share the copy. Without
        ``leader_tracked`` each gets the whole window and its own arrival.
      leader_tracked: ``CopyPartition.PARTITIONED(axis)``: each block gets its part of the window,
        which is larger than ``dst`` along ``axis`` by the number of blocks.
        ``CopyPartition.REPLICATED``: each gets everything. Only the first block's barrier counts.
      oob_mode: what is stored for elements outside of the array; zeros if None. Only tensor maps
        fill with zeros: ``OOBFillMode.UNDEFINED`` and ``PROMISE_IN_BOUNDS`` do without them for
        windows in one piece whose start is computed. A broken promise reads, or faults on, what is
        behind the array.
      predicate: a boolean scalar; without it the copy always takes place. Where it is false, the
        call still arrives on the barrier.
      arrive: whether the call arrives on the barrier and announces its bytes.
      evict_first: whether the L2 cache is to give up what is read before anything else: for what
        nobody reads again. A hint, which only copies by a tensor map that blocks do not share pass
        on.

    Raises:
      InvalidTypeError: an argument of the wrong kind.
      InvalidValueError: a wrong memory space, dtypes or shapes that differ, a group of barriers,
        ``arrive=False`` without a barrier or together with a predicate or ``leader_tracked``.

    PTX ISA: ``cp.async.bulk.tensor`` (shared::cluster, global), ``cp.async.bulk`` (shared::cta,
    global), ``createpolicy``.
    """
    source = arguments.reference(src, "src", GMEM)
    target = arguments.reference(dst, "dst", SMEM)
    arguments.same_dtype(source, "src", target, "dst")
    axes = checks.axis_names(collective_axes, "collective_axes")
    _check_partition(leader_tracked, axes)
    blocks = _collective_size(axes)
    expected = arguments.shape_of(target)
    if isinstance(leader_tracked, Partitioned):
        axis = checks.count(leader_tracked.axis, "the axis of CopyPartition.PARTITIONED")
        if axis >= len(expected):
            raise checks.value_error(f"dst has no axis {axis} to partition", got=f"dst: {expected}")
        expected = (*expected[:axis], expected[axis] * blocks, *expected[axis + 1 :])
    if arguments.shape_of(source) != expected:
        partitioned = (
            f", partitioned over {blocks} blocks" if isinstance(leader_tracked, Partitioned) else ""
        )
        raise checks.value_error(
            f"the window of src does not have the shape of dst{partitioned}",
            got=f"src: {tuple(source.shape)}, dst: {tuple(target.shape)}",
            expected=f"src of shape {expected}",
        )
    if barrier is not None:
        barrier = arguments.barrier(barrier, counts_bytes=True)
        orders = _jax.typeof(barrier.ref).dtype.orders
        if orders:
            ordered = " and ".join(f"the {order.replace('_', ' ')}" for order in orders)
            raise checks.value_error(
                f"barrier orders {ordered} and cannot be the target of a copy",
                hint="use another Barrier, without orders_tensor_core, for copies",
            )
    if oob_mode is not None and not isinstance(oob_mode, OOBFillMode):
        raise checks.type_error(
            "oob_mode is unknown", got=oob_mode, expected="a member of OOBFillMode"
        )
    if not arrive and (barrier is None or predicate is not None or leader_tracked is not None):
        raise checks.value_error(
            "a copy with arrive=False has no barrier, or has a predicate or leader_tracked",
            expected="a barrier on which barrier_expect announces the bytes of every copy",
        )
    arguments.bind(
        copy_gmem_to_smem_p,
        source,
        target,
        barrier,
        arguments.predicate(predicate),
        collective_axes=axes,
        leader_tracked=leader_tracked,
        oob_mode=oob_mode,
        arrive=bool(arrive),
        evict_first=bool(evict_first),
    )


barrier_expect_p = _jax.Primitive("barrier_expect")
barrier_expect_p.multiple_results = True


@_jax.abstract_eval(barrier_expect_p)
def _barrier_expect_abstract_eval(*avals: Any, args_tree: Any, num_bytes: int) -> Any:
    del avals, args_tree, num_bytes
    return (), {memory_effect}


arguments.no_discharge(barrier_expect_p)
arguments.pretty(
    barrier_expect_p,
    lambda args, params: [
        *(args[0], "bytes", params["num_bytes"]),
        *([] if args[1] is None else ["if", args[1]]),
    ],
)


def barrier_expect(barrier: Any, *destinations: Any, predicate: Any = None) -> None:
    """One arrival on a barrier that announces the bytes of copies which do not arrive themselves.

    It comes before the copies: ``copy_gmem_to_smem(..., arrive=False)`` into each destination.
    From the call on, the destinations must not be in use. In a collective copy, every block
    announces what it receives.

    Args:
      barrier: a reference to one Barrier.
      destinations: the SMEM references that the copies fill.
      predicate: a boolean scalar; without it the arrival always takes place.

    Raises:
      InvalidTypeError: an argument of the wrong kind.
      InvalidValueError: a wrong memory space, a group of barriers, or more bytes than a barrier
        can count (1048575).

    PTX ISA: ``mbarrier.expect_tx``.
    """
    num_bytes = 0
    for number, destination in enumerate(destinations):
        ref = arguments.reference(destination, f"destination {number}", SMEM)
        num_bytes += element_bits(arguments.dtype_of(ref), arguments.shape_of(ref)) // 8
    if num_bytes >= MAXIMUM_EXPECTED_BYTES:
        raise checks.value_error(
            f"a barrier cannot count {num_bytes} bytes",
            expected=f"less than {MAXIMUM_EXPECTED_BYTES} bytes in one phase",
        )
    selected = arguments.barrier(barrier, counts_bytes=True)
    arguments.bind(barrier_expect_p, selected, arguments.predicate(predicate), num_bytes=num_bytes)


copy_smem_to_gmem_p = _jax.Primitive("copy_smem_to_gmem")
copy_smem_to_gmem_p.multiple_results = True


@_jax.abstract_eval(copy_smem_to_gmem_p)
def _copy_smem_to_gmem_abstract_eval(
    *avals: Any, args_tree: Any, commit_group: bool, reduction_op: str | None, discard: bool
) -> Any:
    del commit_group, discard
    read = (0,) if reduction_op is None else (0, 1)
    return (), arguments.reference_effects(args_tree, len(avals), read=read, written=(1,))


arguments.no_discharge(copy_smem_to_gmem_p)
arguments.pretty(
    copy_smem_to_gmem_p,
    lambda args, params: [
        *(args[0], "->", args[1]),
        *([] if args[2] is None else ["if", args[2]]),
        *([] if params["commit_group"] else ["commit_group=False"]),
        *([] if params["reduction_op"] is None else [f"reduction_op={params['reduction_op']}"]),
        *(["discard"] if params["discard"] else []),
    ],
)


def copy_smem_to_gmem(
    src: Any,
    dst: Any,
    predicate: Any = None,
    *,
    commit_group: bool = True,
    reduction_op: str | None = None,
    discard: bool = False,
) -> None:
    """Starts a copy from shared to global memory.

    Writes to ``src`` must have been committed with ``commit_smem``. The same thread waits for the
    copy with ``wait_smem_to_gmem``, before ``src`` is written again and before the kernel ends.

    Args:
      src: an SMEM reference.
      dst: a window of a GMEM reference of the same dtype and shape, which begins inside of the
        array; elements behind it are dropped. It may be a peer or multicast reference.
      predicate: a boolean scalar; without it the copy always takes place.
      commit_group: close the group of copies that a wait counts. A group is closed even if the
        predicate is false.
      reduction_op: combine instead of overwrite: dst = op(dst, src). One of add, min, max, umin,
        umax, smin, smax, inc, dec, and, or, xor.
      discard: whether what is copied is not used any more: to read ``src`` again before it is
        written is a mistake, which checks and the simulator's sanitizer report. Pipelines say so of
        the blocks of outputs.

    Raises:
      InvalidTypeError: an argument of the wrong kind.
      InvalidValueError: a wrong memory space, dtypes or shapes that differ, an unknown reduction.

    PTX ISA: ``cp.async.bulk.tensor``, ``cp.async.bulk`` and ``cp.reduce.async.bulk.tensor``
    (global, shared::cta).
    """
    source = arguments.reference(src, "src", SMEM)
    target = arguments.reference(dst, "dst", GMEM)
    arguments.same_dtype(source, "src", target, "dst")
    arguments.same_shape(source, "src", target, "dst")
    if reduction_op is not None and reduction_op not in REDUCTION_OPS:
        raise checks.value_error(
            "reduction_op is unknown",
            got=repr(reduction_op),
            expected="one of " + ", ".join(REDUCTION_OPS),
        )
    arguments.bind(
        copy_smem_to_gmem_p,
        source,
        target,
        arguments.predicate(predicate),
        commit_group=bool(commit_group),
        reduction_op=reduction_op,
        discard=bool(discard),
    )


async_prefetch_p = _jax.Primitive("async_prefetch")
async_prefetch_p.multiple_results = True


@_jax.abstract_eval(async_prefetch_p)
def _async_prefetch_abstract_eval(*avals: Any, args_tree: Any, **params: Any) -> Any:
    del params
    return (), arguments.reference_effects(args_tree, len(avals), read=(0,))


arguments.no_discharge(async_prefetch_p)
arguments.pretty(
    async_prefetch_p,
    lambda args, _: [args[0], *([] if args[1] is None else ["if", args[1]])],
)


def async_prefetch(
    ref: Any,
    *,
    collective_axes: str | tuple[str, ...] | None = None,
    leader_tracked: CopyPartition | None = None,
    predicate: Any = None,
) -> None:
    """Brings a window of global memory into the L2 cache; a hint that nothing waits for.

    Args:
      ref: a window of a GMEM reference.
      collective_axes: cluster axes; blocks that differ only along them share the work.
      leader_tracked: as in the copy that follows, so that both use one tensor map.
      predicate: a boolean scalar; without it the prefetch always takes place.

    Raises the errors of :func:`copy_gmem_to_smem`.

    PTX ISA: ``cp.async.bulk.prefetch.tensor``.
    """
    source = arguments.reference(ref, "ref", GMEM)
    axes = checks.axis_names(collective_axes, "collective_axes")
    _check_partition(leader_tracked, axes)
    _collective_size(axes)
    arguments.bind(
        async_prefetch_p,
        source,
        arguments.predicate(predicate),
        collective_axes=axes,
        leader_tracked=leader_tracked,
    )


async_store_smem_p = _jax.Primitive("async_store_smem")
async_store_smem_p.multiple_results = True


@_jax.abstract_eval(async_store_smem_p)
def _async_store_smem_abstract_eval(*avals: Any, args_tree: Any, **params: Any) -> Any:
    read = () if params["atomic"] is None else (1,)
    effects = arguments.reference_effects(args_tree, len(avals), read=read, written=(1,))
    return (), effects | {memory_effect}


arguments.no_discharge(async_store_smem_p)
arguments.pretty(
    async_store_smem_p,
    lambda args, params: [
        *(args[0], "->", args[1], "using", args[2]),
        *("in block", args[3], "along", params["cluster_dim"]),
        *([] if params["atomic"] is None else [f"atomic={params['atomic']}"]),
    ],
)


def async_store_smem(
    src: Any,
    ref: Any,
    barrier: Any,
    *,
    cluster_idx: Any,
    cluster_dim: Any,
    optimized: bool = True,
    atomic: str | None = None,
    relaxed: bool = False,
) -> None:
    """Starts a store from registers to shared memory of a block of the cluster.

    Args:
      src: an array.
      ref: an SMEM reference of the same dtype and shape; the place is that of this block.
      barrier: a reference to one barrier, which completes in the block that is written.
      cluster_idx: the index of that block along ``cluster_dim``; an integer scalar.
      cluster_dim: the name of a cluster axis.
      optimized: an error if the store would have bank conflicts.
      atomic: combine instead of overwrite: one of add, max, min, and, or, xor.
      relaxed: who waits sees what has been stored, and nothing else that this thread did before,
        whose stores to global memory need not arrive first: that can take a microsecond.

    Raises:
      InvalidTypeError: an argument of the wrong kind.
      InvalidValueError: a wrong memory space, dtypes or shapes that differ, an unknown operation.

    PTX ISA: ``st.async`` and ``red.async``.
    """
    value = arguments.array(src, "src")
    target = arguments.reference(ref, "ref", SMEM)
    aval = _jax.typeof(value)
    arguments.same_dtype(aval, "src", target, "ref")
    arguments.same_shape(aval, "src", target, "ref")
    if atomic is not None and atomic not in ATOMIC_STORE_OPS:
        raise checks.value_error(
            "atomic is unknown",
            got=repr(atomic),
            expected="None or one of " + ", ".join(ATOMIC_STORE_OPS),
        )
    index = _jax.typeof(cluster_idx)
    if index.shape != () or index.dtype.kind not in "iu":
        raise checks.type_error(
            "cluster_idx is not an integer scalar", got=index, expected="an int or an i32[] array"
        )
    arguments.bind(
        async_store_smem_p,
        value,
        target,
        arguments.barrier(barrier),
        cluster_idx,
        cluster_dim=cluster_dim,
        optimized=bool(optimized),
        atomic=atomic,
        relaxed=bool(relaxed),
    )


wait_smem_to_gmem_p = _jax.Primitive("wait_smem_to_gmem")
wait_smem_to_gmem_p.multiple_results = True


@_jax.abstract_eval(wait_smem_to_gmem_p)
def _wait_smem_to_gmem_abstract_eval(*, n: int, wait_read_only: bool) -> Any:
    del n, wait_read_only
    return (), {memory_effect}


def wait_smem_to_gmem(n: int, wait_read_only: bool = False) -> None:
    """Waits until at most the ``n`` last groups of copies to global memory are pending.

    Counts groups of this thread, not copies; copies whose group is still open are not waited for.

    Args:
      n: a Python integer >= 0.
      wait_read_only: wait only until shared memory has been read, so that it can be written again.

    Raises InvalidTypeError or InvalidValueError for any other ``n``.

    PTX ISA: ``cp.async.bulk.wait_group``.
    """
    n = checks.count(n, "n")
    wait_smem_to_gmem_p.bind(n=n, wait_read_only=bool(wait_read_only))


wait_gmem_to_smem_p = _jax.Primitive("wait_gmem_to_smem")
wait_gmem_to_smem_p.multiple_results = True


@_jax.abstract_eval(wait_gmem_to_smem_p)
def _wait_gmem_to_smem_abstract_eval(*, n: int) -> Any:
    del n
    return (), {memory_effect}


def wait_gmem_to_smem(n: int) -> None:
    """Waits until at most the ``n`` last copies to shared memory without a barrier are pending.

    For targets without mbarriers. Raises InvalidTypeError or InvalidValueError unless ``n`` is a
    Python integer >= 0.

    PTX ISA: ``cp.async.wait_group``.
    """
    wait_gmem_to_smem_p.bind(n=checks.count(n, "n"))


commit_group_p = _jax.Primitive("commit_group")
commit_group_p.multiple_results = True


@_jax.abstract_eval(commit_group_p)
def _commit_group_abstract_eval() -> Any:
    return (), {memory_effect}


def commit_smem_to_gmem_group() -> None:
    """Closes the group of the copies that were started with ``commit_group=False``.

    PTX ISA: ``cp.async.bulk.commit_group``.
    """
    commit_group_p.bind()
