"""The compiler parameters of the standard library: what a kernel gives with ``plugin_options``."""

from __future__ import annotations

import dataclasses

from pallasite.plugin import option


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """``CompilerParams(plugin_options={"standard": {...}})``.

    Attributes:
      partial_outputs: whether the kernel may leave elements of its outputs unwritten, of which
        nothing is promised: executors that look for unwritten outputs do not object.
    """

    partial_outputs: bool = option(
        False, "whether elements of outputs may be left unwritten, which else is an error"
    )
