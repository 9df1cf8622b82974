"""What kernel authors touch: memory, references, primitives, kernels and pipelines.

``PUBLIC_NAMES`` says where ``pallasite.gpu`` finds each of its names; nothing is imported before it
is asked for.
"""

from __future__ import annotations

_BY_MODULE = {
    "interpret": ("InterpretGPUParams", "force_gpu_interpret_mode", "set_gpu_interpret_mode"),
    "kernel": ("kernel",),
    "mesh": ("Mesh", "WarpMesh"),
    "memory": (
        *("GMEM", "REGS", "SMEM", "MemorySpace", "RefUnion"),
        *("Barrier", "ClusterBarrier", "SemaphoreType"),
    ),
    "transforms": (
        *("SwizzleTransform", "TilingTransform", "cluster_ref", "find_swizzle", "transpose_ref"),
    ),
    "params": (
        *("BlockSpec", "CompilerParams", "CopyPartition", "LoweringSemantics"),
        *("OOBFillMode", "TraceScope"),
    ),
    "layouts": ("Layout", "Replicated", "Tiling", "layout_cast"),
    "helpers": ("NDLoopInfo", "nd_loop", "planar_snake", "warp_map"),
    "pipeline": ("emit_pipeline",),
    "scheduling": ("dynamic_scheduling_loop",),
    "primitives.arrays": (
        *("atomic_add", "atomic_and", "atomic_max", "atomic_min", "atomic_or", "atomic_xor"),
        *("broadcasted_iota", "load", "print_layout"),
    ),
    "primitives.barriers": (
        *("barrier_arrive", "barrier_test", "barrier_wait", "commit_smem"),
        *("griddepcontrol_launch_dependents", "griddepcontrol_wait"),
    ),
    "primitives.cluster_launch": (
        *("TryClusterCancelResult", "query_cluster_cancel", "try_cluster_cancel"),
    ),
    "primitives.copies": (
        *("async_prefetch", "async_store_smem", "barrier_expect", "commit_smem_to_gmem_group"),
        *("copy_gmem_to_smem", "copy_smem_to_gmem", "wait_gmem_to_smem", "wait_smem_to_gmem"),
    ),
    "primitives.inline": ("RefType", "ShapeDtypeStruct", "inline_mgpu"),
    "primitives.matrix": ("mma",),
    "primitives.semaphores": ("semaphore_signal", "semaphore_wait"),
}

#: Public name -> "module:attribute".
PUBLIC_NAMES: dict[str, str] = {
    name: f"pallasite.language.{module}:{name}"
    for module, names in _BY_MODULE.items()
    for name in names
}
PUBLIC_NAMES["as_torch_kernel"] = "pallasite.runtime.torch_kernel:as_torch_kernel"
PUBLIC_NAMES["Transform"] = "pallasite._jax:Transform"
