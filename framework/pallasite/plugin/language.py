"""References, memory spaces, transforms, checks, effects, parameters, kernels."""

from __future__ import annotations

import pallasite.runtime.registration as _registration  # noqa: F401  (so that kernels can run)
from pallasite.language import checks as checks
from pallasite.language import transforms as transforms
from pallasite.language.effects import communication_effect as communication_effect
from pallasite.language.effects import memory_effect as memory_effect
from pallasite.language.effects import programmatic_launch_effect as programmatic_launch_effect
from pallasite.language.effects import tensor_core_pipeline_effect as tensor_core_pipeline_effect
from pallasite.language.interpretation import Interpretation as Interpretation
from pallasite.language.memory import GMEM as GMEM
from pallasite.language.memory import SMEM as SMEM
from pallasite.language.memory import AbstractRefUnion as AbstractRefUnion
from pallasite.language.memory import GlobalMemory as GlobalMemory
from pallasite.language.memory import GPUMemoryRef as GPUMemoryRef
from pallasite.language.memory import MemorySpace as MemorySpace
from pallasite.language.memory import Registers as Registers
from pallasite.language.memory import SharedMemory as SharedMemory
from pallasite.language.memory import array_type as array_type
from pallasite.language.memory import memory_space_of as memory_space_of
from pallasite.language.memory import union_members as union_members
from pallasite.language.memory_space import find_space as find_space
from pallasite.language.memory_space import memory_spaces as memory_spaces
from pallasite.language.mesh import Mesh as Mesh
from pallasite.language.mesh import WarpMesh as WarpMesh
from pallasite.language.mesh import in_warp_region as in_warp_region
from pallasite.language.operands import any_operand as any_operand
from pallasite.language.params import CompilerParams as CompilerParams
from pallasite.language.params import LoweringSemantics as LoweringSemantics
from pallasite.language.spec import KernelSpec as KernelSpec
from pallasite.language.tracing import is_of_keys as is_of_keys
from pallasite.language.tracing import trace_kernel as trace_kernel
from pallasite.language.tracing import traced_mesh as traced_mesh
from pallasite.language.transforms import ClusterRefTransform as ClusterRefTransform
from pallasite.language.transforms import UnswizzleTransform as UnswizzleTransform
from pallasite.language.transforms import UntilingTransform as UntilingTransform
from pallasite.language.transforms import as_transformed as as_transformed
from pallasite.language.transforms import element_bits as element_bits
from pallasite.language.transforms import find_swizzle as find_swizzle
