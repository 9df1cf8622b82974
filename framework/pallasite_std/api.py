"""What the standard library offers to other plugins: its primitives, and how it plans copies.

Together with ``pallasite.plugin`` this is all that a plugin imports that builds on the standard
library; its other modules may change at any time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pallasite_std.barriers.types import Barrier as Barrier
from pallasite_std.barriers.types import ClusterBarrier as ClusterBarrier
from pallasite_std.ops.arguments import check_config as check_config
from pallasite_std.ops.arguments import float_dtype as float_dtype
from pallasite_std.ops.arguments import is_portable_config as is_portable_config
from pallasite_std.ops.arguments import positive as positive
from pallasite_std.ops.arguments import random_array as random_array
from pallasite_std.ops.arguments import whole_numbers as whole_numbers
from pallasite_std.ops.decode.arguments import DecodeAccepted as DecodeAccepted
from pallasite_std.ops.decode.arguments import DecodeOptions as DecodeOptions
from pallasite_std.ops.decode.arguments import DecodeProblem as DecodeProblem
from pallasite_std.ops.decode.arguments import PageLayout as PageLayout
from pallasite_std.ops.decode.arguments import decode_call as decode_call
from pallasite_std.ops.decode.arguments import paged_call as paged_call
from pallasite_std.ops.dense.arguments import matmul_call as matmul_call
from pallasite_std.ops.dense.epilogue import Epilogue as Epilogue
from pallasite_std.ops.dense.gradient import differentiable_product as differentiable_product
from pallasite_std.ops.dense.problem import MatmulCall as MatmulCall
from pallasite_std.ops.dense.problem import MatmulProblem as MatmulProblem
from pallasite_std.ops.flash.arguments import AttentionCall as AttentionCall
from pallasite_std.ops.flash.arguments import attention_call as attention_call
from pallasite_std.ops.flash.gradient import differentiable_attention as differentiable_attention
from pallasite_std.ops.mixed.arguments import MixedProblem as MixedProblem
from pallasite_std.ops.mixed.arguments import mixed_call as mixed_call
from pallasite_std.ops.padding import aligned as aligned
from pallasite_std.ops.padding import padded as padded
from pallasite_std.ops.padding import padded_columns as padded_columns
from pallasite_std.ops.padding import whole_vector as whole_vector
from pallasite_std.ops.ragged.arguments import ragged_call as ragged_call
from pallasite_std.ops.ragged.arguments import transposed_ragged_call as transposed_ragged_call
from pallasite_std.ops.ragged.gradient import differentiable_ragged as differentiable_ragged
from pallasite_std.ops.softmax import LOG2_E as LOG2_E
from pallasite_std.ops.softmax import broadcast_rows as broadcast_rows
from pallasite_std.ops.softmax import cap as cap
from pallasite_std.ops.softmax import lowest as lowest
from pallasite_std.primitives import arguments as arguments
from pallasite_std.primitives import barriers as barriers
from pallasite_std.primitives import cluster_launch as cluster_launch
from pallasite_std.primitives import copies as copies
from pallasite_std.primitives import inline as inline
from pallasite_std.primitives.copies import copy_gmem_to_smem_p as copy_gmem_to_smem_p
from pallasite_std.primitives.copy_options import CopyPartition as CopyPartition
from pallasite_std.primitives.copy_options import Partitioned as Partitioned
from pallasite_std.primitives.layouts import SomeLayout as SomeLayout
from pallasite_std.primitives.layouts import layout_cast as layout_cast

if TYPE_CHECKING:
    from pallasite_std.copies import tensor_copies as tensor_copies
    from pallasite_std.copies.tensor_map_encoding import encode as encode
    from pallasite_std.host_calls import kernel_errors as kernel_errors
    from pallasite_std.host_calls import run_on_host as run_on_host
    from pallasite_std.memory.divisibility import known_divisor as known_divisor
    from pallasite_std.memory.reference_types import DynamicOffset as DynamicOffset
    from pallasite_std.memory.reference_types import MemoryReference as MemoryReference
    from pallasite_std.memory.references import index_reference as index_reference
    from pallasite_std.memory.regions import MemoryRegion as MemoryRegion
    from pallasite_std.memory.regions import memory_region as memory_region
    from pallasite_std.memory_events import ASYNC as ASYNC
    from pallasite_std.rules import cluster_launch as _cluster_launch_rules
    from pallasite_std.rules import copies as _copy_rules

    cluster_launch_rules = _cluster_launch_rules
    """What rules of cluster launch control check."""

    copy_rules = _copy_rules
    """The lowering rules of copies, and what they are made of."""

_LAZY = {
    "cluster_launch_rules": ("pallasite_std.rules.cluster_launch", ""),
    "known_divisor": ("pallasite_std.memory.divisibility", "known_divisor"),
    "tensor_copies": ("pallasite_std.copies.tensor_copies", ""),
    "encode": ("pallasite_std.copies.tensor_map_encoding", "encode"),
    "DynamicOffset": ("pallasite_std.memory.reference_types", "DynamicOffset"),
    "MemoryReference": ("pallasite_std.memory.reference_types", "MemoryReference"),
    "kernel_errors": ("pallasite_std.host_calls", "kernel_errors"),
    "run_on_host": ("pallasite_std.host_calls", "run_on_host"),
    "MemoryRegion": ("pallasite_std.memory.regions", "MemoryRegion"),
    "memory_region": ("pallasite_std.memory.regions", "memory_region"),
    "index_reference": ("pallasite_std.memory.references", "index_reference"),
    "ASYNC": ("pallasite_std.memory_events", "ASYNC"),
    "copy_rules": ("pallasite_std.rules.copies", ""),
}
"""What only lowering needs, which a kernel that is in the cache does without: imported when it is
asked for."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        path, attribute = _LAZY[name]
        module = importlib.import_module(path)
        found = globals()[name] = getattr(module, attribute) if attribute else module
        return found
