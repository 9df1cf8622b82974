"""Running compiled kernels: compilation through caches, launching from JAX, executors.

The names are imported when they are first used: registering the runtime imports none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "CacheInfo": "compiler",
    "CacheWarning": "store",
    "cache_info": "compiler",
    "clear_memory": "compiler",
    "compile": "api",
    "compile_all": "api",
    "compile_kernel": "compiler",
}

__all__ = [*_EXPORTS]  # noqa: PLE0604

if TYPE_CHECKING:
    from pallasite.runtime.api import compile as compile
    from pallasite.runtime.api import compile_all as compile_all
    from pallasite.runtime.compiler import CacheInfo as CacheInfo
    from pallasite.runtime.compiler import cache_info as cache_info
    from pallasite.runtime.compiler import clear_memory as clear_memory
    from pallasite.runtime.compiler import compile_kernel as compile_kernel
    from pallasite.runtime.store import CacheWarning as CacheWarning


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'pallasite.runtime' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pallasite.runtime.{module}"), name)
    globals()[name] = value
    return value
