"""Primitives that are defined by others: a pass puts the definitions in their place.

What is defined so needs no rules of its own: estimates, layouts and code follow from those of the
definition. The equation becomes a call of it, at the user's line.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from pallasite.plugin import SourceLocation, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import with_jaxprs
from pallasite_std.definitions import accesses, narrow
from pallasite_std.definitions.record import Definition
from pallasite_std.passes.alternatives import check_alternatives
from pallasite_std.passes.tables import with_computed_tables

MODULES = ("scan", "products", "simple", "random")
"""Modules of :mod:`pallasite_std.definitions`; each has a table ``DEFINITIONS``."""


_ACCESSES = {_jax.get_p: 1, _jax.swap_p: 2}
"""Loads and stores: how many operands come before the leaves of their transforms."""


@functools.cache
def definitions() -> dict[Any, Definition]:
    """The definitions of all primitives that have one."""
    found: dict[Any, Definition] = {}
    for name in MODULES:
        found.update(importlib.import_module(f"pallasite_std.definitions.{name}").DEFINITIONS)
    return found


def expand_definitions(jaxpr: Any, context: Any) -> Any:
    """The kernel with calls of their definitions in the place of primitives that have one; None if
    there are none.

    Raises:
      UnsupportedError: extents of operands are symbols, as in programs for any shape.
    """
    for number, variable in enumerate(jaxpr.invars):
        shape = getattr(variable.aval, "shape", ())
        if not all(isinstance(extent, int | np.integer) for extent in shape):
            raise UnsupportedError(
                f"operand {number} of kernel {context.kernel} has extents that are symbols",
                got=f"({', '.join(map(str, shape))})",
                expected="numbers: kernels are compiled for certain shapes",
                hint="export a program for each shape, or pad to one",
                location=context.spec.location if context.spec is not None else None,
            )
    expansion = _Expansion(definitions(), context.jaxprs)
    new = expansion.jaxpr(jaxpr)
    if new is jaxpr:
        return None
    return _with_reads(new) if expansion.has_updates else new


def _with_reads(jaxpr: Any) -> Any:
    """The kernel with effects as if it read all references that it writes."""
    places = {getattr(effect, "input", None) for effect in jaxpr.effects if not _is_read(effect)}
    written = [v for v in jaxpr.invars if v in places and isinstance(v.aval, _jax.AbstractRef)]
    reads, writes = map(_jax.ReadEffect, written), map(_jax.WriteEffect, written)
    return jaxpr.replace(effects={*jaxpr.effects, *reads, *writes})


def _is_read(effect: Any) -> bool:
    return isinstance(effect, _jax.ReadEffect)


def _is_key(atom: Any) -> bool:
    """Whether something is an array of random keys."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and _is_of_keys(dtype)


@functools.lru_cache(maxsize=256)
def _is_of_keys(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _words(aval: Any) -> Any:
    """The type of the words of keys, or of a reference to them."""
    if isinstance(aval, _jax.AbstractRef):
        return aval.update(inner_aval=_jax.physical_aval(aval.inner_aval))
    return _jax.physical_aval(aval)


def _without_elements(atom: Any) -> bool:
    return 0 in getattr(atom.aval, "shape", ())


def _is_empty_array(atom: Any) -> bool:
    return _without_elements(atom) and isinstance(atom.aval, _jax.ShapedArray)


def _plain(value: Any) -> Any:
    """A parameter whose integers are Python's."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, np.integer) else value


def _with_plain_numbers(equation: Any) -> Any:
    """An equation without NumPy's integers, which derivatives by JAX have among the parameters."""
    if equation.primitive not in (primitives.slice_p, primitives.pad_p):
        return equation
    return equation.replace(params={k: _plain(one) for k, one in equation.params.items()})


def _moves_nothing(equation: Any) -> bool:
    """Whether an equation makes or stores arrays without elements only."""
    if equation.primitive is _jax.addupdate_p:
        return _without_elements(equation.invars[1])
    results = equation.outvars
    pure = not equation.effects or equation.primitive in _ACCESSES
    return bool(results) and pure and all(map(_without_elements, results))


def _of_nothing(equation: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    """What an equation makes of arrays without elements: arrays of one number."""
    with jax.ensure_compile_time_eval():
        given = [jnp.zeros(one.shape, one.dtype) for one in operands]
        found = equation.primitive.bind(*given, **params)
    found = found if equation.primitive.multiple_results else [found]
    return [jnp.full(one.shape, np.asarray(one).flat[0], one.dtype) for one in found]


class _Expansion:
    """Rewrites jaxprs equation by equation.

    Keys become arrays of their words. Nothing makes or takes arrays without elements: what calls,
    branches and loops pass on as such becomes a scalar that nobody reads.
    """

    def __init__(self, table: dict[Any, Definition], carriers: Any):
        self.table = table
        self.carriers = carriers
        self.replaced: dict[Any, Any] = {}
        self.location: SourceLocation | None = None
        self.has_updates = False

    def jaxpr(self, jaxpr: Any) -> Any:
        """The jaxpr, itself if nothing changes."""
        equations, changed = [], False
        used = functools.cache(lambda: _used(jaxpr))
        producers = {v: one for one in jaxpr.eqns for v in one.outvars}
        left: set[Any] = set()  # Operands of others no more.
        for old in jaxpr.eqns:
            plain = self.plain_accesses(_with_plain_numbers(old), used)
            changed |= plain[0] is not old
            for equation in plain:
                given = equation
                if equation.primitive in self.table:
                    given = self.table[equation.primitive].operands(equation, producers)
                    left |= _variables(equation.invars) - _variables(given.invars)
                new = self.equation(given)
                if new is not None:
                    equations.append(new)
                changed |= new is not equation
        if left:
            left -= _used(jaxpr.replace(eqns=equations))
            equations = [one for one in equations if left.isdisjoint(one.outvars)]
        changed |= any(
            _is_key(atom) or _is_empty_array(atom)
            for atom in (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars)
        )
        if not changed:
            return jaxpr
        return jaxpr.replace(
            eqns=equations,
            invars=[self.atom(atom) for atom in jaxpr.invars],
            constvars=[self.atom(atom) for atom in jaxpr.constvars],
            consts=jaxpr.consts,
            outvars=[self.operand(atom) for atom in jaxpr.outvars],
        )

    def plain_accesses(self, equation: Any, used: Callable[[], set[Any]]) -> Sequence[Any]:
        """The accesses that an equation is made of, if it is one; else itself."""
        found = [equation]
        if accesses.is_masked(equation):
            location = _jax.user_location(equation.source_info) or self.location
            found = accesses.with_plain_mask(equation, _call, location)
        if accesses.reads_what_it_writes(equation, used):
            self.has_updates = True
            found[-1:] = accesses.separated(found[-1], _call)
        return found

    def atom(self, atom: Any) -> Any:
        """The same operand or variable, or what stands for it."""
        empty = _is_empty_array(atom)
        if isinstance(atom, _jax.Literal) or not (empty or _is_key(atom)):
            return atom
        if atom not in self.replaced:
            aval = _words(atom.aval)
            self.replaced[atom] = _jax.new_var(aval.update(shape=()) if empty else aval)
        return self.replaced[atom]

    def operand(self, atom: Any) -> Any:
        """The same for an operand; for arrays without elements, which nothing makes, a constant."""
        if not _is_empty_array(atom):
            return self.atom(atom)
        aval = _words(atom.aval).update(shape=())
        return _jax.Literal(np.zeros((), aval.dtype), aval)

    def equation(self, equation: Any) -> Any:
        """One equation, or what replaces it, or None if it makes nothing."""
        results = equation.outvars
        if _moves_nothing(equation):
            return None
        carries = equation.primitive in self.carriers.primitives
        empty = [_without_elements(atom) for atom in equation.invars]
        if any(empty) and all(empty) and not carries and not equation.effects:
            return self.call(equation, functools.partial(_of_nothing, equation))
        if not any(empty) and narrow.needs_bytes(equation):
            return self.call(equation, functools.partial(narrow.with_bytes, equation))
        keys = any(map(_is_key, (*equation.invars, *results)))
        definition = self.table.get(equation.primitive)
        if definition is not None and definition.applies(equation):
            # What calls the equation's jaxprs calls them with words.
            given = self.carrier(equation, keys) if carries and keys else equation
            return self.call(given, definition.function)
        if any(empty) and not carries:
            raise UnsupportedError(
                f"{equation.primitive} takes an array without elements",
                got=", ".join(str(atom.aval) for atom in equation.invars),
                expected="arrays with elements",
            )
        check_alternatives(equation, self.location)
        if keys and equation.primitive in _ACCESSES:
            return self.access(equation)
        if carries:
            return self.carrier(equation, keys)
        return self.call(equation, _of_keys(equation)) if keys else equation

    def access(self, equation: Any) -> Any:
        """A load or store of keys: it moves all words of each."""
        leading = _ACCESSES[equation.primitive]
        reference = self.atom(equation.invars[0])
        words = reference.aval.shape[len(equation.invars[0].aval.shape) :]
        tree = equation.params["tree"]
        transforms = []
        for one in tree.unflatten(equation.invars[leading:]):
            if not isinstance(one, _jax.NDIndexer):
                raise UnsupportedError(
                    "a view of a reference to random keys is no part of it",
                    got=type(one).__name__,
                    expected="slices and indices",
                )
            slices = tuple(_jax.Slice(0, size) for size in words)
            shape = (*one.shape, *words)
            transforms.append(_jax.NDIndexer((*one.indices, *slices), shape, one.int_indexer_shape))
        leaves, tree = jax.tree.flatten(tuple(transforms))
        stored = [self.atom(atom) for atom in equation.invars[1:leading]]
        return equation.replace(
            invars=[reference, *stored, *leaves],
            outvars=[self.atom(atom) for atom in equation.outvars],
            params={**equation.params, "tree": tree},
        )

    def carrier(self, equation: Any, keys: bool) -> Any:
        """An equation with jaxprs."""
        regions = self.carriers.regions(equation)
        outer = self.location
        # Functions of JAX that are jitted have no frames of those who call them.
        self.location = _jax.user_location(equation.source_info) or outer
        jaxprs = [
            self.jaxpr(with_computed_tables(region.jaxpr, len(region.operands)))
            for region in regions
        ]
        self.location = outer
        empty = any(map(_without_elements, (*equation.invars, *equation.outvars)))
        same = all(new is old.jaxpr for new, old in zip(jaxprs, regions, strict=True))
        if same and not keys and not empty:
            return equation
        return equation.replace(
            invars=[self.operand(atom) for atom in equation.invars],
            outvars=[self.atom(atom) for atom in equation.outvars],
            params=with_jaxprs(self.carriers, equation, regions, jaxprs),
        )

    def call(self, equation: Any, definition: Callable[..., Sequence[Any]]) -> Any:
        """A call of what defines an equation's primitive."""
        # Arrays without elements are nobody's operands, since nothing makes them.
        operands = [a if _without_elements(a) else self.atom(a) for a in equation.invars]
        given = [atom for atom in operands if not _without_elements(atom)]
        # What is an operand twice is one: definitions may do the same to it once.
        unique = list({id(atom): atom for atom in given}.values())
        keeps = [not _without_elements(atom) for atom in equation.outvars]
        made = [atom for atom, kept in zip(equation.outvars, keeps, strict=True) if kept]

        def function(*values: Any) -> list[Any]:
            known = {id(atom): value for atom, value in zip(unique, values, strict=True)}
            every = [known[id(a)] if id(a) in known else _Empty(a.aval) for a in operands]
            with _jax.location_of_equation(equation):
                found = definition(*every, **equation.params)
            return [one for one, kept in zip(found, keeps, strict=True) if kept]

        traced, _ = _jax.trace_to_jaxpr(function, [atom.aval for atom in unique])
        return equation.replace(
            primitive=primitives.closed_call_p,
            invars=unique,
            outvars=[self.atom(atom) for atom in made],
            # Definitions may be made of primitives that have definitions.
            params={"call_jaxpr": self.jaxpr(traced)},
            effects=traced.effects,
        )


def _used(jaxpr: Any) -> set[Any]:
    """The variables that are operands of a jaxpr's equations, or its results."""
    return _variables(itertools.chain(jaxpr.outvars, *(one.invars for one in jaxpr.eqns)))


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, _jax.Literal)}


def _call(
    equation: Any, function: Callable[..., Sequence[Any]], operands: Sequence[Any], result: Any
) -> Any:
    """A call of a function without effects at an equation's place."""
    traced, _ = _jax.trace_to_jaxpr(function, [atom.aval for atom in operands])
    return equation.replace(
        primitive=primitives.closed_call_p,
        invars=list(operands),
        outvars=[result],
        params={"call_jaxpr": traced},
        effects=traced.effects,
    )


class _Empty:
    """Stands for an array without elements."""

    def __init__(self, aval: Any):
        self.aval = aval
        self.shape, self.dtype = aval.shape, aval.dtype


def _of_keys(equation: Any) -> Callable[..., Sequence[Any]]:
    """An equation that works on keys, on their words."""
    from pallasite_std.definitions.random import OF_KEYS

    primitive = equation.primitive
    function = OF_KEYS.get(primitive)
    if function is not None:
        return functools.partial(function, key=equation.invars[0].aval)

    def each_word(*operands: Any, **params: Any) -> Sequence[Any]:
        axes = [-1 if _is_key(atom) else None for atom in equation.invars]
        mapped = jax.vmap(lambda *one: primitive.bind(*one, **params), axes, -1)
        found = mapped(*operands)
        return list(found) if primitive.multiple_results else [found]

    return each_word
