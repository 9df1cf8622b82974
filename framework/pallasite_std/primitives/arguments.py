"""How primitives carry their arguments: flat operands and one static tree.

A primitive that takes references binds the leaves of its argument tuple and the parameter
``args_tree``; a rule gets the arguments back with ``args_tree.unflatten(operands)``. A reference
comes back as a ``TransformedRef`` (without transforms if it had none), an argument that was not
given as None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin import BarrierUse, PluginError, manager
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import MemorySpace, as_transformed, checks, memory_space_of
from pallasite_std.barriers.base import BarrierDType


def bind(primitive: Any, *arguments: Any, **params: Any) -> Any:
    """Binds ``primitive`` on the leaves of ``arguments``."""
    operands, args_tree = _jax.flatten_with_references(arguments)
    return primitive.bind(*operands, args_tree=args_tree, **params)


def reference(
    value: Any, what: str, *spaces: MemorySpace, views: Sequence[type] | None = None
) -> Any:
    """``value`` as a TransformedRef to data in one of ``spaces``.

    Raises InvalidTypeError for anything but a reference to numbers, InvalidValueError for another
    memory space. ``views`` lists the only transforms that are permitted, if given.
    """
    ref = as_transformed(value, what)
    aval = _jax.typeof(ref.ref)
    space = memory_space_of(aval)
    dtype = dtype_of(ref)
    if isinstance(dtype, _jax.ExtendedDType):
        raise checks.type_error(
            f"{what} is a reference to a {dtype}, not to data",
            got=aval,
            expected=_of_spaces(spaces),
        )
    if spaces and not any(_lies_in(space, one) for one in spaces):
        raise checks.value_error(
            f"{what} is in {_name_of(space)}",
            got=aval,
            expected=_of_spaces(spaces),
            hint=_way_to(spaces) if getattr(space, "is_global", False) else None,
        )
    if views is not None:
        for transform in ref.transforms:
            if not isinstance(transform, tuple(views)):
                raise checks.unsupported(
                    f"{what} may not be a view made by {type(transform).__name__}", got=aval
                )
    return ref


def dtype_of(ref: Any) -> Any:
    """The dtype of a TransformedRef or array, None if it has none; indices do not change it."""
    if isinstance(ref, _jax.TransformedRef) and _is_indexed(ref):
        ref = _jax.typeof(ref.ref)
    return getattr(ref, "dtype", None)


def shape_of(ref: Any) -> tuple[Any, ...]:
    """The shape of a TransformedRef or array; of an index that has it, without its type."""
    if isinstance(ref, _jax.TransformedRef) and ref.transforms and _is_indexed(ref):
        return tuple(ref.transforms[-1].get_indexer_shape())
    return tuple(ref.shape)


def _is_indexed(ref: Any) -> bool:
    return all(type(one) is _jax.NDIndexer for one in ref.transforms)


def _way_to(spaces: Sequence[MemorySpace]) -> str | None:
    """How data of global memory gets where it has to be."""
    if not any(one.is_shared for one in spaces):
        return None
    return (
        "allocate it as plgpu.SMEM (scratch_types, pl.run_scoped), and copy what is needed; for a"
        " block of pallas_call, plgpu.BlockSpec(..., memory_space=plgpu.SMEM) does both"
    )


def _lies_in(space: Any, one: MemorySpace) -> bool:
    """Whether a space is ``one``, or a plugin's part of that."""
    if space is one or not isinstance(space, MemorySpace):
        return space is one
    return (one.is_shared and space.is_shared) or (one.is_global and space.is_global)


def _name_of(space: Any) -> str:
    return space.name if isinstance(space, MemorySpace) else str(space)


def _of_spaces(spaces: Sequence[MemorySpace]) -> str:
    names = " or ".join(space.name for space in spaces)
    return f"a reference to data in {names}" if names else "a reference to data"


def part(tree: Any, operands: Sequence[Any], number: int) -> Any:
    """One of the arguments that operands of an equation stand for; the others are not built."""
    children = tree.children()
    start = sum(child.num_leaves for child in children[:number])
    return children[number].unflatten(operands[start : start + children[number].num_leaves])


def argument_of(
    use: BarrierUse, number: int, params: Mapping[str, Any], operands: Sequence[Any]
) -> Any:
    """One of the arguments of an equation of a primitive that uses a barrier.

    Raises:
      PluginError: there is none of this number.
    """
    tree = params.get("args_tree")
    count = len(operands) if tree is None else len(tree.children())
    if not 0 <= number < count:
        raise PluginError(
            f"pallasite_barrier_uses of plugin {manager().label(use.plugin)}: argument {number} of"
            f" primitive {use.primitive}",
            expected=f"the number of one of its {count} arguments",
        )
    return operands[number] if tree is None else part(tree, operands, number)


def barrier(value: Any, what: str = "barrier", *, counts_bytes: bool = False) -> Any:
    """``value`` as a TransformedRef to exactly one barrier.

    Args:
      value: what the user gave.
      what: what it is called in messages.
      counts_bytes: whether it has to be of a kind that asynchronous copies can complete.

    Raises InvalidTypeError for anything but a barrier, InvalidValueError for a group of several.
    """
    ref = as_transformed(value, what)
    aval = _jax.typeof(ref.ref)
    dtype = aval.dtype
    if not isinstance(dtype, BarrierDType):
        raise checks.type_error(
            f"{what} is not a barrier",
            got=aval,
            expected="a reference to a Barrier" + ("" if counts_bytes else " or ClusterBarrier"),
        )
    for transform in ref.transforms:
        if not isinstance(transform, _jax.NDIndexer):
            raise checks.value_error(
                f"{what} is a view made by {type(transform).__name__}",
                expected="barriers are only indexed: barrier.at[i]",
            )
    shape = shape_of(ref)
    if math.prod(shape) != 1:
        raise checks.value_error(
            f"{what} is a group of {math.prod(shape)} barriers, of shape {shape}",
            expected="one barrier",
            hint=f"choose one of the group: {what}.at[i]",
        )
    if counts_bytes and not dtype.counts_bytes:
        raise checks.type_error(
            f"{what} is a {dtype.title}, which cannot count the bytes of a copy",
            got=aval,
            expected="a Barrier",
            hint=f"give the copy a Barrier; then arrive on the {dtype.title} once it completed",
        )
    return ref


def predicate(value: Any, what: str = "predicate") -> Any:
    """``value`` as a boolean scalar, or None."""
    if value is None:
        return None
    if isinstance(value, bool | np.bool_):
        return bool(value)
    try:
        aval = _jax.typeof(value)
    except TypeError:  # Nothing that JAX knows.
        aval = repr(value)
    if not isinstance(aval, _jax.ShapedArray) or aval.shape != () or aval.dtype != np.bool_:
        raise checks.type_error(
            f"{what} is not a boolean scalar", got=aval, expected="a bool or a bool[] array"
        )
    return value


def same_dtype(a: Any, what_a: str, b: Any, what_b: str) -> None:
    """An InvalidValueError unless two references or arrays have one dtype."""
    dtypes = dtype_of(a), dtype_of(b)
    if dtypes[0] != dtypes[1]:
        raise checks.value_error(
            f"{what_a} and {what_b} have different dtypes",
            got=f"{what_a}: {dtypes[0]}, {what_b}: {dtypes[1]}",
            expected="the same dtype",
            hint="convert in registers: read, astype, write",
        )


def same_shape(a: Any, what_a: str, b: Any, what_b: str) -> None:
    """An InvalidValueError unless two references or arrays have one shape."""
    shapes = shape_of(a), shape_of(b)
    if shapes[0] != shapes[1]:
        raise checks.value_error(
            f"{what_a} and {what_b} have different shapes",
            got=f"{what_a}: {shapes[0]}, {what_b}: {shapes[1]}",
            expected="the same shape",
        )


def array(value: Any, what: str) -> Any:
    """``value`` as an array, or an InvalidTypeError when it is a reference."""
    if isinstance(value, _jax.TransformedRef) or isinstance(_jax.typeof(value), _jax.AbstractRef):
        raise checks.type_error(
            f"{what} is a reference, not an array", got=value, hint="read it first: ref[...]"
        )
    return value


def reference_effects(
    args_tree: Any,
    num_operands: int,
    *,
    read: Sequence[int] = (),
    written: Sequence[int] = (),
) -> set[Any]:
    """Read and write effects on the references that are the given arguments (if present)."""
    positions = args_tree.unflatten(list(range(num_operands)))
    effects: set[Any] = set()
    for make, arguments in ((_jax.ReadEffect, read), (_jax.WriteEffect, written)):
        for argument in arguments:
            if positions[argument] is not None:
                effects.add(make(positions[argument].ref))
    return effects


def no_discharge(primitive: Any) -> None:
    """Makes discharging a reference that ``primitive`` uses a clear error."""

    @_jax.discharge_rule(primitive)
    def _(ctx: Any, *operands: Any, **params: Any) -> Any:
        del ctx, operands, params
        raise checks.unsupported(
            f"{primitive} works on memory and has no meaning on values",
            hint="use it on references of the kernel, not on those of pl.run_state",
        )


def pretty(primitive: Any, describe: Callable[..., list[str]]) -> None:
    """Prints equations of ``primitive`` as ``name words...``; ``describe`` gets the arguments."""

    def rule(equation: Any, context: Any, settings: Any) -> Any:
        del settings
        printer = _jax.pretty_printer
        arguments = equation.params["args_tree"].unflatten(equation.invars)
        printed = [
            None if argument is None else _print_argument(argument, context)
            for argument in arguments
        ]
        words: list[Any] = [printer.text(primitive.name)]
        for word in describe(printed, equation.params):
            words.append(printer.text(" "))
            words.append(word if isinstance(word, printer.Doc) else printer.text(str(word)))
        line = printer.concat(words)
        if equation.outvars and not equation.primitive.multiple_results:
            result = _jax.pp_var(equation.outvars[0], context)
            aval = printer.text(":" + equation.outvars[0].aval.str_short(short_dtypes=True) + " = ")
            line = printer.concat([result, aval, line])
        return line

    _jax.pp_eqn_rules[primitive] = rule


def _print_argument(argument: Any, context: Any) -> Any:
    printer = _jax.pretty_printer
    if isinstance(argument, _jax.TransformedRef):
        parts = [_jax.pp_var(argument.ref, context)]
        parts += [transform.pretty_print(context) for transform in argument.transforms]
        return printer.concat(parts)
    if isinstance(argument, _jax.Var | _jax.Literal):
        return _jax.pp_var(argument, context)
    return printer.text(str(jax.tree.leaves(argument)))
