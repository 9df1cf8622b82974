"""The cache of compiled kernels on disk."""

from __future__ import annotations

import pathlib

from pallasite.runtime.store import CacheWarning as CacheWarning
from pallasite.runtime.store import SealedStore
from pallasite.stores import KERNELS


class DiskCache(SealedStore):
    """Compiled kernels, serialized, by the key of their content.

    Args:
      directory: the cache folder.
      max_bytes: the bound on the size of all entries together, if not the usual one.
    """

    def __init__(self, directory: pathlib.Path, max_bytes: int | None = None):
        super().__init__(directory, KERNELS, max_bytes)
