"""Writes the API reference as Markdown pages, from the docstrings and signatures of public names.

Usage: ``python tools/make_api_docs.py [folder]``; the folder is ``build/docs/api`` by default.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import os
import pathlib
import pkgutil
import re
from collections.abc import Iterable
from typing import Any

import pallasite
from pallasite import cli, config, drawing, errors, gpu, hookspecs, launch, plugins
from pallasite import ops as operations
from pallasite import plugin as door
from pallasite.cli import entry as entry_point
from pallasite.lowering import recording

ROOT = pathlib.Path(__file__).resolve().parent.parent

BORROWED = (
    (pallasite.hookimpl, "Marks a function as the implementation of the hook of its name."),
    (
        gpu.Transform,
        "JAX's type of what is done to a reference: a view of it, or how its data lie in memory,"
        " such as :class:`TilingTransform`. For annotations.",
    ),
)
"""Names of other libraries, whose docstrings are about these libraries."""

LIBRARIES = ("pallasite_std.ops", "pallasite_hopper.ops")
"""Modules of plugins with functions for programs; their names for kernels are in pallasite.gpu."""


def main(folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes all pages into a folder and returns their paths."""
    pages = {
        "pallasite": module_page(pallasite, python_names()),
        "pallasite.gpu": module_page(gpu, dir(gpu)),
        "pallasite.ops": module_page(operations, dir(operations)),
        "pallasite.errors": module_page(errors, classes_of(errors)),
        "pallasite.launch": module_page(launch, classes_of(launch)),
        "pallasite.drawing": module_page(drawing, drawing.__all__),
        "pallasite.lowering.recording": module_page(
            recording, ["recording", "KernelLayouts", "SharedView", "Use"]
        ),
        **{name: library_page(name) for name in LIBRARIES if is_installed(name)},
        "hooks": module_page(hookspecs, [n for n in vars(hookspecs) if n.startswith("pallasite_")]),
        **{module.__name__: door_page(module) for module in door_modules()},
        "options": options_page(),
        "command-line": command_line_page(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    index = ["# API reference", "", f"Pallasite {pallasite.__version__}.", ""]
    index += [f"- [{name}]({name}.md)" for name in pages]
    written = []
    for name, text in {**pages, "index": "\n".join(index)}.items():
        path = folder / f"{name}.md"
        path.write_text(text.rstrip() + "\n")
        written.append(path)
    return written


def is_installed(name: str) -> bool:
    """Whether the plugin with this module is there."""
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def library_page(name: str) -> str:
    """A page about all public names of a plugin's module."""
    module = importlib.import_module(name)
    return module_page(module, module.__all__)


def door_modules() -> list[Any]:
    """The plugin door and its modules."""
    names = sorted(one.name for one in pkgutil.iter_modules(door.__path__))
    return [door, *(importlib.import_module(f"{door.__name__}.{name}") for name in names)]


def door_page(module: Any) -> str:
    """A page about a module of the plugin door, whose names come from all over the core.

    Names of JAX are listed; everything else has an entry, also constants and whole modules.
    """
    lines = [f"# {module.__name__}", "", as_markdown(inspect.getdoc(module) or ""), ""]
    borrowed, entries = [], []
    for name, (source, attribute) in sorted(imports_of(module).items()):
        value = getattr(module, name)
        if source == "pallasite._jax" and not is_own(value):
            borrowed.append(name)
        elif inspect.ismodule(value):
            entries += [f"## {name}", "", as_markdown(inspect.getdoc(value) or ""), ""]
            for function, one in vars(value).items():
                if is_own(one) and one.__module__ == value.__name__ and function[0] != "_":
                    text = [*declaration(function, one), as_markdown(documentation(one)), ""]
                    entries += [f"### {name}.{function}", "", *text]
        elif is_own(value):
            entries += entry(name, value)
        else:
            text = documented_data(source).get(attribute, "")
            entries += [f"## {name}", "", as_markdown(inspect.cleandoc(text)), ""]
    for name, text in documented_data(module.__name__).items():
        entries += [f"## {name}", "", as_markdown(inspect.cleandoc(text)), ""]
    if borrowed:
        names = ", ".join(f"`{name}`" for name in borrowed)
        lines += [f"Names of JAX, as JAX defines them: {names}.", ""]
    return "\n".join(lines + entries)


def is_own(value: Any) -> bool:
    """Whether something is a class or a function that Pallasite defines."""
    own = getattr(value, "__module__", "") or ""
    return own.startswith("pallasite") and (
        inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value))
    )


def imports_of(module: Any) -> dict[str, tuple[str, str]]:
    """Where a module of the door has its names from: module and attribute by name."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for alias in node.names:
                found[alias.asname or alias.name] = (node.module or "", alias.name)
    return found


def documented_data(module: str) -> dict[str, str]:
    """The texts of a module's constants and type aliases: the string after each, or the comment
    before it that begins with ``#:``."""
    source = inspect.getsource(importlib.import_module(module))
    body, lines = ast.parse(source).body, source.splitlines()
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        targets = {
            ast.Assign: lambda one: one.targets[0],
            ast.AnnAssign: lambda one: one.target,
            ast.TypeAlias: lambda one: one.name,
        }.get(type(node))
        target = targets(node) if targets else None
        if not isinstance(target, ast.Name):
            continue
        comment = lines[node.lineno - 2].strip()
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[target.id] = str(after.value.value)
        elif comment.startswith("#:"):
            found[target.id] = comment.removeprefix("#:").strip()
    return found


def python_names() -> list[str]:
    """The functions and classes of ``pallasite`` itself; errors have a page of their own."""
    names = [name for name in pallasite.__all__ if not inspect.ismodule(getattr(pallasite, name))]
    return [n for n in names if n != "__version__" and not hasattr(errors, n)]


def classes_of(module: Any) -> list[str]:
    """Names of the public classes that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
    ]


def module_page(module: Any, names: Iterable[str]) -> str:
    """A page about some names of a module."""
    names = list(names)
    lines = [f"# {module.__name__}", "", as_markdown(inspect.getdoc(module) or ""), ""]
    lines += [" ".join(f"[`{name}`](#{name.lower()})" for name in names), ""]
    for name in names:
        lines += entry(name, getattr(module, name))
    return "\n".join(lines)


def entry(name: str, value: Any) -> list[str]:
    """The heading, signature and docstring of one name, and of the methods of a class."""
    if isinstance(value, enum.Enum) and callable(value):
        call = type(value).__call__
        lines = [f"## {name}", "", *declaration(name, call.__get__(value))]
        lines += [f"A member of `{type(value).__name__}`. {as_markdown(documentation(call))}", ""]
        return lines
    lines = [f"## {name}", "", *declaration(name, value)]
    lines += [as_markdown(documentation(value)), ""]
    if not inspect.isclass(value):
        return lines
    if issubclass(value, enum.Enum):
        members = [member for member in value.__members__ if not member.startswith("_")]
        lines += ["Members: " + ", ".join(f"`{member}`" for member in members) + ".", ""]
    for method, function in vars(value).items():
        if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
            lines += [f"### {name}.{method}", "", *declaration(method, function)]
            lines += [as_markdown(documentation(function)), ""]
    return lines


def documentation(value: Any) -> str:
    """The docstring, or what stands for it where the name comes from another library."""
    return next((text for one, text in BORROWED if one is value), inspect.getdoc(value) or "")


def declaration(name: str, value: Any) -> list[str]:
    """The signature as a code block; nothing for what cannot be called."""
    if not callable(value) or (inspect.isclass(value) and issubclass(value, enum.Enum)):
        return []
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    parts = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p[:1] == "*" for p in parts):
            parts.append("*")
        # Annotations that are strings would be shown in quotes.
        parts.append(re.sub(r": (['\"])(.*?)\1(?= = |$)", r": \2", str(parameter)))
    text = f"{name}({', '.join(parts)})"
    if len(text) > 88:
        text = f"{name}(\n    " + ",\n    ".join(parts) + ",\n)"
    if not inspect.isclass(value) and signature.return_annotation is not inspect.Signature.empty:
        text += f" -> {inspect.formatannotation(signature.return_annotation).strip('\'"')}"
    return ["```python", text, "```", ""]


def as_markdown(text: str) -> str:
    """A docstring as Markdown: roles and double backquotes become code, sections become lists."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)  # the code below is indented
    lines = []
    in_section = False
    for line in text.splitlines():
        section = re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", line)
        member = re.fullmatch(r"  (\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)", line)
        if section:
            in_section = True
            lines += [f"**{section[1]}**", ""]
        elif in_section and member:
            lines.append(f"- `{member[1]}`: {member[2]}")
        elif in_section and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            in_section = in_section and (not line or line.startswith(" "))
            lines.append(line.removeprefix("  ") if in_section else line)
    return "\n".join(lines)


def options_page() -> str:
    """The table of configuration options, with those of the plugins."""
    plugins.registry()
    lines = ["# Options", "", as_markdown(inspect.getdoc(config) or ""), ""]
    lines += ["| option | variable | accepts | meaning |", "|---|---|---|---|"]
    for option in config.OPTIONS.values():
        fields = {field.name: getattr(option, field.name) for field in dataclasses.fields(option)}
        lines.append(
            f"| `{fields['name']}` | `{fields['variable']}` | {fields['accepts']} "
            f"| {fields['description']} |"
        )
    return "\n".join(lines)


def command_line_page() -> str:
    """The help texts of all subcommands."""
    os.environ["COLUMNS"] = "100"  # the width of what argparse prints
    lines = ["# Command line", "", as_markdown(inspect.getdoc(cli) or ""), ""]
    subparsers = entry_point.make_parser()._subparsers
    assert subparsers is not None
    (commands,) = subparsers._group_actions
    assert isinstance(commands.choices, dict)
    for name, parser in commands.choices.items():
        lines += [f"## pallasite {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    default = ROOT / "build" / "docs" / "api"
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=default)
    for page in main(parser.parse_args().folder):
        print(page)
