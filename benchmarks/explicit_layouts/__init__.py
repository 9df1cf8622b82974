"""The operations of ``pallasite_hopper.ops`` by kernels that name their layouts, for comparison.

The kernels are those of the library in lane semantics: tilings, swizzles and the layouts of arrays
stand in the source. All around them is the library's own: configurations, tiles, padding. Only what
differs from the library's source is kept here, see ``sources.py``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from explicit_layouts import sources
from explicit_layouts.sources import LIBRARY, ORIGINALS

sources.install()

FAMILIES = {
    "dense": ("dense", "epilogue", "exchange"),
    "mixed": ("mixed", "exchange"),
    "ragged": ("ragged_common", "ragged", "transposed_ragged", "transposed_tiles"),
    "forward": ("forward",),
    "backward": ("backward_tiles", "backward_rows", "backward_worker"),
    "decode": ("decode", "combine"),
}
"""For each family of kernels, its modules here."""


def source_texts(family: str) -> tuple[list[str], list[str]]:
    """The sources of a family, in the library and here."""
    names = FAMILIES[family]
    library = [importlib.import_module(ORIGINALS[name]) for name in names]
    theirs = [pathlib.Path(str(one.__file__)).read_text() for one in library]
    return theirs, [sources.source(name) for name in names]


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
            target = importlib.import_module(f"{LIBRARY}.{module}")
            stack.enter_context(mock.patch.object(target, name, value))
        yield


@functools.cache
def _replacements() -> tuple[tuple[str, str, Any], ...]:
    """What is put in the place of names in modules of the library."""
    from explicit_layouts import (
        backward_rows,
        backward_tiles,
        decode,
        dense,
        forward,
        mixed,
        ragged,
        transposed_ragged,
        transposed_tiles,
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
        ("ragged.api", "transposed_tiles", transposed_tiles),
        ("flash.api", "_kernel", kept(forward.build)),
        ("flash.backward", "backward_rows", backward_rows),
        ("flash.backward", "backward_tiles", backward_tiles),
        ("decode.api", "kernel", decode),
        ("decode.api", "_kernel", kept(decode_api._kernel.__wrapped__)),
    )
