"""The core is small, and says nothing of single chips: what is special to them is in plugins."""

from __future__ import annotations

import re
from pathlib import Path

import pallasite

CORE = Path(pallasite.__file__).parent
MOST_LINES = 25_000
BESIDE_THE_CORE = ("cli", "drawing")
CHIPS = re.compile(r"wgmma|tcgen05|tmem|hopper|blackwell|multimem|nvshmem", re.IGNORECASE)
KNOWN_PLUGINS = Path("known_plugins.json")


def test_lines():
    """Without the command line and the drawings, which only show what the core finds."""
    files = [one.relative_to(CORE) for one in CORE.rglob("*.py")]
    core = [file for file in files if file.parts[0] not in BESIDE_THE_CORE]
    lines = sum((CORE / file).read_bytes().count(b"\n") for file in core)
    assert len(core) < len(files)
    assert lines < MOST_LINES


def test_no_chip_is_named_but_in_the_table_of_known_plugins():
    texts = {
        file.relative_to(CORE): file.read_text()
        for file in CORE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    naming = {file for file, text in texts.items() if CHIPS.search(f"{file}\n{text}")}
    assert naming == {KNOWN_PLUGINS}
