"""What the standard library offers to other plugins: its primitives, and how it plans copies.

Together with ``pallasite.plugin`` this is all that a plugin imports that builds on the standard
library; its other modules may change at any time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallasite_std.barriers.base import BarrierAllocation as BarrierAllocation
    from pallasite_std.barriers.base import BarrierDType as BarrierDType
    from pallasite_std.barriers.base import is_barrier as is_barrier
    from pallasite_std.barriers.types import Barrier as Barrier
    from pallasite_std.barriers.types import ClusterBarrier as ClusterBarrier
    from pallasite_std.carried import CarriedValue as CarriedValue
    from pallasite_std.copies import tensor_copies as tensor_copies
    from pallasite_std.copies.tensor_map_encoding import encode as encode
    from pallasite_std.copies.tensor_map_types import element_code as element_code
    from pallasite_std.device_libraries import library_key as library_key
    from pallasite_std.device_libraries import link_library as link_library
    from pallasite_std.device_libraries import trimmed_library as trimmed_library
    from pallasite_std.host_calls import communicates as communicates
    from pallasite_std.host_calls import kernel_errors as kernel_errors
    from pallasite_std.host_calls import run_on_host as run_on_host
    from pallasite_std.memory import transfers as transfers
    from pallasite_std.memory.access import plan_access as plan_access
    from pallasite_std.memory.divisibility import known_divisor as known_divisor
    from pallasite_std.memory.matrix_starts import MatrixStep as MatrixStep
    from pallasite_std.memory.matrix_starts import check_matrix_starts as check_matrix_starts
    from pallasite_std.memory.places import places_of as places_of
    from pallasite_std.memory.proxies import acquire_stores as acquire_stores
    from pallasite_std.memory.reference_types import DynamicOffset as DynamicOffset
    from pallasite_std.memory.reference_types import Elsewhere as Elsewhere
    from pallasite_std.memory.reference_types import MemoryReference as MemoryReference
    from pallasite_std.memory.references import index_reference as index_reference
    from pallasite_std.memory.regions import MemoryRegion as MemoryRegion
    from pallasite_std.memory.regions import memory_region as memory_region
    from pallasite_std.memory_events import ASYNC as ASYNC
    from pallasite_std.ops.arguments import check_config as check_config
    from pallasite_std.ops.arguments import float_dtype as float_dtype
    from pallasite_std.ops.arguments import in_32_bits as in_32_bits
    from pallasite_std.ops.arguments import is_portable_config as is_portable_config
    from pallasite_std.ops.arguments import positive as positive
    from pallasite_std.ops.arguments import random_array as random_array
    from pallasite_std.ops.arguments import whole_numbers as whole_numbers
    from pallasite_std.ops.arguments import zeros as zeros
    from pallasite_std.ops.decode.arguments import DecodeAccepted as DecodeAccepted
    from pallasite_std.ops.decode.arguments import DecodeOptions as DecodeOptions
    from pallasite_std.ops.decode.arguments import DecodeProblem as DecodeProblem
    from pallasite_std.ops.decode.arguments import PageLayout as PageLayout
    from pallasite_std.ops.decode.arguments import decode_call as decode_call
    from pallasite_std.ops.decode.arguments import decoded as decoded
    from pallasite_std.ops.decode.arguments import paged_call as paged_call
    from pallasite_std.ops.dense.arguments import matmul_call as matmul_call
    from pallasite_std.ops.dense.arrangement import MATRIX as MATRIX
    from pallasite_std.ops.dense.arrangement import Batch as Batch
    from pallasite_std.ops.dense.arrangement import mapped_product as mapped_product
    from pallasite_std.ops.dense.epilogue import Epilogue as Epilogue
    from pallasite_std.ops.dense.gated import gated_product as gated_product
    from pallasite_std.ops.dense.gradient import differentiable_product as differentiable_product
    from pallasite_std.ops.dense.problem import MatmulCall as MatmulCall
    from pallasite_std.ops.dense.problem import MatmulProblem as MatmulProblem
    from pallasite_std.ops.flash import dropout as _dropout
    from pallasite_std.ops.flash.api import portable_gradients as portable_gradients
    from pallasite_std.ops.flash.arguments import AttentionCall as AttentionCall
    from pallasite_std.ops.flash.arguments import AttentionOptions as AttentionOptions
    from pallasite_std.ops.flash.arguments import Extras as Extras
    from pallasite_std.ops.flash.arguments import attention_call as attention_call
    from pallasite_std.ops.flash.arguments import attention_options as attention_options
    from pallasite_std.ops.flash.arguments import check_residuals as check_residuals
    from pallasite_std.ops.flash.arguments import in_whole_tiles as in_whole_tiles
    from pallasite_std.ops.flash.gradient import (
        differentiable_attention as differentiable_attention,
    )
    from pallasite_std.ops.flash.kernels import AttentionProblem as AttentionProblem
    from pallasite_std.ops.flash.kernels import AttentionView as AttentionView
    from pallasite_std.ops.flash.kernels import over_keys as over_keys
    from pallasite_std.ops.flash.kernels import over_queries as over_queries
    from pallasite_std.ops.flash.residuals import two_numbers as two_numbers
    from pallasite_std.ops.mixed.arguments import MixedProblem as MixedProblem
    from pallasite_std.ops.mixed.arguments import mixed_call as mixed_call
    from pallasite_std.ops.mixed.arguments import multiplied as multiplied
    from pallasite_std.ops.padding import aligned as aligned
    from pallasite_std.ops.padding import padded as padded
    from pallasite_std.ops.padding import padded_columns as padded_columns
    from pallasite_std.ops.padding import whole_vector as whole_vector
    from pallasite_std.ops.ragged.arguments import ragged_call as ragged_call
    from pallasite_std.ops.ragged.arguments import transposed_ragged_call as transposed_ragged_call
    from pallasite_std.ops.ragged.gradient import differentiable_ragged as differentiable_ragged
    from pallasite_std.ops.rows.gated import Activation as Activation
    from pallasite_std.ops.rows.gated import gated_activation as gated_activation
    from pallasite_std.ops.softmax import LOG2_E as LOG2_E
    from pallasite_std.ops.softmax import LOWEST as LOWEST
    from pallasite_std.ops.softmax import broadcast_rows as broadcast_rows
    from pallasite_std.ops.softmax import cap as cap
    from pallasite_std.ops.softmax import exponents as exponents
    from pallasite_std.ops.softmax import lowest as lowest
    from pallasite_std.ops.softmax import normalized as normalized
    from pallasite_std.primitives import arguments as arguments
    from pallasite_std.primitives import arrays as arrays
    from pallasite_std.primitives import barriers as barriers
    from pallasite_std.primitives import cluster_launch as cluster_launch
    from pallasite_std.primitives import copies as copies
    from pallasite_std.primitives import inline as inline
    from pallasite_std.primitives.copies import copy_gmem_to_smem_p as copy_gmem_to_smem_p
    from pallasite_std.primitives.copies import copy_smem_to_gmem_p as copy_smem_to_gmem_p
    from pallasite_std.primitives.copy_options import CopyPartition as CopyPartition
    from pallasite_std.primitives.copy_options import Partitioned as Partitioned
    from pallasite_std.primitives.layouts import SomeLayout as SomeLayout
    from pallasite_std.primitives.layouts import layout_cast as layout_cast
    from pallasite_std.primitives.semaphores import Coordinates as Coordinates
    from pallasite_std.primitives.semaphores import one_semaphore as one_semaphore
    from pallasite_std.rules import cluster_launch as _cluster_launch_rules
    from pallasite_std.rules import copies as _copy_rules
    from pallasite_std.rules import semaphores as _semaphore_rules
    from pallasite_std.rules.shape import same_layout_hint as same_layout_hint
    from pallasite_std.tuning.entries import device as device

    attention_dropout = _dropout
    """Which weights dropout keeps, in kernels."""

    cluster_launch_rules = _cluster_launch_rules
    """What rules of cluster launch control check."""

    copy_rules = _copy_rules
    """The lowering rules of copies, and what they are made of."""

    semaphore_rules = _semaphore_rules
    """How semaphores are signalled, and in which scope they order memory."""

_MODULES = {
    "attention_dropout": "ops.flash.dropout",
    "arguments": "primitives.arguments",
    "arrays": "primitives.arrays",
    "barriers": "primitives.barriers",
    "cluster_launch": "primitives.cluster_launch",
    "cluster_launch_rules": "rules.cluster_launch",
    "copies": "primitives.copies",
    "copy_rules": "rules.copies",
    "inline": "primitives.inline",
    "semaphore_rules": "rules.semaphores",
    "tensor_copies": "copies.tensor_copies",
    "transfers": "memory.transfers",
}

_NAMES = {
    "barriers.base": ("BarrierAllocation", "BarrierDType", "is_barrier"),
    "barriers.types": ("Barrier", "ClusterBarrier"),
    "carried": ("CarriedValue",),
    "copies.tensor_map_encoding": ("encode",),
    "device_libraries": ("library_key", "link_library", "trimmed_library"),
    "host_calls": ("communicates", "kernel_errors", "run_on_host"),
    "memory.access": ("plan_access",),
    "memory.divisibility": ("known_divisor",),
    "memory.matrix_starts": ("MatrixStep", "check_matrix_starts"),
    "memory.places": ("places_of",),
    "memory.proxies": ("acquire_stores",),
    "memory.reference_types": ("DynamicOffset", "Elsewhere", "MemoryReference"),
    "memory.references": ("index_reference",),
    "memory.regions": ("MemoryRegion", "memory_region"),
    "memory_events": ("ASYNC",),
    "ops.arguments": (
        "check_config",
        "float_dtype",
        "in_32_bits",
        "is_portable_config",
        "positive",
        "random_array",
        "whole_numbers",
        "zeros",
    ),
    "ops.decode.arguments": (
        "DecodeAccepted",
        "DecodeOptions",
        "DecodeProblem",
        "PageLayout",
        "decode_call",
        "decoded",
        "paged_call",
    ),
    "ops.dense.arguments": ("matmul_call",),
    "ops.dense.arrangement": ("MATRIX", "Batch", "mapped_product"),
    "ops.dense.epilogue": ("Epilogue",),
    "ops.dense.gradient": ("differentiable_product",),
    "ops.dense.problem": ("MatmulCall", "MatmulProblem"),
    "ops.flash.arguments": (
        "AttentionCall",
        "AttentionOptions",
        "Extras",
        "attention_call",
        "attention_options",
        "check_residuals",
        "in_whole_tiles",
    ),
    "ops.flash.api": ("portable_gradients",),
    "ops.flash.gradient": ("differentiable_attention",),
    "ops.flash.kernels": ("AttentionProblem", "AttentionView", "over_keys", "over_queries"),
    "ops.flash.residuals": ("two_numbers",),
    "ops.mixed.arguments": ("MixedProblem", "mixed_call", "multiplied"),
    "ops.dense.gated": ("gated_product",),
    "ops.rows.gated": ("Activation", "gated_activation"),
    "ops.padding": ("aligned", "padded", "padded_columns", "whole_vector"),
    "ops.ragged.arguments": ("ragged_call", "transposed_ragged_call"),
    "ops.ragged.gradient": ("differentiable_ragged",),
    "ops.softmax": (
        "LOG2_E",
        "LOWEST",
        "broadcast_rows",
        "cap",
        "exponents",
        "lowest",
        "normalized",
    ),
    "copies.tensor_map_types": ("element_code",),
    "primitives.copies": ("copy_gmem_to_smem_p", "copy_smem_to_gmem_p"),
    "primitives.copy_options": ("CopyPartition", "Partitioned"),
    "primitives.layouts": ("SomeLayout", "layout_cast"),
    "primitives.semaphores": ("Coordinates", "one_semaphore"),
    "rules.shape": ("same_layout_hint",),
    "tuning.entries": ("device",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
"""Everything is imported when it is asked for: a kernel that is in the cache does without most."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        module = _MODULES.get(name) or _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = importlib.import_module(f"pallasite_std.{module}")
        if name in _MODULE_OF:
            found = getattr(found, name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES, *_MODULE_OF})
