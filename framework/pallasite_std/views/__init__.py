"""What views of memory mean: one module for each kind, with all that there is to say of it."""

from __future__ import annotations

from pallasite.plugin import ViewRule
from pallasite_std.views import clusters, dtypes, indexing, layouts, members

VIEW_RULES: tuple[ViewRule, ...] = (
    *indexing.RULES,
    *layouts.RULES,
    *members.RULES,
    *dtypes.RULES,
    *clusters.RULES,
)
"""The views of the standard library."""
