"""Register layouts of operands and accumulators (PTX ISA, "Register Fragments" of ``wgmma``)."""

from __future__ import annotations

from pallasite.plugin import NamedLayout
from pallasite.plugin.layouts import Replicated, fragment_tiles, tiled_specification

SPECIFICATIONS = {
    # Accumulators: (m, n), m a multiple of 64, n of 8.
    "WGMMA": tiled_specification(fragment_tiles(64, 8, (2,)), (-7,), (-3, -2)),
    "_WGMMA_ACC_32BIT": tiled_specification(fragment_tiles(64, 8, (2,), (1,)), (-8,), (-4, -3)),
    # Operands of 8 bits in registers.
    "WGMMA_8BIT": tiled_specification(fragment_tiles(64, 16, (4,)), (-7,), (-3, -2)),
    # Operands of 32 bits in registers, which are multiplied as tf32.
    "WGMMA_TF32": tiled_specification(fragment_tiles(64, 4, (1,)), (-7,), (-3, -2)),
    # From which a conversion to elements twice (four times) as wide leads to WGMMA without moves.
    "WGMMA_UPCAST_2X": tiled_specification(fragment_tiles(64, 16, (8,), (4,)), (-8,), (-4, -2, -3)),
    "WGMMA_UPCAST_4X": tiled_specification(fragment_tiles(64, 32, (8,)), (-7,), (-3, -2)),
    "WGMMA_TRANSPOSED": tiled_specification(
        fragment_tiles(64, 8, (2, 2), (2, 1)), (-10,), (-6, -3, -5), vector_dim=-2
    ),
    # What is left of WGMMA when columns, or rows, are reduced away.
    "WGMMA_ROW": tiled_specification(((64,), (16,), (8,), (1,)), (-4,), (-2, Replicated(4))),
    "WGMMA_COL": tiled_specification(((8,), (2,)), (Replicated(4),), (Replicated(8), -2)),
}

_REDUCED = ("WGMMA_ROW", "WGMMA_COL")

NAMED = tuple(
    NamedLayout(name=name, specification=specification, public=name not in _REDUCED)
    for name, specification in SPECIFICATIONS.items()
)
