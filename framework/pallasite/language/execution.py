"""What compiles and runs kernels, for the language, which is an earlier layer than the runtime.

The runtime registers itself when :mod:`pallasite.runtime.registration` is imported; the packages
that users import, ``pallasite`` and ``pallasite.gpu``, do that before they hand out a name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from pallasite.errors import InternalError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """What the language asks of a runtime.

    Attributes:
      lower_kernel_call: ``lower_kernel_call(ctx, *operands, spec=, platform=)`` is the lowering
        rule of ``kernel_call_p``; ``platform`` is None where it is that of the program.
      kernel_errors: makes a context in which what a kernel raises comes out as it is.
    """

    lower_kernel_call: Callable[..., Any]
    kernel_errors: Callable[[], contextlib.AbstractContextManager[None]]


_registered: Runtime | None = None


def register(runtime: Runtime) -> None:
    """Sets the runtime of this process; the last one that is registered serves."""
    global _registered
    _registered = runtime


def runtime(kernel: str) -> Runtime:
    """The registered runtime.

    Args:
      kernel: the name of the kernel that needs it, for the message.

    Raises:
      InternalError: none is registered.
    """
    if _registered is None:
        raise InternalError(
            f"kernel {kernel!r} is lowered, but no runtime is registered",
            hint="import pallasite.gpu, which registers the runtime, not only pallasite.language",
        )
    return _registered
