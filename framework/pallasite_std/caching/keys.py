"""What the core asks about kernels and code for the keys of its cache."""

from __future__ import annotations

from typing import Any

from pallasite_std.caching import environment, kernel_text


class CacheKeys:
    """The implementation ``"cache_keys"``; functions are looked up when they are called."""

    def canonical_parts(self, value: Any) -> list[str]:
        """See :func:`kernel_text.canonical_parts`."""
        return kernel_text.canonical_parts(value)

    def environment_text(self, *, assemble: bool, code: int | None = None) -> str:
        """See :func:`environment.environment_text`."""
        return environment.environment_text(assemble=assemble, code=code)

    def files_unchanged(self) -> bool:
        """See :func:`environment.files_unchanged`."""
        return environment.files_unchanged()

    def loaded_code(self) -> int:
        """See :func:`environment.loaded_code`."""
        return environment.loaded_code()


KEYS = CacheKeys()
