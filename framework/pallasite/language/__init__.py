"""What kernel authors touch: memory, references, kernels, parameters.

``PUBLIC_NAMES`` says where ``pallasite.gpu`` finds the names of the core; nothing is imported
before it is asked for. Plugins, the standard library first, add theirs by the hook
``pallasite_names``.
"""

from __future__ import annotations

_BY_MODULE = {
    "kernel": ("kernel",),
    "mesh": ("Mesh", "WarpMesh"),
    "memory": (
        *("GMEM", "REGS", "SMEM", "MemorySpace", "RefUnion"),
        "SemaphoreType",
    ),
    "transforms": (
        *("SwizzleTransform", "TilingTransform", "cluster_ref", "find_swizzle", "transpose_ref"),
    ),
    "params": ("CompilerParams", "LoweringSemantics"),
}

#: Public name -> "module:attribute".
PUBLIC_NAMES: dict[str, str] = {
    name: f"pallasite.language.{module}:{name}"
    for module, names in _BY_MODULE.items()
    for name in names
}
PUBLIC_NAMES |= {name: f"pallasite.layouts.construct:{name}" for name in ("Replicated", "Tiling")}
PUBLIC_NAMES["Transform"] = "pallasite._jax:Transform"
