"""Kernels that JAX publishes, with the GPU module that they import replaced by ours.

Their sources are read from the installed JAX; nothing of them is kept here.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys
import types

PACKAGE = "jax.experimental.pallas.ops.gpu"

_IMPORT = re.compile(r"^import jax\.experimental\.pallas\.mosaic_gpu as plgpu$", re.MULTILINE)
_WARPGROUP = "plgpu.LoweringSemantics.Warpgroup"
_LANE = "plgpu.LoweringSemantics.Lane"


def load(name: str, *, lane_semantics: bool) -> types.ModuleType:
    """A module of :data:`PACKAGE` that uses ``pallasite.gpu``.

    Args:
      name: of the module.
      lane_semantics: whether to ask for lane semantics where the module asks for the other.
    """
    spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
    assert spec is not None and spec.origin is not None
    path = pathlib.Path(spec.origin)
    text, count = _IMPORT.subn("from pallasite import gpu as plgpu", path.read_text())
    assert count == 1, f"{path} does not import the GPU module as expected"
    if lane_semantics:
        assert _WARPGROUP in text
        text = text.replace(_WARPGROUP, _LANE)
    title = f"published_{name}_{'lane' if lane_semantics else 'own'}"
    module = types.ModuleType(title)
    module.__file__ = str(path)
    sys.modules[title] = module  # Dataclasses look their module up.
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module
