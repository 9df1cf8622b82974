"""Pictures of layouts, as SVG documents.

:func:`draw_register_layout` shows which warp, lane, register and vector element holds each element
of an array, :func:`draw_memory_layout` which byte of shared memory, in which bank, holds it.
"""

from pallasite.drawing.memory import draw_memory_layout
from pallasite.drawing.registers import draw_register_layout

__all__ = ["draw_memory_layout", "draw_register_layout"]
