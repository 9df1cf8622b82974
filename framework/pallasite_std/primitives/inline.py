"""``inline_mgpu``: code of the user's that builds MLIR, spliced into a kernel.

Bound arguments: the flat arguments of the call. Parameters: ``arg_types`` (flat tuple of RefType or
layouts), ``in_tree`` (the tree of the arguments), ``return_types`` (flat tuple of
ShapeDtypeStruct), ``return_tree``, ``function`` and ``values`` (one of :data:`VALUES`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks, memory_effect, tensor_core_pipeline_effect
from pallasite_std.primitives import arguments
from pallasite_std.primitives.layouts import SomeLayout


@dataclasses.dataclass(frozen=True)
class RefType:
    """Type of a reference that inlined code gets.

    Attributes:
      transforms: how the code expects the data to lie in shared memory, in the order in which they
        apply to the logical shape; they must be those of the allocation.
    """

    transforms: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", tuple(self.transforms))


@dataclasses.dataclass(frozen=True)
class ShapeDtypeStruct:
    """Type of an array that inlined code returns: shape, dtype and register layout."""

    shape: tuple[int, ...]
    dtype: Any
    layout: SomeLayout

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))


VALUES = ("mosaic", "pallasite")
"""Whose values inlined code gets: those of ``jax.experimental.mosaic.gpu``, or our own."""

inline_mgpu_p = _jax.Primitive("inline_mgpu")
inline_mgpu_p.multiple_results = True


@_jax.abstract_eval(inline_mgpu_p)
def _inline_mgpu_abstract_eval(
    *avals: Any, args_tree: Any, return_types: tuple[Any, ...], **params: Any
) -> Any:
    del params
    args = args_tree.unflatten(avals)
    refs = [i for i, arg in enumerate(args) if isinstance(arg, _jax.TransformedRef)]
    effects = arguments.reference_effects(args_tree, len(avals), read=refs, written=refs)
    results = [_jax.ShapedArray(t.shape, t.dtype) for t in return_types]
    return results, effects | {memory_effect, tensor_core_pipeline_effect}


arguments.no_discharge(inline_mgpu_p)


def inline_mgpu(
    *, arg_types: Sequence[Any] = (), return_type: Any = None, values: str = "mosaic"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes a function over MLIR values callable in a kernel.

    The function is called while the kernel is compiled, as ``function(context, *args)``, with
    arguments in the tree structure of ``arg_types``. All 128 lanes of the thread run what it
    builds. It may return arrays of either kind.

    Args:
      arg_types: one tree per argument; its leaves are :class:`RefType` for references and layouts
        for arrays.
      return_type: a tree of :class:`ShapeDtypeStruct`, or None.
      values: what the function gets. ``"mosaic"``: a memref for each reference, in the shape that
        its transforms give it, and a ``jax.experimental.mosaic.gpu.FragmentedArray`` for each
        array. ``"pallasite"``: ``MemoryReference`` and ``RegisterArray`` of
        ``pallasite.lowering``.

    Raises:
      InvalidValueError: another word for ``values``.
      InvalidTypeError: types of another kind, when decorating; arguments that do not match them, in
        a call.
    """
    if values not in VALUES:
        raise checks.value_error(
            "values is unknown", got=repr(values), expected=" or ".join(map(repr, VALUES))
        )
    flat_types, types_tree = jax.tree.flatten(tuple(arg_types))
    for leaf in flat_types:
        if not isinstance(leaf, RefType | SomeLayout):
            raise checks.type_error(
                "arg_types holds something that is not a type of an argument",
                got=repr(leaf),
                expected="RefType(...) for a reference, a layout for an array",
            )
    flat_returns, return_tree = jax.tree.flatten(return_type)
    for leaf in flat_returns:
        if not isinstance(leaf, ShapeDtypeStruct):
            raise checks.type_error(
                "return_type holds something that is not a type of a result",
                got=repr(leaf),
                expected="gpu.ShapeDtypeStruct(shape, dtype, layout)",
            )

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            flat, in_tree = jax.tree.flatten(tuple(args))
            if in_tree != types_tree:
                raise checks.type_error(
                    "the arguments do not have the structure of arg_types",
                    got=in_tree,
                    expected=str(types_tree),
                )
            pairs = enumerate(zip(flat, flat_types, strict=True))
            flat = [_matching(value, wanted, f"argument {i}") for i, (value, wanted) in pairs]
            results = arguments.bind(
                inline_mgpu_p,
                *flat,
                arg_types=tuple(flat_types),
                in_tree=in_tree,
                return_types=tuple(flat_returns),
                return_tree=return_tree,
                function=function,
                values=values,
            )
            return jax.tree.unflatten(return_tree, results)

        return wrapper

    return decorator


def _matching(value: Any, wanted: Any, what: str) -> Any:
    is_view = isinstance(value, _jax.TransformedRef)
    is_ref = is_view or isinstance(_jax.typeof(value), _jax.AbstractRef)
    if is_ref != isinstance(wanted, RefType):
        raise checks.type_error(
            f"{what} is {'a reference' if is_ref else 'an array'}",
            got=value,
            expected=f"what arg_types says: {wanted}",
        )
    return arguments.reference(value, what) if is_ref else value
