"""How many elements one memory access of an array should move, found before code is emitted."""

from __future__ import annotations

import math
from typing import Any

import jax

from pallasite.plugin import Registry, Target
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import bit_width
from pallasite.plugin.layouts import Layout, RegisterLayout, default_strided, padded
from pallasite_std.lane_layouts.linked_variables import LinkedVariables
from pallasite_std.memory.relayout import USUAL
from pallasite_std.memory.rows import FEW, better_row, repeated, whole_rows

_lax = _jax.lax_primitives

_RENAMING = (_lax.reshape_p, _lax.squeeze_p, _lax.broadcast_in_dim_p)


_QUOTIENTS = 6
"""Instructions for an index of each element of an array of several dimensions in one row."""


class AccessWidths:
    """For each variable of a kernel, how many elements one memory access should move at most.

    Arrays that are combined in element-wise operations need one layout. Where none is asked for,
    loads choose strided layouts whose vectors fit 16 bytes of the widest element type that any load
    or store among them moves. Layout rules say which primitives keep layouts (``same_layout``) and
    which move data between memory and registers (``accesses_memory``: a function from the
    equation's operands and results to the variable that is moved). ``moves``, a function of the
    operands' types and the parameters, tells that an array of any layout goes through memory.

    Arrays keep their layout on the way into and out of calls, loops and branches, and from one
    iteration of a loop to the next.
    """

    def __init__(self, registry: Registry, target: Target):
        self._registry = registry
        self._target = target
        self._variables = LinkedVariables()
        self._moved: list[Any] = []
        self._others: list[Any] = []
        self._stretched: list[Any] = []
        self._wider: dict[Any, Any] = {}
        self._placed: set[Any] | None = None
        self._known: dict[int, Any] = {}
        self._repeating: dict[Any, int] = {}  # Bits of the widest elements of a group.
        self._widest: dict[Any, int] | None = None
        self._offsets: list[tuple[Any, int]] = []
        self._counting: list[Any] = []

    def add(self, jaxpr: Any) -> None:
        """Takes account of a jaxpr and of those inside it, unless it has already."""
        if id(jaxpr) in self._known:
            return
        self._known[id(jaxpr)] = jaxpr  # Kept, so that no other object gets its id.
        self._widest = self._placed = None
        for equation in jaxpr.eqns:
            self._add_equation(equation)

    def limit(self, variable: Any) -> int | None:
        """Elements per access of what an equation loads, or None if it loads nothing."""
        if self._widest is None:
            self._widest = {}
            for moved in self._moved:
                root = self._variables.group(moved)
                bits = max(8, bit_width(moved.aval.dtype))
                self._widest[root] = max(self._widest.get(root, 0), bits)
        if variable not in self._variables:
            return None
        widest = self._widest.get(self._variables.group(variable))
        return None if widest is None else 128 // widest

    def row(self, equation: Any) -> Layout | None:
        """The layout of what an equation loads of a whole array of an odd shape that meets nothing
        but element-wise functions, loads and stores: all elements in one row."""
        variable = equation.outvars[0]
        shape = getattr(variable.aval, "shape", ())
        whole = bool(equation.invars) and getattr(equation.invars[0].aval, "shape", None) == shape
        if not whole or math.prod(shape) == 0 or variable not in self._variables:
            return None
        if self._placed is None:
            self._placed = {self._variables.group(one) for one in self._others}
            self._repeating = {}
            for one in self._stretched:
                group = self._variables.group(one)
                bits = max(8, bit_width(one.aval.dtype))
                self._repeating[group] = max(self._repeating.get(group, 0), bits)
        limit = self.limit(variable)
        if limit is not None and any(
            self._group(one) == self._group(variable) for one in self._counting
        ):
            return _counted(shape, limit)
        if limit is None or self._variables.group(variable) in self._placed:
            return None
        if 2 * math.prod(shape) <= 3 * FEW:
            # Wider vectors would be taken apart where their parts begin between them.
            group = self._variables.group(variable)
            offsets = (n for one, n in self._offsets if self._group(one) == group)
            limit = math.gcd(limit, *offsets)
        widest = self._repeating.get(self._variables.group(variable))
        if widest is None:
            own = default_strided(shape, 128 // limit)
            return better_row(own, limit) or (own if own.flat else None)
        bits = bit_width(variable.aval.dtype)
        row, rows = repeated(shape, bits, limit)
        exchanged = math.prod(shape) > FEW and math.prod(shape) * widest // 8 <= USUAL
        return row if exchanged and row is not None else rows

    def _group(self, variable: Any) -> Any:
        return self._variables.group(variable) if variable in self._variables else None

    def wider(self, variable: Any) -> Any:
        """The operand that a variable with extents of 1 is stretched for, if there is one."""
        return self._wider.get(variable)

    def _add_equation(self, equation: Any) -> None:
        rule = self._registry.layout_rule(
            equation.primitive,
            self._target,
            [atom.aval for atom in equation.invars],
            equation.params,
        )
        accesses = getattr(rule.function, "accesses_memory", None) if rule is not None else None
        if accesses is not None:
            variable = accesses(equation.invars, equation.outvars)
            if not isinstance(variable, _jax.Literal):
                self._moved.append(variable)
                self._variables.group(variable)
                self._offsets.append((variable, _offset(equation)))
        if rule is not None and getattr(rule.function, "same_layout", False):
            results = equation.outvars
            if len(results) == 1:
                results = results * len(equation.invars)
            operands = equation.invars
            for atom, result in zip(operands, results, strict=False):
                self._variables.link(atom, result)
            narrow = [
                one for one in operands if _is_array(one) and _shape(one) != _shape(results[0])
            ]
            self._stretched += results[:1] if narrow else []
            whole = next((one for one in operands if _shape(one) == _shape(results[0])), None)
            self._wider |= {one: whole for one in narrow if whole is not None}
        if _is_renamed(equation):
            # Any layout gets or loses dimensions of one element.
            self._variables.join(equation.invars[0], equation.outvars[0])
            return
        regions = self._registry.jaxprs.regions(equation)
        if (
            not regions
            and accesses is None
            and not getattr(getattr(rule, "function", None), "same_layout", False)
        ):
            arrays = [one for one in equation.invars if _is_array(one)]
            moves = getattr(getattr(rule, "function", None), "moves", None)
            if equation.primitive is _lax.iota_p and len(_shape(equation.outvars[0])) > 1:
                self._counting += equation.outvars
            if moves and moves([one.aval for one in equation.invars], **equation.params):
                self._others += [one for one in equation.outvars if _is_array(one)]
            elif arrays:
                self._others += [*arrays, *(one for one in equation.outvars if _is_array(one))]
        for region in regions:
            self.add(region.jaxpr)
            self._variables.link_region(equation, region)
            self._variables.link_carried(equation, region)


def _counted(shape: tuple[int, ...], limit: int) -> Layout | None:
    """The layout of vectors of rows where that is less work than all elements in one row, of which
    indices along several dimensions are quotients; None if it is not, or no row is usual."""
    own = default_strided(shape, 128 // limit)
    widths = [n for n in (16, 8, 4, 2, 1) if n <= limit and shape[-1] % n == 0]

    def work(layout: RegisterLayout) -> int:
        element = 1 + _QUOTIENTS * layout.flat
        return layout.registers * (layout.vector_length * element + 2)

    found = [padded(shape, n) for n in widths]
    rows = whole_rows(shape, limit)
    best = min(found if rows is None else [*found, rows], key=work)
    return best if work(best) < work(own) else None


def _is_renamed(equation: Any) -> bool:
    """Whether it does nothing but to add or to remove dimensions of one element."""
    if equation.primitive not in _RENAMING or not _is_array(equation.invars[0]):
        return False
    shapes = [_shape(one) for one in (equation.invars[0], *equation.outvars)]
    before, after = ([n for n in shape if n > 1] for shape in shapes)
    return before == after


def _offset(equation: Any) -> int:
    """Where in an array that is accessed the first element is; 0 if that is not known."""
    leaves = equation.invars[{_jax.get_p: 1, _jax.swap_p: 2}.get(equation.primitive, 0) :]
    shape = getattr(equation.invars[0].aval, "shape", ())
    if len(leaves) == len(equation.invars):
        return 0
    total = 0
    for one in jax.tree.unflatten(equation.params["tree"], leaves):
        if not isinstance(one, _jax.NDIndexer) or len(one.indices) != len(shape):
            return 0
        for d, index in enumerate(one.indices):
            start = index.start if isinstance(index, _jax.Slice) else index
            if not isinstance(start, int):
                return 0
            total += start * math.prod(shape[d + 1 :])
        shape = ()
    return total


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _is_array(atom: Any) -> bool:
    """Whether it is a variable of more than one element, in registers."""
    aval = atom.aval
    return not isinstance(atom, _jax.Literal) and (
        isinstance(aval, _jax.ShapedArray) and math.prod(aval.shape) > 1
    )
