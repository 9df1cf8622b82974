"""The language of GPU kernels: ``from pallasite import gpu as plgpu``.

The names of the core come from ``pallasite.language``, all others from plugins: primitives,
pipelines, the matrix instructions of a hardware generation. Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from pallasite import forks
from pallasite.errors import MissingNameError, PluginError
from pallasite.known_plugins import provider


def __getattr__(name: str) -> Any:
    path = _public_names().get(name)
    if path is not None:
        with forks.unforked():
            value = _resolve(path)
        globals()[name] = value
        return value
    if name.startswith("__"):
        raise AttributeError(f"module 'pallasite.gpu' has no attribute {name!r}")
    from pallasite import plugins

    if name in plugins.manager().paths("names"):
        importlib.import_module("pallasite.runtime.registration")
        return plugins.manager().name(name)
    space = plugins.manager().memory_spaces().get(name)
    if space is not None:
        return space
    import difflib

    close = difflib.get_close_matches(name, __dir__(), n=3)
    hint = plugins.manager().remedy("names", name)
    if close and provider("names", name) is None:
        hint = f"did you mean {' or '.join(close)}?" + (f" Or: {hint}" if hint else "")
    raise MissingNameError(f"pallasite.gpu has no name {name!r}", hint=hint)


def __dir__() -> list[str]:
    from pallasite import plugins

    own, spaces = _public_names(), plugins.manager().memory_spaces()
    return sorted({*own, *plugins.manager().paths("names"), *spaces})


def _public_names() -> dict[str, str]:
    names: dict[str, str] = importlib.import_module("pallasite.language").PUBLIC_NAMES
    return names


def _resolve(path: str) -> Any:
    importlib.import_module("pallasite.runtime.registration")  # Whoever has a name can run kernels.
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        raise PluginError(f"{path} does not exist: {error}") from error
