"""A canonical text of a traced kernel: equal in every process for equal kernels.

Two kernels with the same text compile to the same PTX under the same compiler. The text holds the
jaxpr with its types, parameters and source lines, the mesh, the aliases, the compiler parameters.

* Variables, and objects that are compared by identity (such as an axis name that is an object), are
  numbered in the order of their appearance. Memory addresses never appear.
* Source lines are included, because the PTX carries them: moving a kernel to another line or file
  compiles it again.
* Dtypes, enumerations, arrays and dataclasses count by value, an identity-compared object by its
  class, its number and its attributes.
* A primitive counts by the module that has it, since several may have one name.
* A class counts by its qualified name if it is of a package whose code is part of the key (as of
  functions, see below), any other by its content: the code of its functions, and what these use.
* A Python function counts by its qualified name if it is a module-level function of JAX, NumPy,
  Pallasite or an enabled plugin that is installed, whose versions (and, where they are edited in
  place, sources) are part of every key. Any other function (a host callback, code that emits MLIR
  itself) makes the kernel unkeyable: such a kernel is compiled once in each process, and
  kept in memory only. Parameters that hold the derivative rules
  of a function are left out, since they do not affect the kernel.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from pallasite.plugin import SourceLocation, manager
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import KernelSpec, MemorySpace
from pallasite.plugin.runtime import Unkeyable

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,}\b")
_TRUSTED_MODULES = ("jax", "jaxlib", "numpy", "ml_dtypes", "pallasite")
_IGNORED_PARAMETERS: Mapping[str, frozenset[str]] = {
    "custom_jvp_call": frozenset({"jvp_jaxpr_fun", "symbolic_zeros"}),
    "custom_vjp_call": frozenset({"fwd_jaxpr_thunk", "bwd", "out_trees", "symbolic_zeros"}),
    "jit": frozenset(
        {
            "in_shardings",
            "out_shardings",
            "in_layouts",
            "out_layouts",
            "donated_invars",
            "ctx_mesh",
            "keep_unused",
            "compiler_options_kvs",
        }
    ),
}
"""Parameters of primitives that say nothing about the kernel's code."""


def fingerprint(spec: KernelSpec) -> str:
    """SHA-256, in hexadecimal, of the canonical text of a kernel.

    Raises:
      Unkeyable: the kernel holds something that cannot be compared between processes.
    """
    digest = hashlib.sha256()
    for part in canonical_parts(spec):
        digest.update(part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


def canonical_parts(value: Any) -> list[str]:
    """The canonical text of any value that can be in a kernel, in pieces.

    Raises:
      Unkeyable: the value cannot be compared between processes.
    """
    writer = _Writer()
    try:
        writer.write(value)
    except RecursionError:
        raise Unkeyable("values that contain themselves") from None
    return writer.parts


class _Writer:
    """Appends canonical text to ``parts``; numbers variables and objects as they appear."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # So that no address is used twice while writing.
        self._handlers: dict[type, Callable[[_Writer, Any], None]] = {}
        self._classes: set[type] = set()
        self._functions: set[Any] = set()
        self._primitives: dict[Any, str] = {}
        self._trusted: dict[Any, bool] = {}
        self._types: dict[Any, int] = {}
        self._trees: dict[Any, int] = {}

    def write(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind in _PLAIN or kind in (bool, type(Ellipsis)):
            self.parts.append(f"{kind.__name__} {value!r}")
            return
        handler = self._handlers.get(kind)
        if handler is None:
            handler = _handler(value)
            if not isinstance(value, _jax.Tracer):  # Of those, each may be another array.
                self._handlers[kind] = handler
        handler(self, value)

    def trusts(self, module: Any) -> bool:
        """Whether the code of a module is part of every key, or of Python's own library."""
        if module not in self._trusted:
            package = str(module).partition(".")[0]
            self._trusted[module] = package != "__main__" and (
                package in _TRUSTED_MODULES
                or package in sys.stdlib_module_names
                or package in manager().packages()
            )
        return self._trusted[module]

    def is_trusted_global(self, value: Any) -> bool:
        """Whether a callable is what its module, one that is trusted, has under its name."""
        module = getattr(value, "__module__", None) or ""
        if not hasattr(value, "__qualname__") or not self.trusts(module):
            return False
        found: Any = sys.modules.get(module)
        for part in value.__qualname__.split("."):
            found = getattr(found, part, None)
        return found is value

    def number(self, value: Any) -> tuple[int, bool]:
        """The number of an object, and whether it is new."""
        known = id(value) in self._numbers
        if not known:
            self._numbers[id(value)] = len(self._numbers)
            self._kept.append(value)
        return self._numbers[id(value)], not known

    def fields(self, kind: type, fields: Mapping[str, Any]) -> None:
        self.class_(kind)
        self.parts.append(f"{len(fields)}")
        for name in fields:
            self.parts.append(name)
            self.write(fields[name])

    def sequence(self, label: str, values: Any) -> None:
        values = list(values)
        self.parts.append(f"{label} {len(values)}")
        for value in values:
            self.write(value)

    def unordered(self, label: str, values: Any) -> None:
        """Values of a set, in the order of the text that each has on its own."""
        self.sequence(label, sorted(values, key=_sort_key))

    def mapping(self, value: Mapping[Any, Any]) -> None:
        self.parts.append(f"mapping {len(value)}")
        for key in sorted(value, key=_sort_key):
            self.write(key)
            self.write(value[key])

    def object(self, value: Any) -> None:
        """An object compared by identity, or one whose text says all."""
        kind = type(value)
        if callable(value) and self.is_trusted_global(value):
            self.function(value)
            return
        attributes = _attributes(value)
        if attributes is None:  # Implemented in C: what it holds is not visible.
            text = repr(value)
            if _ADDRESS.search(text):
                raise Unkeyable(f"{_qualified(kind)}: {text}")
            attributes = {"repr": text}
        if not _by_identity(kind):
            self.fields(kind, attributes)
            return
        number, new = self.number(value)
        self.parts.append(f"object {number}")
        if new:
            self.fields(kind, attributes)

    def class_(self, kind: type) -> None:
        """A class: its name, and where its code is not part of the key by itself, its content."""
        self.parts.append(f"class {_qualified(kind)}")
        if kind in self._classes or self.trusts(kind.__module__):
            return
        self._classes.add(kind)
        self.sequence("bases", kind.__bases__)
        if issubclass(kind, enum.Enum):
            self.sequence("members", [(m.name, m._value_) for m in kind])
        for name, value in sorted(vars(kind).items()):
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            if isinstance(value, functools.cached_property):
                value = value.func
            for one in (value.fget, value.fset) if isinstance(value, property) else (value,):
                if isinstance(one, types.FunctionType):
                    self.parts.append(name)
                    self.code(one)
                elif not (
                    name.startswith("_")
                    or type(one) is types.MemberDescriptorType
                    or isinstance(one, kind)  # As the members of an enumeration are.
                ):
                    self.parts.append(name)
                    self.write(one)

    def code(self, value: types.FunctionType) -> None:
        """A function of the program by its code, and what that refers to."""
        if value in self._functions or self.trusts(value.__module__):
            return
        self._functions.add(value)
        cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
        self.sequence("uses", [value.__defaults__, value.__kwdefaults__])
        for code in _codes(value.__code__):
            plain = [one for one in code.co_consts if not isinstance(one, types.CodeType)]
            self.sequence("code", [code.co_code, plain, code.co_names, code.co_varnames])
            cells += [value.__globals__[n] for n in code.co_names if n in value.__globals__]
        for one in cells:
            if isinstance(one, types.FunctionType):
                self.code(one)
            elif isinstance(one, types.ModuleType):
                if not self.trusts(one.__name__):
                    raise Unkeyable(f"code that uses the module {one.__name__}")
                self.parts.append(one.__name__)
            else:
                self.write(one)

    def primitive(self, value: Any) -> None:
        """A primitive: its name, and where the functions are that say what type its results have,
        since several primitives may have one name."""
        text = self._primitives.get(value)
        if text is None:
            state = (manager().generation(), value.abstract_eval, value.impl)
            then, text = _primitive_texts.get(value, (None, ""))
            if then != state:
                text = self._primitive(value)
                _primitive_texts[value] = state, text
            self._primitives[value] = text
        self.parts.append(text)

    def _primitive(self, value: Any) -> str:
        places = []
        for one in (*_functions_in(value.abstract_eval), *_functions_in(value.impl)):
            if not self.trusts(one.__module__):
                raise Unkeyable(f"the primitive {value.name} of the program itself")
            place = f"{one.__module__}.{one.__qualname__}:{one.__code__.co_firstlineno}"
            places.append(place)
        text = f"primitive {value.name} {places}"
        if _primitives.setdefault(text, value) is not value:
            raise Unkeyable(f"the primitive {value.name}, of which there are two")
        return text

    def number_of_class(self, value: Any) -> None:
        """A number or text of a class of its own, such as JAX's literals that have a dtype."""
        base = next(one for one in _PLAIN if isinstance(value, one))
        self.parts.append(f"{base.__name__} {base.__repr__(value)}")
        self.fields(type(value), _attributes(value) or {})

    def function(self, value: Any) -> None:
        name = f"{value.__module__}.{value.__qualname__}"
        if not self.is_trusted_global(value):
            raise Unkeyable(f"the Python function {name}")
        self.parts.append(f"function {name}")

    def partial(self, value: functools.partial[Any]) -> None:
        self.sequence("partial", [value.func, value.args, value.keywords])

    def array(self, value: Any) -> None:
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise Unkeyable("an array of Python objects")
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        self.parts.append(f"array {array.dtype.name} {array.shape} {content}")

    def tree(self, value: Any) -> None:
        # As for types, see :meth:`array_type`. What a node holds need not be hashable.
        try:
            found = self._trees.get(value)
        except (TypeError, ValueError):
            self._tree(value)
            return
        if found is None:
            self._tree(value)
            self._trees[value] = len(self._trees)
        else:
            self.parts.append(f"tree number {found}")

    def _tree(self, value: Any) -> None:
        node = value.node_data()
        if node is None:
            self.parts.append(f"tree {'leaf' if value.num_leaves else 'none'}")
            return
        self.parts.append(f"tree {_qualified(node[0])}")
        self.write(node[1])
        children = value.children()
        self.parts.append(f"children {len(children)}")
        for child in children:
            self._tree(child)

    def array_type(self, value: Any) -> None:
        if type(value) is not _jax.ShapedArray:
            self.object(value)
            return
        # By its parts where it appears first, then by a number: few types recur often.
        found = self._types.get(value)
        if found is not None:
            self.parts.append(f"type number {found}")
            return
        parts = [value.shape, value.dtype, bool(value.weak_type), value.memory_space]
        self.sequence("type", parts)
        self._types[value] = len(self._types)

    def dataclass(self, value: Any) -> None:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        self.fields(type(value), fields)

    def reference_type(self, value: Any) -> None:
        if type(value) is not _jax.AbstractRef:
            self.object(value)
            return
        self.sequence("reference", [value.inner_aval, value.memory_space, value.kind])

    def memory_space(self, value: MemorySpace) -> None:
        if dataclasses.is_dataclass(value):
            self.dataclass(value)
        else:
            self.class_(type(value))
            self.parts.append(value.name)

    def enumeration(self, value: Any) -> None:
        self.parts.append(f"member {value.name}")
        self.class_(type(value))

    def variable(self, value: Any) -> None:
        number, new = self.number(value)
        self.parts.append(f"variable {number}")
        if new:
            self.write(value.aval)

    def literal(self, value: Any) -> None:
        self.parts.append("literal")
        self.write(value.aval)
        self.write(value.val)

    def jaxpr(self, value: Any) -> None:
        # The constants of an inner jaxpr may be tracers left over; then operands take their place.
        self.sequence("jaxpr", [c for c in value.consts if not isinstance(c, _jax.Tracer)])
        self.sequence("constvars", value.constvars)
        self.sequence("invars", value.invars)
        self.parts.append(f"eqns {len(value.eqns)}")
        for equation in value.eqns:
            self.equation(equation)
        self.sequence("outvars", value.outvars)

    def equation(self, equation: Any) -> None:
        name = equation.primitive.name
        self.primitive(equation.primitive)
        self.parts.append(f"equation {_jax.name_stack(equation.source_info)}")
        location = _jax.user_location(equation.source_info)
        self.parts.append("" if location is None else f"{location}:{location.column}")
        for atom in equation.invars:
            # Most are known, which saves looking for how to write them.
            number = self._numbers.get(id(atom))
            if number is None or not isinstance(atom, _jax.Var):
                self.write(atom)
            else:
                self.parts.append(f"variable {number}")
        ignored = _IGNORED_PARAMETERS.get(name, frozenset())
        for key in sorted(equation.params):
            if key not in ignored:
                self.parts.append(key)
                self.write(equation.params[key])
        for variable in equation.outvars:
            self.parts.append("_") if isinstance(variable, _jax.DropVar) else self.variable(
                variable
            )

    def spec(self, spec: KernelSpec) -> None:
        self.parts.append(spec.name)
        self.sequence("avals", [spec.in_avals, spec.out_avals, spec.input_output_aliases])
        self.sequence("launch", [spec.mesh, spec.params, spec.location])
        self.jaxpr(spec.jaxpr)


def _sort_key(value: Any) -> str:
    return "\1".join(canonical_parts(value))


def _by_identity(kind: Any) -> bool:
    """Whether objects of a class are equal only to themselves."""
    return bool(kind.__eq__ is object.__eq__)


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions that it defines."""
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes(one)


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell  # It never is.
    except ValueError:
        return True


def _functions_in(value: Any, depth: int = 5) -> Iterator[types.FunctionType]:
    """The functions that a callable consists of: what it wraps, binds or closes over."""
    parts: list[Any] = []
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__]
    elif isinstance(value, types.FunctionType):
        yield value
        parts = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
    for one in parts if depth else ():
        yield from _functions_in(one, depth - 1)


_primitives: dict[str, Any] = {}
"""The first primitive in this process of each text."""

_primitive_texts: dict[Any, tuple[Any, str]] = {}
"""The texts of primitives, and what they depend on."""


def _attributes(value: Any) -> dict[str, Any] | None:
    """An object's attributes by name, sorted; None if its class does not say what they are."""
    attributes: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    visible = hasattr(value, "__dict__") or type(value) is object
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__")
        if slots is None:
            continue
        visible = True
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                attributes[slot] = getattr(value, slot)
    return dict(sorted(attributes.items())) if visible else None


_PLAIN = (int, float, complex, str, bytes)

_HANDLERS: tuple[tuple[Any, Callable[[_Writer, Any], None]], ...] = (
    (KernelSpec, _Writer.spec),
    (_jax.Jaxpr, _Writer.jaxpr),
    (_jax.Literal, _Writer.literal),
    (_jax.Var, _Writer.variable),
    (_jax.ShapedArray, _Writer.array_type),
    (_jax.AbstractRef, _Writer.reference_type),
    (SourceLocation, lambda w, v: w.parts.append(f"{v}:{v.column}")),
    (enum.Enum, _Writer.enumeration),
    # Before numbers: NumPy's are of Python's classes, too.
    ((np.ndarray, np.generic, jax.Array, _jax.TypedNdArray), _Writer.array),
    (_PLAIN, _Writer.number_of_class),
    (np.dtype, lambda w, v: w.parts.append(f"dtype {v.name} {v.str}")),
    (MemorySpace, _Writer.memory_space),
    (_jax.ExtendedDType, _Writer.object),
    (type, _Writer.class_),
    (functools.partial, _Writer.partial),
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType), _Writer.function),
    (_jax.Primitive, _Writer.primitive),
    (jax.tree_util.PyTreeDef, _Writer.tree),
    (tuple, lambda w, v: w.sequence(_qualified(type(v)), v)),
    (list, lambda w, v: w.sequence("list", v)),
    ((set, frozenset), lambda w, v: w.unordered("set", v)),
    (Mapping, _Writer.mapping),
)
"""How to write values of a class; the first that fits."""


def _handler(value: Any) -> Callable[[_Writer, Any], None]:
    """How to write a value, and others of its class."""
    for types_, write in _HANDLERS:
        if isinstance(value, types_):
            return write
    if dataclasses.is_dataclass(value) and not _by_identity(type(value)):
        return _Writer.dataclass
    return _Writer.object
