"""The operations of ``pallasite_hopper.ops`` by kernels that name their layouts, for comparison.

The kernels are those of the library in lane semantics: tilings, swizzles and the layouts of arrays
stand in the source. All around them is the library's own: configurations, tiles, padding.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

_LIBRARY = "pallasite_hopper.ops"

SOURCES = {
    "dense": (("dense.kernel", "dense"), ("dense.epilogue", "epilogue")),
    "mixed": (("mixed.kernel", "mixed"),),
    "ragged": (
        ("ragged.common", "ragged_common"),
        ("ragged.kernel", "ragged"),
        ("ragged.transposed_kernel", "transposed_ragged"),
    ),
    "forward": (("flash.forward", "forward"),),
    "backward": (
        ("flash.backward_tiles", "backward_tiles"),
        ("flash.backward_rows", "backward_rows"),
        ("flash.backward_worker", "backward_worker"),
    ),
    "decode": (("decode.kernel", "decode"), ("decode.combine", "combine")),
}
"""For each family of kernels, its modules in the library and here."""


def modules(family: str) -> tuple[list[ModuleType], list[ModuleType]]:
    """The modules of a family, in the library and here."""
    names = SOURCES[family]
    library = [importlib.import_module(f"{_LIBRARY}.{theirs}") for theirs, _ in names]
    return library, [importlib.import_module(f"{__name__}.{ours}") for _, ours in names]


def with_explicit_layouts[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function whose calls of the library's operations use the kernels of this folder.

    It has to be called anew, or traced: kernels that were made before stay what they are.
    """

    @functools.wraps(function)
    def explicit(*args: P.args, **kwargs: P.kwargs) -> R:
        with _replaced():
            return function(*args, **kwargs)

    return explicit


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, name, value in _replacements():
            target = importlib.import_module(f"{_LIBRARY}.{module}")
            stack.enter_context(mock.patch.object(target, name, value))
        yield


@functools.cache
def _replacements() -> tuple[tuple[str, str, Any], ...]:
    """What is put in the place of names in modules of the library."""
    from explicit_layouts import (
        backward_rows,
        backward_tiles,
        combine,
        decode,
        dense,
        forward,
        mixed,
        ragged,
        transposed_ragged,
    )
    from explicit_layouts.epilogue import Epilogue
    from pallasite_hopper.ops.decode import api as decode_api

    def matmul(problem: Any, config: Any, epilogue: Any, multiprocessors: int) -> Any:
        return dense.build(problem, config, Epilogue(**vars(epilogue)), multiprocessors)

    kept = functools.lru_cache(maxsize=256)
    return (
        ("dense.run", "_kernel", kept(matmul)),
        ("mixed.api", "_kernel", kept(mixed.build)),
        ("ragged.api", "kernel", ragged),
        ("ragged.api", "transposed_kernel", transposed_ragged),
        ("flash.api", "_kernel", kept(forward.build)),
        ("flash.backward", "backward_rows", backward_rows),
        ("flash.backward", "backward_tiles", backward_tiles),
        ("decode.api", "kernel", decode),
        ("decode.api", "combine", combine),
        ("decode.api", "_kernels", kept(decode_api._kernels.__wrapped__)),
    )
