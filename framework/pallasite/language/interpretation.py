"""Whether a kernel is interpreted: run on the CPU, whatever platform its program is for.

What users say of it, and the mode of a process, are the standard library's.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from pallasite import plugins


class Interpretation(Protocol):
    """The implementation ``"interpretation"``."""

    def params(self, interpret: Any) -> Any:
        """What ``kernel(interpret=...)`` means at a call: None, or parameters, which are hashable
        and say with ``detect_races`` whether the executor checks what it runs.

        Raises:
          InvalidTypeError: ``interpret`` is of another backend.
        """

    def understands(self, interpret: Any) -> bool:
        """Whether ``interpret`` is such parameters, rather than those of another backend."""


def interpretation() -> Interpretation:
    """How kernels are interpreted."""
    return cast(Interpretation, plugins.manager().implementation("interpretation"))
