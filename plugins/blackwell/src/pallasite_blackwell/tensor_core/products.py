"""The primitives of the tensor core, as kernels call them.

Bound arguments: ``tcgen05_mma`` (acc, a, b, accumulate or None, barrier or None, a_scale or None,
b_scale or None, a_sparse_metadata or None); ``tcgen05_commit_arrive`` (barrier).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import SMEM, checks, memory_effect
from pallasite_blackwell.tensor_core.types import product_of
from pallasite_blackwell.tensor_memory.primitives import tensor_memory
from pallasite_blackwell.tensor_memory.space import TMEM, AbstractTensorMemoryRef
from pallasite_blackwell.tensor_memory.views import check_views
from pallasite_std.api import arguments

ORDER = "tensor_core"
"""The order of barriers that the tensor core's work needs."""

tcgen05_mma_p = _jax.Primitive("tcgen05_mma")
tcgen05_mma_p.multiple_results = True


def tcgen05_mma(
    acc: Any,
    a: Any,
    b: Any,
    barrier: Any = None,
    *,
    a_scale: Any = None,
    b_scale: Any = None,
    a_sparse_metadata: Any = None,
    accumulate: Any = True,
    collective_axis: Hashable | None = None,
) -> None:
    """Starts ``acc += a @ b``, or ``acc = a @ b``, on the tensor core.

    One lane starts it for the thread, a warpgroup or a warp. That it is complete is known when a
    barrier says so. With ``collective_axis`` the two blocks of a pair make one product together:
    each has its own rows of ``acc`` and ``a`` and its own columns of ``b``, the first block starts
    it (the other may call this, too), and the barriers of both are signalled.

    Args:
      acc: (m, n) in tensor memory; (m, 2n) for a pair.
      a: (m, k) in shared or tensor memory, (m, k / 2) if it is sparse. In shared memory it may lie
        in row- or column-major tiles with any swizzle; in tensor memory packed, with m a multiple
        of 128.
      b: (k, n) in shared memory.
      barrier: a ``Barrier(orders_tensor_core=True)`` on which this and all that the thread
        started before arrives when it is complete.
      a_scale, b_scale: (128, k / block) and (n rounded up to 128, k / block) in tensor memory, with
        ``TMEMLayout.SCALES_LAYOUT``: factors of blocks of elements along k. For a pair, b_scale has
        the rows for both blocks; if m is 64, it has 256 rows in
        ``TMEMLayout.SCALES_M64_COLLECTIVE_LAYOUT``.
      a_sparse_metadata: (m, k / 2) 2-bit integers in tensor memory, with
        ``TMEMLayout.SPARSE_METADATA_LAYOUT``: which two of four elements of ``a`` there are.
      accumulate: False replaces the accumulator's contents; also a boolean scalar.
      collective_axis: the minormost axis of the cluster, of an even number of blocks.

    m is 64 or a multiple of 128, k a multiple of 32 bytes. Dtypes of a and b: float16, bfloat16,
    float32 (computed as tf32), float8_e4m3fn and float8_e5m2 (which may differ), int8 and uint8
    (which may differ), and with scales 8-bit floats and float4_e2m1fn.

    Raises:
      InvalidTypeError, InvalidValueError: for other operands.

    PTX ISA: ``tcgen05.mma``. Needs a target with the feature ``tcgen05``.
    """
    acc = tensor_memory(acc, "acc")
    a = arguments.reference(a, "a", SMEM, TMEM)
    if not _jax.typeof(a.ref).memory_space.is_shared:
        check_views(a, "a")
    b = arguments.reference(b, "b", SMEM)
    sparse = a_sparse_metadata is not None
    for what, operand in (("acc", acc), ("a", a), ("b", b)):
        if len(operand.shape) != 2:
            raise checks.value_error(
                f"{what} is not a matrix", got=f"shape {tuple(operand.shape)}", expected="rank 2"
            )
    (m, n), (rows, depth), (depth_of_b, columns) = acc.shape, a.shape, b.shape
    blocks = 1 if collective_axis is None else 2
    if (m, n, depth * (1 + sparse)) != (rows, columns * blocks, depth_of_b):
        whole = "(m, n)" if blocks == 1 else "(m, 2n)"
        stored = "(m, k / 2)" if sparse else "(m, k)"
        raise checks.value_error(
            f"the shapes do not fit together as acc {whole} += a {stored} @ b (k, n)",
            got=f"acc {(m, n)}, a {tuple(a.shape)}, b {tuple(b.shape)}",
            hint=_turn((m, n // blocks, depth_of_b), a.shape, b.shape, sparse=sparse)
            or _turn((m, n // blocks, columns), a.shape, b.shape, sparse=sparse),
        )
    if (a_scale is None) != (b_scale is None):
        raise checks.value_error(
            "only one of a and b has scales", expected="both a_scale= and b_scale=, or neither"
        )
    scales = []
    for what, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        scales.append(None if scale is None else tensor_memory(scale, what))
    metadata = None
    if sparse:
        metadata = tensor_memory(a_sparse_metadata, "a_sparse_metadata")
    block = 0
    if scales[0] is not None:
        block = _block(scales[0], scales[1], depth_of_b)
    product_of(
        a.dtype,
        b.dtype,
        acc.dtype,
        sparse=sparse,
        scale=None if scales[0] is None else scales[0].dtype,
        block=block,
    )
    in_tensor_memory = [("acc", acc), ("a", a), ("a_scale", scales[0]), ("b_scale", scales[1])]
    in_tensor_memory.append(("a_sparse_metadata", metadata))
    for what, operand in in_tensor_memory:
        if operand is not None:
            _check_collective(operand, what, pair=collective_axis is not None)
    if barrier is not None:
        barrier = _barrier(barrier)
    if collective_axis is not None:
        _check_axis(collective_axis)
    arguments.bind(
        tcgen05_mma_p,
        acc,
        a,
        b,
        _flag(accumulate),
        barrier,
        *scales,
        metadata,
        collective_axis=collective_axis,
    )


def _turn(extents: tuple[int, int, int], a: Any, b: Any, *, sparse: bool) -> str | None:
    """What to do if operands would fit products of (m, n, k) when they are transposed."""
    m, n, k = extents
    a_fits, b_fits = (m, k // (1 + sparse)), (k, n)
    if tuple(a) not in (a_fits, a_fits[::-1]) or tuple(b) not in (b_fits, b_fits[::-1]):
        return None
    turned = [what for what, x, fits in (("a", a, a_fits), ("b", b, b_fits)) if tuple(x) != fits]
    names = " and ".join(f"plgpu.transpose_ref({what}, (1, 0))" for what in turned)
    return f"pass {names}" if turned else None


def _block(a_scale: Any, b_scale: Any, depth: int) -> int:
    """Of how many elements along k each scale is."""
    for what, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if len(scale.shape) != 2:
            raise checks.value_error(f"{what} is not a matrix", got=f"shape {tuple(scale.shape)}")
    count = a_scale.shape[1]
    if b_scale.shape[1] != count or not count or depth % count:
        raise checks.value_error(
            "the scales do not fit k",
            got=f"a_scale {tuple(a_scale.shape)}, b_scale {tuple(b_scale.shape)}, k={depth}",
            expected="(rows, k / block) with the same block for both",
        )
    arguments.same_dtype(a_scale, "a_scale", b_scale, "b_scale")
    return int(depth // count)


def _check_collective(operand: Any, what: str, *, pair: bool) -> None:
    aval = _jax.typeof(operand.ref)
    collective = _is_collective(aval, operand)
    if collective is None or collective == pair:
        return
    if pair:
        raise checks.value_error(
            f"{what} is not collective, but collective_axis is set",
            got=aval,
            expected=f"{what} allocated with plgpu.TMEM(..., collective=True)",
        )
    raise checks.value_error(
        f"{what} is collective, but the product is one block's own",
        got=aval,
        expected="collective_axis= the minormost axis of the cluster",
    )


def _is_collective(aval: Any, operand: Any) -> bool | None:
    if isinstance(aval, AbstractTensorMemoryRef):
        return aval.collective
    for transform in operand.transforms:
        layout = getattr(transform, "layout", None)
        if isinstance(layout, tuple):
            return bool(layout[1])
    return None


def _barrier(value: Any) -> Any:
    barrier = arguments.barrier(value)
    dtype = _jax.typeof(barrier.ref).dtype
    if ORDER not in dtype.orders:
        raise checks.value_error(
            "the barrier does not order the tensor core's work",
            got=_jax.typeof(barrier.ref),
            expected="plgpu.Barrier(orders_tensor_core=True)",
        )
    return barrier


def _check_axis(axis: Hashable) -> None:
    if not _jax.axis_exists(axis):
        raise checks.value_error(
            f"there is no axis named {axis!r}", expected="the minormost axis of the cluster"
        )


def _flag(accumulate: Any) -> Any:
    """True as None, so that the flag takes no operand where it is not needed."""
    if isinstance(accumulate, bool | np.bool_):
        return None if accumulate else jnp.zeros((), jnp.bool_)
    return arguments.predicate(accumulate, "accumulate")


@_jax.abstract_eval(tcgen05_mma_p)
def _mma_abstract_eval(*avals: Any, args_tree: Any, collective_axis: Any) -> Any:
    del collective_axis
    effects = arguments.reference_effects(
        args_tree, len(avals), read=(0, 1, 2, 5, 6, 7), written=(0,)
    )
    return (), effects | {memory_effect}


arguments.no_discharge(tcgen05_mma_p)
arguments.pretty(
    tcgen05_mma_p,
    lambda args, params: [
        *(args[0], "<-", args[1], "@", args[2]),
        *([] if args[3] is None else ["accumulate", args[3]]),
        *([] if args[4] is None else ["using", args[4]]),
        *([] if args[5] is None else ["scales", args[5], args[6]]),
        *([] if args[7] is None else ["sparse", args[7]]),
    ],
)

tcgen05_commit_arrive_p = _jax.Primitive("tcgen05_commit_arrive")
tcgen05_commit_arrive_p.multiple_results = True


def tcgen05_commit_arrive(barrier: Any, collective_axis: Hashable | None = None) -> None:
    """Arrives on a barrier when all products and copies to tensor memory are complete that the
    thread has started.

    Args:
      barrier: a ``Barrier(orders_tensor_core=True)``.
      collective_axis: that of the products, if pairs of blocks made them; then the barriers of both
        blocks are signalled.

    Raises:
      InvalidTypeError, InvalidValueError: another barrier, or no such axis.

    PTX ISA: ``tcgen05.commit``.
    """
    barrier = _barrier(barrier)
    if collective_axis is not None:
        _check_axis(collective_axis)
    arguments.bind(tcgen05_commit_arrive_p, barrier, collective_axis=collective_axis)


@_jax.abstract_eval(tcgen05_commit_arrive_p)
def _commit_abstract_eval(*avals: Any, args_tree: Any, collective_axis: Any) -> Any:
    del avals, args_tree, collective_axis
    return (), {memory_effect}


arguments.no_discharge(tcgen05_commit_arrive_p)
arguments.pretty(tcgen05_commit_arrive_p, lambda args, _: [args[0]])
