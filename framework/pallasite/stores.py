"""The parts of the cache folder, as plain records: what is kept on disk, under which names."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from pallasite.errors import InvalidValueError
from pallasite.resource import Count

Table = tuple[Sequence[str], Sequence[Sequence[object]]]
"""Headers and rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreNamespace:
    """One part of the folder that the option ``cache_dir`` names.

    There are two kinds. Entries of a *sealed* part are byte strings under keys of hexadecimal
    digits, one file each, with a header and a checksum. A part of *documents* has files that people
    can read: each is a JSON object with several entries under a name.

    Attributes:
      name: as in ``pallasite cache clear --only NAME``.
      noun: what one entry is, such as ``"kernel"``; ``nouns`` is several of them.
      version: of the content of entries; those of another version count as damaged.
      folder: where in the cache folder; ``""`` is the folder itself.
      suffix: of the files' names.
      documents: whether it is a part of documents.
      max_bytes: the bound on all files together; those that were not used for the longest time go
        first. None for no bound.
      max_entries: the bound on the entries of one document; those that were written first go first.
      valid: whether an entry of a document is one that this version can read.
      table: lists entries of documents for ``pallasite cache NAME``: headers and rows.
      empty: what that command says if there is no entry.
      overrides: names of plugins whose part of the same name this one replaces.
    """

    name: str
    noun: str
    nouns: str = ""
    version: int = 1
    folder: str = ""
    suffix: str = ".entry"
    documents: bool = False
    max_bytes: Count | None = None
    max_entries: Count | None = None
    valid: Callable[[Any], bool] | None = None
    table: Callable[[Sequence[Any]], Table] | None = None
    empty: str = ""
    overrides: tuple[str, ...] = ()
    plugin: str = ""

    def __post_init__(self) -> None:
        parts = pathlib.PurePath(self.folder).parts
        inside = not pathlib.PurePath(self.folder).is_absolute() and ".." not in parts
        if not inside or not re.fullmatch(r"\.[\w.-]+", self.suffix):
            raise InvalidValueError(
                f"part {self.name!r} of the cache folder is not within it",
                got=f"folder={self.folder!r}, suffix={self.suffix!r}",
                expected="a folder below it, and a suffix such as '.entry'",
            )

    def count(self, number: int) -> str:
        """A number of entries in words: ``3 kernels``."""
        return f"{number} {self.noun if number == 1 else self.nouns or self.noun + 's'}"


KERNELS = StoreNamespace(
    name="kernels", noun="kernel", suffix=".kernel", max_bytes=2**30, version=1
)
"""Compiled kernels."""
