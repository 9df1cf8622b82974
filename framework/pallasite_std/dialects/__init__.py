"""Python classes of MLIR dialects that jaxlib's bindings have none for.

Without them the bindings look for a module of the dialect again whenever such an operation is
visited, which takes as long as translating dozens of others.
"""

from __future__ import annotations

from jaxlib.mlir.dialects._ods_common import _cext

_known = False


def register() -> None:
    """Tells MLIR's bindings that dialects are found here, too."""
    global _known
    if not _known:
        _cext.globals.append_dialect_search_prefix(__name__)
        _known = True
