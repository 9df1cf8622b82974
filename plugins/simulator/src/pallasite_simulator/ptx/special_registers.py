"""The special registers of PTX (PTX ISA chapter 10)."""

from __future__ import annotations

from pallasite_simulator.ptx.syntax import Special

# PTX ISA 10.1 to 10.14: vectors; ``.w`` is always zero.
_VECTORS = (
    "%tid",
    "%ntid",
    "%ctaid",
    "%nctaid",
    "%clusterid",
    "%nclusterid",
    "%cluster_ctaid",
    "%cluster_nctaid",
)
_SCALARS = (
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%gridid",
    "%is_explicit_cluster",
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%lanemask_eq",
    "%lanemask_le",
    "%lanemask_lt",
    "%lanemask_ge",
    "%lanemask_gt",
    "%clock",
    "%clock_hi",
    "%clock64",
    *(f"%pm{number}" for number in range(8)),
    *(f"%pm{number}_64" for number in range(8)),
    *(f"%envreg{number}" for number in range(32)),
    "%globaltimer",
    "%globaltimer_lo",
    "%globaltimer_hi",
    "%reserved_smem_offset_begin",
    "%reserved_smem_offset_end",
    "%reserved_smem_offset_cap",
    "%reserved_smem_offset_0",
    "%reserved_smem_offset_1",
    "%total_smem_size",
    "%aggr_smem_size",
    "%dynamic_smem_size",
    "%current_graph_exec",
)

VECTOR_NAMES = frozenset(_VECTORS)

#: Every special register by the word that stands for it, such as ``"%tid.x"`` or ``"%laneid"``.
SPECIAL_REGISTERS: dict[str, Special] = {
    **{f"{name}.{part}": Special(name, part) for name in _VECTORS for part in "xyzw"},
    **{name: Special(name) for name in _SCALARS},
}
