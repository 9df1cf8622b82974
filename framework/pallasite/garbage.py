"""Compiling without the garbage collector, which would look through all of JAX again and again.

A compilation makes many objects, most of which stay: modules that are imported, and MLIR. What it
leaves is found by the first collection afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_blocks = 0
"""How many blocks threads are in."""
_enabled = False
"""Whether the collector was on before them."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within the block the garbage collector does not start by itself, in any thread."""
    global _blocks, _enabled
    with _lock:
        if not _blocks:
            _enabled = gc.isenabled()
            gc.disable()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _enabled and not _blocks:
                gc.enable()
