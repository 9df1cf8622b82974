"""Layout inference: finds the layouts that a program of warpgroup semantics leaves open.

A walk over the kernel's jaxprs turns the inference rule of each primitive into *factors*: what it
costs to do this equation's work if its arrays, and the memory that it accesses, lie in certain ways
(:mod:`.problem`). The solver chooses a register layout for every group of arrays combined in
element-wise operations, and a memory layout for every allocation, so that the factors' sum is small
(:mod:`.solver`). What it chose is a :class:`~.plan.LayoutPlan`, which the walker follows: it
converts operands where their layout differs, and the rules of lane semantics emit the code.
"""
