"""What the standard library offers to other plugins: its primitives, and how it plans copies.

Together with ``pallasite.plugin`` this is all that a plugin imports that builds on the standard
library; its other modules may change at any time.
"""

from __future__ import annotations

from pallasite_std.barriers.types import Barrier as Barrier
from pallasite_std.barriers.types import ClusterBarrier as ClusterBarrier
from pallasite_std.copies import tensor_copies as tensor_copies
from pallasite_std.memory_events import ASYNC as ASYNC
from pallasite_std.primitives import barriers as barriers
from pallasite_std.primitives import copies as copies
from pallasite_std.primitives import inline as inline
from pallasite_std.primitives.copies import copy_gmem_to_smem_p as copy_gmem_to_smem_p
from pallasite_std.rules import copies as _copy_rules

copy_rules = _copy_rules
"""The lowering rules of copies, and what they are made of."""
