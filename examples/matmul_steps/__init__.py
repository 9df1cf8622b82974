"""A GEMM in steps, from one tile at a time to clusters with multicast.

Each module is a complete kernel and differs from the one before by one idea;
docs/matmul-tutorial.md goes through them.
"""

STEPS = (
    "step1_tile",
    "step2_swizzle",
    "step3_ring",
    "step4_two_warpgroups",
    "step5_specialized",
    "step6_persistent",
    "step7_stores",
    "step8_clusters",
)
"""The modules, each with a function ``matmul`` of two matrices."""
