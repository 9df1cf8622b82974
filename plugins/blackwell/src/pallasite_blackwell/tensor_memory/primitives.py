"""The primitives of tensor memory, as kernels call them.

Bound arguments: ``async_load_tmem`` (source), ``async_store_tmem`` (destination, value);
``commit_tmem`` and ``wait_load_tmem`` have none.
"""

from __future__ import annotations

from typing import Any

import jax

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks, in_warp_region, memory_effect
from pallasite_blackwell.tensor_memory.space import TMEM
from pallasite_blackwell.tensor_memory.views import check_views
from pallasite_std.api import SomeLayout, arguments, layout_cast

REDUCTIONS = ("max", "min", "absmax", "absmin")
"""Values of ``reduce`` of :func:`async_load_tmem`."""

_REDUCED_DTYPES = ("float32", "int32", "uint32")

async_load_tmem_p = _jax.Primitive("async_load_tmem")
async_load_tmem_p.multiple_results = True


def _check_warpgroup(what: str) -> None:
    if in_warp_region():
        raise checks.unsupported(
            f"{what} in code that runs per warp",
            expected="the four warps of a warpgroup together: each reaches a quarter of the lanes",
            hint="call it outside of plgpu.warp_map",
        )


def tensor_memory(value: Any, what: str) -> Any:
    """A reference to tensor memory with views that it has, as a TransformedRef."""
    ref = arguments.reference(value, what, TMEM)
    check_views(ref, what)
    return ref


def async_load_tmem(
    src: Any, *, layout: SomeLayout | None = None, reduce: str | None = None
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Loads a matrix from tensor memory.

    The array can be used at once. That the load is complete, so that the memory may be written
    again, is known after :func:`wait_load_tmem`.

    Args:
      src: a reference to tensor memory, or a view of one.
      layout: the register layout of the result.
      reduce: ``"max"``, ``"min"``, ``"absmax"`` or ``"absmin"``: reduces along the columns, too;
        then float32, int32 or uint32, and a layout in which each lane holds whole rows, such as
        ``plgpu.Layout.TCGEN05_TMEM_NATIVE``. NaN wins. For integers, ``absmax`` and ``absmin`` are
        those of unsigned ones.

    Returns:
      The array; with ``reduce`` a pair of it and of the reduced array, one element for each row.

    Raises:
      InvalidTypeError, InvalidValueError: no such memory, dtype or reduction.

    PTX ISA: ``tcgen05.ld``; ``tcgen05.ld.red`` needs a target with the feature
    ``tcgen05_load_reduce``.
    """
    _check_warpgroup("async_load_tmem")
    ref = tensor_memory(src, "src")
    if reduce is not None:
        if reduce not in REDUCTIONS:
            raise checks.value_error(
                "loads reduce in other ways",
                got=f"reduce={reduce!r}",
                expected=" or ".join(map(repr, REDUCTIONS)),
            )
        dtype = _jax.dtype_of(ref.dtype).name
        if dtype not in _REDUCED_DTYPES:
            raise checks.value_error(
                f"a load that reduces {dtype}", expected=", ".join(_REDUCED_DTYPES)
            )
        if dtype == "int32" and reduce.startswith("abs"):
            raise checks.value_error(
                "a load that reduces absolute values of int32",
                got=f"reduce={reduce!r}",
                expected='"max" or "min"',
            )
    results = arguments.bind(async_load_tmem_p, ref, reduce=reduce)
    first = results[0] if layout is None else layout_cast(results[0], layout)
    return first if reduce is None else (first, results[1])


@_jax.abstract_eval(async_load_tmem_p)
def _async_load_abstract_eval(*avals: Any, args_tree: Any, reduce: str | None) -> Any:
    (ref,) = args_tree.unflatten(avals)
    result = _jax.transform_type(ref.transforms, ref.ref).inner_aval
    effects = arguments.reference_effects(args_tree, len(avals), read=(0,))
    if reduce is None:
        return (result,), effects
    return (result, _jax.ShapedArray(result.shape[:-1], result.dtype)), effects


arguments.no_discharge(async_load_tmem_p)
arguments.pretty(
    async_load_tmem_p,
    lambda args, params: [args[0], *([params["reduce"]] if params["reduce"] else [])],
)

async_store_tmem_p = _jax.Primitive("async_store_tmem")
async_store_tmem_p.multiple_results = True


def async_store_tmem(ref: Any, value: Any) -> None:
    """Stores an array to tensor memory.

    Loads, products and other threads see it after :func:`commit_tmem`.

    Args:
      ref: a reference to tensor memory, or a view of one.
      value: an array of its shape and dtype.

    Raises:
      InvalidTypeError, InvalidValueError: other memory, shapes or dtypes.

    PTX ISA: ``tcgen05.st``.
    """
    _check_warpgroup("async_store_tmem")
    target = tensor_memory(ref, "ref")
    value = arguments.array(value, "value")
    aval = _jax.typeof(value)
    arguments.same_shape(target, "ref", aval, "value")
    arguments.same_dtype(target, "ref", aval, "value")
    arguments.bind(async_store_tmem_p, target, value)


@_jax.abstract_eval(async_store_tmem_p)
def _async_store_abstract_eval(*avals: Any, args_tree: Any) -> Any:
    return (), arguments.reference_effects(args_tree, len(avals), written=(0,))


arguments.no_discharge(async_store_tmem_p)
arguments.pretty(async_store_tmem_p, lambda args, _: [args[0], "<-", args[1]])


def _plain_primitive(name: str) -> Any:
    primitive = _jax.Primitive(name)
    primitive.multiple_results = True
    result = ((), {memory_effect})
    primitive.def_effectful_abstract_eval(lambda: result)
    return primitive


commit_tmem_p = _plain_primitive("commit_tmem")


def commit_tmem() -> None:
    """Waits until the stores of the thread to tensor memory are complete.

    What the thread loads and multiplies afterwards sees them, and so does whoever waits on a
    ``Barrier(orders_tensor_core=True)`` on which the thread arrives.

    PTX ISA: ``tcgen05.wait::st``, followed by a barrier of the warpgroup.
    """
    _check_warpgroup("commit_tmem")
    commit_tmem_p.bind()


wait_load_tmem_p = _plain_primitive("wait_load_tmem")


def wait_load_tmem() -> None:
    """Waits until the loads of the thread from tensor memory are complete.

    What they read may then be overwritten, by the thread and by whoever waits on a
    ``Barrier(orders_tensor_core=True)`` on which it arrives.

    PTX ISA: ``tcgen05.wait::ld``, followed by a barrier of the warpgroup.
    """
    _check_warpgroup("wait_load_tmem")
    wait_load_tmem_p.bind()
