"""Kernels that JAX publishes, with the GPU module that they import replaced by ours.

Their sources are read from the installed JAX; nothing of them is kept here.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

from stand_ins import StandIn

PACKAGE = "jax.experimental.pallas.ops.gpu"

_IMPORT = re.compile(
    r"^(import jax\.experimental\.pallas\.mosaic_gpu"
    r"|from jax\.experimental\.pallas import mosaic_gpu) as plgpu$",
    re.MULTILINE,
)


def load(
    name: str, *, lane_semantics: bool, replaced: Mapping[str, str] | None = None
) -> types.ModuleType:
    """A module of :data:`PACKAGE` that uses ``pallasite.gpu``.

    Args:
      name: of the module.
      lane_semantics: whether its kernels ask for lane semantics. Otherwise they ask for what they
        do in JAX, which is Warpgroup where nothing is said.
      replaced: parts of the source, each of which is there once, and what to put in their place.
    """
    spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
    assert spec is not None and spec.origin is not None
    path = pathlib.Path(spec.origin)
    return load_file(path, lane_semantics=lane_semantics, replaced=replaced)


def load_file(
    path: pathlib.Path, *, lane_semantics: bool, replaced: Mapping[str, str] | None = None
) -> types.ModuleType:
    """A file of JAX's, with kernels that use ``pallasite.gpu``; see :func:`load`."""
    text, count = _IMPORT.subn("from pallasite import gpu as plgpu", path.read_text())
    assert count == 1, f"{path} does not import the GPU module as expected"
    for old, new in (replaced or {}).items():
        assert text.count(old) == 1, f"{path} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    tree = ast.parse(text, str(path))
    changed = _Semantics(lane_semantics)
    changed.visit(tree)
    assert changed.count, f"{path} has no kernels"
    title = f"published_{path.stem}_{'lane' if lane_semantics else 'own'}"
    module = types.ModuleType(title)
    module.__file__ = str(path)
    sys.modules[title] = module  # Dataclasses look their module up.
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), module.__dict__)
    return module


class _Semantics(ast.NodeTransformer):
    """Sets the semantics in each call of ``CompilerParams``, or only where there are none; kernels
    without parameters of the compiler get some."""

    def __init__(self, lane: bool):
        self._lane = lane
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        given = any(one.arg in (None, "compiler_params") for one in node.keywords)
        if called == "kernel" and ast.unparse(node.func) == "plgpu.kernel" and not given:
            made = ast.parse("plgpu.CompilerParams()", mode="eval").body
            for part in ast.walk(made):
                ast.copy_location(part, node)
            node.keywords.append(ast.keyword("compiler_params", self.visit(made)))
            return node
        if called != "CompilerParams":
            return node
        self.count += 1
        others = [one for one in node.keywords if one.arg != "lowering_semantics"]
        if not self._lane and len(others) < len(node.keywords):
            return node
        wanted = "Lane" if self._lane else "Warpgroup"
        value = ast.parse(f"plgpu.LoweringSemantics.{wanted}", mode="eval").body
        for part in ast.walk(value):
            ast.copy_location(part, node)
        node.keywords = [*others, ast.keyword("lowering_semantics", value)]
        return node


def with_multiprocessors(module: types.ModuleType, count: int) -> dict[str, Any]:
    """What to set in a module of :data:`PACKAGE` for it to find a GPU of so many multiprocessors.

    Of the devices, these modules read nothing else.
    """
    device = types.SimpleNamespace(core_count=count)
    devices = {name: lambda: [device] for name in ("devices", "local_devices")}
    found: dict[str, Any] = {"jax": StandIn("jax", devices)}
    if hasattr(module, "backend"):
        found["backend"] = types.SimpleNamespace(get_default_device=lambda: device)
    return found
