"""The public names of ``jax.experimental.pallas.mosaic_gpu`` against those of ``pallasite.gpu``.

Each name is the same kind of thing, with the same parameters (names, order, kinds, defaults), the
same members, fields and methods; ours may have more optional parameters and members. A name that
belongs to a plugin that does not provide it yet raises an error that says which plugin that is.
``DIFFERENCES`` has all that is otherwise on purpose; docs/migrating.md lists the same.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import pathlib
import warnings
from typing import Any

import pytest
from jax.experimental.pallas import mosaic_gpu as upstream

from pallasite import gpu
from pallasite.errors import MissingNameError
from pallasite.known_plugins import provider

#: What differs on purpose: "name", "name(parameter)" or "name.attribute" -> the reason.
DIFFERENCES: dict[str, str] = {
    "CompilerParams": "what plugins take are keywords and attributes, but no fields",
    **{
        f"CompilerParams.profile_{name}": "an attribute of instances, not of the class"
        for name in ("bounds_check", "dir", "space", "trace_scope")
    },
    "BlockSpec.to_block_mapping": "called by Pallas only, which passes the context by keyword",
    "MemorySpace.__call__": "each space, those of plugins too, takes its own arguments by keyword",
    "MemorySpace.TMEM": "tensor memory, which the Blackwell plugin brings",
    "RefUnion.collective": "of unions in tensor memory only, which the Blackwell plugin makes",
    "RefUnion.layout": "of unions in tensor memory only, which the Blackwell plugin makes",
    "RefUnion": "no fields layout and collective, which are of tensor memory",
    **{
        f"Tiling.{method}": "arithmetic of layouts is in pallasite.layouts; a Tiling is plain data"
        for method in (
            *("canonicalize", "remove_dimension", "tile_dimension", "tile_indices"),
            *("tile_nested_shape_strides", "tile_shape", "tile_strides"),
            *("untile_indices", "untile_shape"),
        )
    },
}
#: Other names of the object that a method belongs to, which no call gives by name.
SELF = {("obj", "self"), ("self", "self")}
DEPRECATED = ("transpose_ref",)
NAMES = sorted({name for name in dir(upstream) if not name.startswith("_")} | {*DEPRECATED})
#: Names that may be missing as long as their plugin does not provide them.
PENDING_PLUGINS = ("blackwell", "multigpu")
DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "migrating.md"


def _get(module: Any, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(module, name)


def _ours(name: str) -> Any:
    owner = provider("names", name)
    if owner is None or owner.name not in PENDING_PLUGINS:
        return getattr(gpu, name)
    try:
        return getattr(gpu, name)
    except MissingNameError as error:
        assert f"plugin '{owner.name}'" in str(error), error
        pytest.skip(f"not in plugin {owner.name} yet")


def _kind(value: Any) -> str:
    """Classes whose members plugins add to are iterated over and indexed as enumerations are."""
    if inspect.isclass(value):
        return "enum" if hasattr(value, "__members__") else "class"
    for owner in reversed(type(value).__mro__):
        if value in getattr(owner, "__members__", {}).values():
            return f"member {owner.__name__}.{value.name}"
    return "function" if callable(value) else type(value).__name__


def _default(value: Any) -> Any:
    """A default in a form that can be compared between the two packages."""
    if value is inspect.Parameter.empty:
        return "required"
    if repr(value) in ("<not-specified>", "NotSpecified()") or value is None:
        return None
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return repr(value)
    return value


def _signature_differences(where: str, theirs: Any, ours: Any) -> list[str]:
    try:
        signature = inspect.signature(theirs)
    except (TypeError, ValueError):
        return []
    wanted = list(signature.parameters.values())
    given = list(inspect.signature(ours).parameters.values())
    found = []
    if wanted and given and (wanted[0].name, given[0].name) in SELF:
        wanted, given = wanted[1:], given[1:]
    for kinds in ("positional", "keyword"):
        names = [p.name for p in wanted if (p.kind is p.KEYWORD_ONLY) == (kinds == "keyword")]
        mine = [p.name for p in given if (p.kind is p.KEYWORD_ONLY) == (kinds == "keyword")]
        common = mine[: len(names)] if kinds == "positional" else [n for n in mine if n in names]
        if names != common:
            found.append(f"{where}: {kinds} parameters {names}, not {mine}")
    by_name = {p.name: p for p in given}
    for parameter in wanted:
        mine = by_name.get(parameter.name)
        if mine is None:
            continue
        label = f"{where}({parameter.name})"
        if mine.kind is not parameter.kind:
            found.append(f"{label}: {parameter.kind.description}, not {mine.kind.description}")
        if _default(mine.default) != _default(parameter.default):
            found.append(f"{label}: default {parameter.default!r}, not {mine.default!r}")
    theirs_names = {p.name for p in wanted}
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for parameter in given:
        optional = parameter.default is not parameter.empty or parameter.kind in variable
        if parameter.name not in theirs_names and not optional:
            found.append(f"{where}({parameter.name}): required here, unknown there")
    return found


def _members(cls: type) -> set[str]:
    # dir() of an enumeration leaves methods out.
    names = {name for base in cls.__mro__ for name in vars(base)} | {*dir(cls)}
    return {name for name in names if not name.startswith("_")}


def _class_differences(name: str, theirs: Any, ours: Any) -> list[str]:
    found = []
    if issubclass(theirs, enum.Enum):
        for member in theirs.__members__:
            if member not in ours.__members__:
                if getattr(provider("names", member), "name", None) in PENDING_PLUGINS:
                    continue
                found.append(f"{name}.{member}: missing member")
                continue
            value, mine = theirs[member].value, ours[member].value
            if (isinstance(value, str) or issubclass(theirs, int)) and value != mine:
                found.append(f"{name}.{member}: value {value!r}, not {mine!r}")
    elif dataclasses.is_dataclass(theirs):
        fields = [field.name for field in dataclasses.fields(theirs) if field.init]
        mine = [field.name for field in dataclasses.fields(ours) if field.init]
        if [field for field in mine if field in fields] != fields:
            found.append(f"{name}: fields {fields}, not {mine}")
        if theirs.__dataclass_params__.frozen and not ours.__dataclass_params__.frozen:
            found.append(f"{name}: is not frozen")
        if (theirs.__hash__ is None) != (ours.__hash__ is None):
            found.append(f"{name}: is hashable in one only")
    for attribute in sorted(_members(theirs)):
        if attribute in ("name", "value") and hasattr(ours, "__members__"):
            for member in ours.__members__.values():
                assert isinstance(getattr(member, attribute), str | int)
            continue
        if attribute not in _members(ours):
            found.append(f"{name}.{attribute}: missing")
            continue
        value = inspect.getattr_static(theirs, attribute)
        found_by_name = getattr(ours, "__members__", {})
        if attribute in found_by_name:
            continue
        mine = inspect.getattr_static(ours, attribute)
        if isinstance(value, property) != isinstance(mine, property):
            found.append(f"{name}.{attribute}: a property in one only")
        elif inspect.isclass(value) or inspect.isfunction(value):
            found += _signature_differences(f"{name}.{attribute}", value, mine)
    if "__call__" in vars(theirs):
        found += _signature_differences(f"{name}.__call__", theirs.__call__, ours.__call__)
    return found


def _is_on_purpose(difference: str) -> bool:
    return difference.partition(":")[0] in DIFFERENCES


def _differences(name: str, theirs: Any, ours: Any) -> list[str]:
    found = []
    if inspect.isclass(theirs):
        found += _class_differences(name, theirs, ours)
    if callable(theirs) and not isinstance(theirs, enum.Enum | enum.EnumMeta):
        found += _signature_differences(name, theirs, ours)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_name_is_the_same_thing(name: str) -> None:
    theirs, ours = _get(upstream, name), _ours(name)
    assert _kind(ours) == _kind(theirs)
    found = _differences(name, theirs, ours)
    assert [difference for difference in found if not _is_on_purpose(difference)] == []


def test_differences_are_there() -> None:
    """The table has nothing that is the same by now."""
    names = {difference.replace("(", ".").partition(".")[0] for difference in DIFFERENCES}
    found = {
        difference.partition(":")[0]
        for name in names
        for difference in _differences(name, _get(upstream, name), _ours(name))
    }
    assert found == set(DIFFERENCES)


def test_every_name_can_be_listed() -> None:
    listed = {*dir(gpu)}
    pending = {name for name in NAMES if getattr(provider("names", name), "name", None)}
    assert {name for name in NAMES if name not in listed} <= pending
    assert len(NAMES) > 90


def test_differences_are_documented() -> None:
    text = DOCUMENT.read_text()
    for difference in DIFFERENCES:
        assert f"`{difference}`" in text, difference
