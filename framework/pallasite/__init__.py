"""Pallasite: a plugin-based compiler for GPU kernels written in JAX Pallas.

Kernel authors change one import line, ``from pallasite import gpu as plgpu``. Everything here is
loaded when it is first used: importing this package imports neither JAX nor any plugin. Plugins,
the standard library first, add names by the hook ``pallasite_exports``.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import TYPE_CHECKING, Any

from pallasite import config as config
from pallasite.forks import unforked as _unforked

__version__ = "0.2.0"

_imported = (time.time_ns(), time.monotonic_ns())
"""When this process may first have loaded code that compiles kernels, for the keys of caches."""

_SUBMODULES = ("config", "errors", "gpu", "ops", "plugins")

_BY_MODULE = {
    "codegen.compiled": "CompiledKernel",
    "errors": "CompilationError ConfigError ExecutionError InternalError InvalidTypeError"
    " InvalidValueError MissingNameError MissingRuleError PallasiteError PluginError ResourceError"
    " TargetError UnsupportedError",
    "extensions": "Executor Pass RuleSet Semantics",
    "hookspecs": "hookimpl",
    "language.params": "CompilerParams",
    "target_selection": "target",
    "runtime": "compile compile_all",
    "targets": "Target",
}
_EXPORTS = {
    name: f"pallasite.{module}" for module, names in _BY_MODULE.items() for name in names.split()
}

__all__ = ["__version__", *_SUBMODULES, *_EXPORTS]  # noqa: PLE0604

if TYPE_CHECKING:
    from pallasite import errors as errors
    from pallasite import gpu as gpu
    from pallasite import ops as ops
    from pallasite import plugins as plugins
    from pallasite.codegen.compiled import CompiledKernel as CompiledKernel
    from pallasite.errors import CompilationError as CompilationError
    from pallasite.errors import ConfigError as ConfigError
    from pallasite.errors import ExecutionError as ExecutionError
    from pallasite.errors import InternalError as InternalError
    from pallasite.errors import InvalidTypeError as InvalidTypeError
    from pallasite.errors import InvalidValueError as InvalidValueError
    from pallasite.errors import MissingNameError as MissingNameError
    from pallasite.errors import MissingRuleError as MissingRuleError
    from pallasite.errors import PallasiteError as PallasiteError
    from pallasite.errors import PluginError as PluginError
    from pallasite.errors import ResourceError as ResourceError
    from pallasite.errors import TargetError as TargetError
    from pallasite.errors import UnsupportedError as UnsupportedError
    from pallasite.extensions import Executor as Executor
    from pallasite.extensions import Pass as Pass
    from pallasite.extensions import RuleSet as RuleSet
    from pallasite.extensions import Semantics as Semantics
    from pallasite.hookspecs import hookimpl as hookimpl
    from pallasite.language.params import CompilerParams as CompilerParams
    from pallasite.runtime import compile as compile
    from pallasite.runtime import compile_all as compile_all
    from pallasite.target_selection import target as target
    from pallasite.targets import Target as Target


# Plugins declare options of their own when they are imported.
config.DECLARERS.append(lambda: importlib.import_module(f"{__name__}.plugins").manager().options())


def __getattr__(name: str) -> Any:
    with _unforked():
        return _find(name)


def _find(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"pallasite.{name}")
    module = _EXPORTS.get(name)
    if module is None:
        if name.startswith("_") or importlib.util.find_spec(f"pallasite.{name}") is not None:
            # Python asks for a submodule's name before it imports the submodule.
            raise AttributeError(f"module 'pallasite' has no attribute {name!r}")
        return importlib.import_module("pallasite.plugins").manager().named("exports", name)
    if module.startswith("pallasite.language"):
        importlib.import_module("pallasite.runtime.registration")  # Its kernels can run.
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    exports = importlib.import_module("pallasite.plugins").manager().paths("exports")
    return sorted({*__all__, *exports})
