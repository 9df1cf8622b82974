"""Where machine code of the simulator's own loops is kept."""

from __future__ import annotations

from pallasite.plugin import StoreNamespace

LOOPS = StoreNamespace(
    name="loops",
    noun="loop of the simulator",
    nouns="loops of the simulator",
    folder="loops",
    suffix=".loop",
    max_bytes=2**26,
)
"""Object files of :func:`pallasite_simulator.instructions.compiled.compile_loop`."""
