"""What the elements of a function's result depend on: elements of its argument, and places."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import JaxprTable, Region, Visitor

type Bits = np.ndarray[Any, np.dtype[np.object_]]
"""For each element an integer of Python's, whose bits stand for what the element depends on."""

_MOST_TURNS = 64
"""Of a loop, that are followed one by one."""

_MOST_MARKS = 1021
"""Of one array; elements that are so far apart from each other share one."""

_NUMBERING = frozenset(("iota", "random_bits", "rng_bit_generator", "rng_uniform"))
"""Primitives that make elements of where they are."""

_SCATTERING = frozenset(
    f"scatter{kind}"
    for kind in ("", "_add", "_sub", "_mul", "_min", "_max", "-add", "-sub", "-mul", "-min", "-max")
)

_OPAQUE = _SCATTERING | frozenset(
    (
        *("gather", "dynamic_slice", "dynamic_update_slice", "pad", "top_k", "fft"),
        *("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"),
        *("conv_general_dilated", "reduce"),
    )
)
"""Primitives whose results count as made of all elements of all operands."""

_MOVING = frozenset(("rev", "slice", "split", "unstack", "transpose", "concatenate")) | _OPAQUE
"""Primitives whose elements are others of an operand."""


def mixing(traced: Any, table: JaxprTable) -> str | None:
    """What keeps a function from being the same function of each element of its argument, in words;
    None if nothing does.

    Args:
      traced: the closed jaxpr of a function of an array, whose result has the shape of that.
      table: the primitives that carry jaxprs.
    """
    jaxpr = traced.jaxpr
    (argument,) = jaxpr.invars
    count = math.prod(argument.aval.shape)
    walk = _Dependences(table, count)
    own = np.array([1 << number for number in range(count)], object).reshape(argument.aval.shape)
    constants = map(walk.constant, jaxpr.constvars, traced.consts)
    (result,) = walk.run(jaxpr, [*constants, own])
    others = (bits & walk.argument & ~bit for bits, bit in zip(result.flat, own.flat, strict=True))
    if not any(others) and len({bits >> count for bits in result.flat}) == 1:
        return None
    if not walk.notes:
        return "constants that differ from place to place"
    return f"{walk.notes[min(walk.notes)]} of the whole array"


class _Cause(enum.IntEnum):
    """What a primitive may have to do with results that are not those of each element by itself,
    the likeliest reason first.

    MIXES: it makes elements of several; not because it works element by element.
    MOVES: it takes elements from elsewhere, or makes them of where they are.
    REPEATS: a loop or a branch by which elements depend on several.
    COMBINES: it works element by element on arrays of which one was moved.
    COUNTS: a loop that carries something from turn to turn.
    """

    MIXES = 0
    MOVES = 1
    REPEATS = 2
    COMBINES = 3
    COUNTS = 4


class _Dependences(Visitor[Bits]):
    """Follows what elements depend on.

    Attributes:
      argument: the bits of the elements of the function's argument. Further ones are marks: of the
        elements of constants, the parts of joined arrays, the turns of loops.
      notes: the first primitive of each kind.
    """

    def __init__(self, table: JaxprTable, count: int):
        super().__init__(table)
        self.argument = (1 << count) - 1
        self.notes: dict[_Cause, str] = {}
        self._marks: dict[tuple[int, int], int] = {}
        self._next = count

    # Values ---------------------------------------------------------------------------------------

    def unknown(self, variable: Any) -> Bits:
        """Depends on everything."""
        return _filled(_shape(variable), self.argument)

    def literal(self, atom: Any) -> Bits:
        """Depends on nothing."""
        return _filled(_shape(atom), 0)

    def constant(self, variable: Any, value: Any) -> Bits:
        """Depends on the place, unless all elements are equal."""
        shape = _shape(variable)
        known = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)
        if known and math.prod(shape) > 1 and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
            elements = np.asarray(value)
            if (elements == elements.flat[0]).all():
                return _filled(shape, 0)
        return self._marked(id(variable), shape)

    def join(self, values: Sequence[Bits], variable: Any) -> Bits:
        """Depends on what any of them does."""
        return _joined(values, _shape(variable))

    def _marked(self, owner: int, shape: tuple[int, ...]) -> Bits:
        """A mark for each element, the same whenever an owner asks for it."""
        count = math.prod(shape)
        if count <= 1:
            return _filled(shape, 0)
        marks = [self._mark(owner, number % _MOST_MARKS) for number in range(count)]
        return np.array(marks, object).reshape(shape)

    def _mark(self, owner: int, number: int) -> int:
        if (owner, number) not in self._marks:
            self._marks[owner, number] = 1 << self._next
            self._next += 1
        return self._marks[owner, number]

    def _note(
        self, cause: _Cause, equation: Any, operands: Sequence[Bits], results: Iterable[Bits]
    ) -> None:
        """Notes an equation if elements of its results are made of several elements of the
        argument, and none of its operands are."""

        def mixed(arrays: Iterable[Bits]) -> bool:
            return any(
                (one & self.argument).bit_count() > 1 for each in arrays for one in each.flat
            )

        if cause not in self.notes and mixed(results) and not mixed(operands):
            self.notes[cause] = str(equation.primitive.name)

    # Equations ------------------------------------------------------------------------------------

    def primitive(self, equation: Any, operands: list[Bits]) -> list[Bits]:
        """By what is known of primitives that move or combine elements. Others work element by
        element if their operands have the shape of the result, or are scalars."""
        name, shapes = str(equation.primitive.name), list(map(_shape, equation.outvars))
        inner = _body_of(equation)
        if inner is not None:
            return self.run(inner, operands)
        if name in ("concatenate", "stack"):
            operands = [_or(one, self._mark(id(equation), n)) for n, one in enumerate(operands)]
        everything = functools.reduce(int.__or__, map(_all_of, operands), 0)
        fits = all(_fits(one.shape, shape) for one in operands for shape in shapes)
        elementwise = fits and name not in _RULES and name not in _OPAQUE
        if name in _RULES:
            results = list(_RULES[name](equation.params, *operands))
            results = [one.reshape(shape) for one, shape in zip(results, shapes, strict=True)]
        elif name in _NUMBERING:
            results = [_or(self._numbers(equation, shape), everything) for shape in shapes]
        elif elementwise:
            results = [_joined(operands, shape) for shape in shapes]
        else:
            results = [_or(self._marked(id(equation), shape), everything) for shape in shapes]
        if name in _NUMBERING or (name in _MOVING and everything & self.argument):
            self.notes.setdefault(_Cause.MOVES, name)
        self._note(_Cause.COMBINES if elementwise else _Cause.MIXES, equation, operands, results)
        return results

    def _numbers(self, equation: Any, shape: tuple[int, ...]) -> Bits:
        owner = id(equation)
        if equation.primitive.name != "iota":
            return self._marked(owner, shape)
        along = equation.params["dimension"]
        column = tuple(size if axis == along else 1 for axis, size in enumerate(shape))
        return np.broadcast_to(self._marked(owner, column), shape)

    # Branches and loops ---------------------------------------------------------------------------

    def branches(
        self, equation: Any, regions: Sequence[Region], operands: list[Bits]
    ) -> dict[int, Bits]:
        """The results depend on what the choice depends on, too."""
        found = super().branches(equation, regions, operands)
        selector = regions[0].selector
        choice = 0 if selector is None else _all_of(operands[selector])
        found = {result: _or(one, choice) for result, one in found.items()}
        self._note(_Cause.REPEATS, equation, operands, found.values())
        return found

    def loop(
        self, equation: Any, regions: Sequence[Region], operands: list[Bits]
    ) -> dict[int, Bits]:
        """Turn by turn, or until nothing changes any more."""
        is_scan = equation.primitive.name == "scan"
        found = (self._scan if is_scan else self._while)(equation, regions, operands)
        self._note(_Cause.REPEATS, equation, operands, found.values())
        return found

    def _while(
        self, equation: Any, regions: Sequence[Region], operands: list[Bits]
    ) -> dict[int, Bits]:
        condition, body = regions
        current = list(operands)
        while True:
            inputs = self.inputs(equation, condition, current)
            (again,) = self.region(equation, condition, inputs)
            following = self.after(equation, body, current)
            for _, number in body.carried_operands():
                following[number] = _or(following[number], current[number], _all_of(again))
            if all(map(np.array_equal, current, following)):
                return self.carried_results(body, current)
            current = following

    def _scan(
        self, equation: Any, regions: Sequence[Region], operands: list[Bits]
    ) -> dict[int, Bits]:
        params, jaxpr, owner = equation.params, regions[0].jaxpr, id(equation)
        first, carries, _ = _jax.scan_operand_counts(params)
        constants, carry = operands[:first], operands[first : first + carries]
        scanned, length = operands[first + carries :], params["length"]
        changed = [
            one is not other
            for one, other in zip(jaxpr.invars[first:], jaxpr.outvars[:carries], strict=False)
        ]
        if any(changed):
            self.notes.setdefault(_Cause.COUNTS, "scan")

        def turn(carry: list[Bits], elements: list[Bits], mark: int) -> tuple[list[Bits], Any]:
            outputs = self.run(jaxpr, [*constants, *carry, *elements])
            marked = [
                _or(one, mark) if new else one
                for one, new in zip(outputs[:carries], changed, strict=True)
            ]
            return marked, outputs[carries:]

        stacked = [_filled(_shape(one), 0) for one in equation.outvars[carries:]]
        if length <= _MOST_TURNS:
            for number in range(length)[:: -1 if params["reverse"] else 1]:
                elements = [_array(one[number]) for one in scanned]
                carry, outputs = turn(carry, elements, self._mark(owner, number))
                for one, output in zip(stacked, outputs, strict=True):
                    one[number] = output
            return dict(enumerate([*carry, *stacked]))
        # Each turn may have what any has.
        elements = [_along(one, (0,)) for one in scanned]
        while True:
            following, outputs = turn(carry, elements, self._mark(owner, 0))
            following = list(map(_or, carry, following))
            if all(map(np.array_equal, carry, following)):
                break
            carry = following
        marks = self._marked(owner, (length,))
        for one, output in zip(stacked, outputs, strict=True):
            one[...] = _or(output, marks.reshape(length, *(1,) * output.ndim))
        return dict(enumerate([*carry, *stacked]))


# Arrays of bits ---------------------------------------------------------------------------------


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(getattr(variable.aval, "shape", ()))


def _fits(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether an operand of an element-wise primitive may have a shape."""
    pairs = zip(shape, result, strict=False)
    return not shape or (len(shape) == len(result) and all(one in (1, n) for one, n in pairs))


def _filled(shape: tuple[int, ...], bits: int) -> Bits:
    return np.full(shape, bits, object)


def _array(bits: Any) -> Bits:
    """NumPy makes plain integers of what has no dimensions."""
    return np.asarray(bits, object)


def _or(*arrays: Any) -> Bits:
    return functools.reduce(
        lambda one, other: _array(np.bitwise_or(one, other)), map(_array, arrays)
    )


def _joined(arrays: Iterable[Bits], shape: tuple[int, ...]) -> Bits:
    return np.broadcast_to(_or(_filled((), 0), *arrays), shape)


def _along(array: Bits, axes: Iterable[int]) -> Bits:
    for axis in sorted(axes, reverse=True):
        array = _array(np.bitwise_or.reduce(array, axis=axis, initial=0))
    return array


def _all_of(array: Bits) -> int:
    return functools.reduce(int.__or__, array.flat, 0)


def _body_of(equation: Any) -> Any:
    """The jaxpr of an equation that has one, and whose operands and results are those of that."""
    found = [one for one in equation.params.values() if hasattr(one, "eqns")]
    if len(found) != 1:
        return None
    (jaxpr,) = found
    pairs = ((jaxpr.invars, equation.invars), (jaxpr.outvars, equation.outvars))
    fits = all(list(map(_shape, inner)) == list(map(_shape, outer)) for inner, outer in pairs)
    return jaxpr if fits else None


# Primitives -------------------------------------------------------------------------------------


type _Rule = Callable[..., Iterable[Bits]]
"""Results of operands, after the parameters; reshaped as they have to be."""


def _broadcast(params: Mapping[str, Any], one: Bits, *_: Bits) -> Iterable[Bits]:
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], one.shape, strict=True):
        shape[axis] = size
    return (np.broadcast_to(one.reshape(shape), params["shape"]),)


def _slice(params: Mapping[str, Any], one: Bits) -> Iterable[Bits]:
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * one.ndim
    return (one[tuple(map(slice, starts, limits, strides))],)


def _split(params: Mapping[str, Any], one: Bits) -> Iterable[Bits]:
    return np.split(one, np.cumsum(params["sizes"])[:-1], params["axis"])


def _reduce(params: Mapping[str, Any], one: Bits) -> Iterable[Bits]:
    return (_along(one, params["axes"]),)


def _cumulate(params: Mapping[str, Any], one: Bits) -> Iterable[Bits]:
    axis = params["axis"]
    return (np.broadcast_to(np.expand_dims(_along(one, (axis,)), axis), one.shape),)


def _sort(params: Mapping[str, Any], *operands: Bits) -> Iterable[Bits]:
    sorted_, axis = _or(*operands), params["dimension"]
    found = np.expand_dims(_along(sorted_, (axis,)), axis)
    return (np.broadcast_to(found, sorted_.shape),) * len(operands)


def _product(params: Mapping[str, Any], left: Bits, right: Bits) -> Iterable[Bits]:
    contracted, batch = params["dimension_numbers"]
    count = len(batch[0])

    def side(one: Bits, contracted: Sequence[int], batch: Sequence[int]) -> Bits:
        free = [axis for axis in range(one.ndim) if axis not in (*contracted, *batch)]
        one = np.transpose(one, (*batch, *free, *contracted))
        return _along(one, range(count + len(free), one.ndim))

    rows, columns = map(side, (left, right), contracted, batch)
    between = (1,) * (rows.ndim - count)
    rows = rows.reshape(*rows.shape, *(1,) * (columns.ndim - count))
    return (_or(rows, columns.reshape(*columns.shape[:count], *between, *columns.shape[count:])),)


_REDUCING = (
    *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "argmax", "argmin"),
    *("reduce_and", "reduce_or", "reduce_xor"),
)

_RULES: dict[str, _Rule] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *parts: (np.concatenate(parts, params["dimension"]),),
    "dot_general": _product,
    "rev": lambda params, one: (np.flip(one, params["dimensions"]),),
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "stack": lambda params, *parts: (np.stack(parts, params["axis"]),),
    "unstack": lambda params, one: list(np.moveaxis(one, params["axis"], 0)),
    "tile": lambda params, one: (np.tile(one, params["reps"]),),
    "transpose": lambda params, one: (np.transpose(one, params["permutation"]),),
    **{name: lambda params, one: (one,) for name in ("expand_dims", "reshape", "squeeze")},
    **dict.fromkeys(_REDUCING, _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulate),
}
