"""The CPU's floating-point mode while kernels are simulated."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
from collections.abc import Iterator
from typing import Any

_LARGEST = 64
"""No fewer bytes than any C library's ``fenv_t`` has."""


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(ctypes.util.find_library("m"))


@contextlib.contextmanager
def exact_floats() -> Iterator[None]:
    """Makes this thread compute with subnormal numbers and round to the nearest.

    XLA runs callbacks on threads of its own, for which it has subnormals flushed to zero.
    """
    saved = ctypes.create_string_buffer(_LARGEST)
    library = _library()
    library.fegetenv(saved)
    # FE_DFL_ENV of C: a pointer of value -1 in glibc and musl.
    library.fesetenv(ctypes.c_void_p(-1))
    try:
        yield
    finally:
        library.fesetenv(saved)
