"""What plugins hand over, checked where it comes in: fields of records, and what functions return.

The types are those that the records' annotations say. A function of a plugin that is not part of
Pallasite itself is called through a guard, so that whatever it does wrong is its plugin's error.
"""

from __future__ import annotations

import collections.abc
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast, get_args

from pallasite.errors import InternalError, PallasiteError, PluginError
from pallasite.extensions import LayoutUse, Stage

_MANY = 100_000
"""More entries than any plugin has; an iterable that goes on is endless."""

_ALIASES = {
    "Table": "tuple[Any, Any]",
    "Stage": f"Literal{list(get_args(Stage))}",
    "LayoutUse": f"Literal{list(get_args(LayoutUse))}",
}
_ABSTRACT = {
    "AbstractContextManager": contextlib.AbstractContextManager,
    "Hashable": collections.abc.Hashable,
    "Iterable": collections.abc.Iterable,
    "Mapping": collections.abc.Mapping,
    "Sequence": collections.abc.Sequence,
}
_CONTAINERS = {"Iterable", "Sequence", "frozenset", "list", "tuple"}
_RESULTS = {
    ("LoweringRule", "result_layouts"): "Sequence[Layout | None]",
    ("ResourceRule", "function"): "Resources",
    ("LayoutRule", "function"): "Sequence[Any]",
    ("InstructionRule", "bind"): "Callable[..., Any]",
    ("Executor", "run"): "Sequence[Any]",
}
"""What functions return whose annotation leaves it open, since each kind of rule has its own."""

PARTS = {
    "cache_keys": {
        "canonical_parts": "Sequence[str]",
        "environment_text": "str",
        "files_unchanged": "bool",
        "loaded_code": "int",
    },
    "interpretation": {"params": "None | detect_races", "understands": "bool"},
    "layout_costs": dict.fromkeys(("access", "conversion", "copies"), "float | int"),
}
"""What functions of implementations return that the core itself asks."""

_UNGUARDED = {
    ("Executor", "available"),
    ("NamedLayout", "specification"),  # Programs give its arguments.
    ("Pass", "run"),
}
"""Functions whose callers say themselves whose they are, and what is to be done."""

_LIBRARIES = tuple(
    path + os.sep
    for path in (
        os.path.dirname(os.path.abspath(__file__)),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    )
)

_EMITTING = "LoweringRule Translation ViewRule KernelLifecycle BarrierKind BarrierOrder ProxyFence"
"""The records that have functions which emit code."""

NOTED: contextvars.ContextVar[dict[str, bool] | None] = contextvars.ContextVar(
    "noted", default=None
)
"""Whose code, other than Pallasite's own, had a part in the kernel that is being compiled, the
latest last, and whether it may have emitted something."""


def note_code(what: str, emits: bool = True) -> None:
    """Notes that code which did not come with Pallasite has a part in the kernel."""
    if (noted := NOTED.get()) is not None:
        noted[what] = noted.pop(what, False) or emits


def fits(value: Any, annotation: str) -> bool:
    """Whether a value is what an annotation says, as far as that can be told by looking."""
    if annotation[:9] == "Callable[" and callable(value):
        return True
    annotation = _ALIASES.get(annotation.strip(), annotation.strip())
    parts = _split(annotation, "|")
    if len(parts) > 1:
        return any(fits(value, part) for part in parts)
    name, _, inner = annotation.rstrip("]").partition("[")
    arguments = _split(inner, ",") if inner else ()
    if name in ("Any", "object"):
        return True
    if name == "None":
        return value is None
    if name == "Callable":
        return callable(value)
    if name == "Count":
        return fits(value, "int") and bool(value >= 0)
    if name == "detect_races":
        return isinstance(getattr(value, name, None), bool)
    if name == "Literal":
        return isinstance(value, str) and value in re.findall(r"[\w]+", inner)
    if name == "type":
        return isinstance(value, type)
    if name in _ABSTRACT and isinstance(value, str | bytes):
        return False
    if name in _ABSTRACT:
        found = isinstance(value, _ABSTRACT[name])
    else:
        found = any(kind.__name__ == name for kind in type(value).__mro__)
        found = found and not (name == "int" and isinstance(value, bool))
    if not found or not arguments:
        return found and (wrong_field(value) is None)
    if name == "Mapping":
        pairs = value.items()
        return all(fits(k, arguments[0]) and fits(v, arguments[1]) for k, v in pairs)
    if name == "tuple" and arguments[-1] != "...":
        sizes = len(value) == len(arguments)
        return sizes and all(map(fits, value, arguments))
    return name not in _CONTAINERS or all(fits(one, arguments[0]) for one in value)


def wrong_field(record: Any) -> tuple[str, str] | None:
    """The first field of a record whose value is none that its annotation says; and that."""
    package, _, module = type(record).__module__.partition(".")
    if (
        not dataclasses.is_dataclass(record)
        or package != "pallasite"
        or ("." in module and type(record).__name__ != "Resources")
    ):
        return None  # It is none of the records that hooks return, or that these hold.
    for field in dataclasses.fields(record):
        annotation = str(field.type)
        if not fits(getattr(record, field.name), annotation):
            return field.name, annotation
    return None


@functools.lru_cache(maxsize=1024)  # There are some dozens.
def _split(text: str, separator: str) -> tuple[str, ...]:
    """The parts of an annotation between separators that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return tuple(part.strip() for part in parts)


def entries(value: Iterable[Any]) -> tuple[Any, ...]:
    """What an iterable has, which must end."""
    found = tuple(itertools.islice(value, _MANY + 1))
    if len(found) > _MANY:
        raise ValueError(f"an iterable with more than {_MANY} entries")
    return found


def guarded(record: Any, plugin: str, hook: str, own: bool = True) -> Any:
    """A record of a plugin whose functions are called through guards.

    Args:
      record: what the hook returned, or one of several.
      plugin: the plugin's name and distribution, for messages.
      hook: the hook's name.
      own: whether the plugin comes with Pallasite.
    """
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return record
    kind, guards = type(record).__name__, dict[str, Any]()
    for field in dataclasses.fields(record):
        value, annotation = getattr(record, field.name), str(field.type)
        if (kind, field.name) in _UNGUARDED:
            continue
        functions = [one for one in _split(annotation, "|") if one.startswith("Callable[")]
        if functions and callable(value):
            last = _split(functions[0].removeprefix("Callable[").rpartition("]")[0], ",")[-1]
            result = _RESULTS.get((kind, field.name), last)
            what = f"{hook} of plugin {plugin}: {field.name} of {_called(record)}"
            emits = kind in _EMITTING.split() and field.name != "applies"
            guards[field.name] = Guard(value, what, result, None if own else emits)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            guards[field.name] = guarded(value, plugin, hook, own)
    return dataclasses.replace(record, **guards) if guards else record


def _called(record: Any) -> str:
    for name in ("name", "primitive", "operation", "transform", "title", "dtype"):
        if getattr(record, name, None) is not None:
            return f"{type(record).__name__} {str(getattr(record, name))!r}"
    return type(record).__name__


class GuardedPart:
    """What a plugin has for a part that the core leaves to it, with functions behind guards."""

    def __init__(self, part: Any, what: str, name: str):
        self._part, self._what, self._results = part, what, PARTS[name]

    def __getattr__(self, name: str) -> Any:
        function: Any = getattr(self._part, name, None)
        guard = Guard(function, f"{self._what}: {name}", self._results.get(name, "Any"))
        return guard if name in self._results else function


class Guard:
    """A function of a plugin; equal to it, and to those that guard the same one.

    Attributes:
      what: whose it is, and of what.
    """

    def __init__(
        self, function: Callable[..., Any], what: str, result: str, emits: bool | None = None
    ):
        functools.update_wrapper(self, function)
        self._function, self._result = function, result
        self.what, self._emits = what, emits

    def __eq__(self, other: object) -> bool:
        return bool(getattr(other, "_function", other) == self._function)

    def __hash__(self) -> int:
        return hash(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._emits is not None:
            note_code(self.what, self._emits)
        try:
            value = self._function(*args, **kwargs)
            if self._result.startswith("Iterable[") and not isinstance(value, str | Mapping):
                value = entries(value)
        except PallasiteError as error:
            if isinstance(error, InternalError):  # Of what the plugin did, more likely than not.
                error.message += f", in {self.what}"
            raise
        except KeyboardInterrupt as error:
            error.add_note(f"in {self.what}")
            raise
        except (Exception, SystemExit) as error:
            if _is_of_program(error, self._function):
                raise
            failure = f"{type(error).__name__}: {error}"
            raise PluginError(
                f"{self.what} failed: {failure}", hint="report it to the plugin's authors"
            ) from error
        if self._result == "None" or fits(value, self._result):
            return value
        raise wrong_value(self.what, value, self._result)


def wrong_value(what: str, value: Any, expected: str) -> PluginError:
    """The error for a value that a function of a plugin returned."""
    field = wrong_field(value)
    got = repr(value) if field is None else f"{field[0]}={getattr(value, field[0])!r} in {value!r}"
    return PluginError(
        f"{what} returned the wrong thing",
        got=got if len(got) < 500 else got[:500] + " ...",
        expected=expected if field is None else f"{field[0]}: {field[1]}",
    )


def check_layouts(rule: Any, function: Any, layouts: Sequence[Any], avals: Sequence[Any]) -> None:
    """Refuses what a function of a plugin's rule returned, unless it has a layout of its shape, or
    None, for each of some arrays."""
    shapes = [getattr(aval, "shape", ()) for aval in avals]
    if len(layouts) != len(avals) or any(
        one is not None and getattr(one, "shape", None) != shape
        for one, shape in zip(layouts, shapes, strict=True)
    ):
        what = getattr(function, "what", f"{_called(rule)} of plugin {rule.plugin!r}")
        raise wrong_value(what, layouts, f"a layout or None for arrays of shapes {shapes}")


def _is_of_program(error: BaseException, function: Any) -> bool:
    """Whether code of the program raised an exception, which the plugin's function called."""
    code = getattr(cast(Any, function), "__code__", None)
    own = str(pathlib.Path(code.co_filename).parent) + os.sep if code is not None else ""
    files: Sequence[str] = [
        frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    last = next((one for one in reversed(files) if not one.startswith("<")), "")
    return not last.startswith((*_LIBRARIES, *([own] if own else []))) and bool(last)
