"""Which forms of instructions ptxas accepts, and which the simulator does."""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Sequence

import pytest
from tests import tool_results

from pallasite.codegen.tools import find_tool
from pallasite_simulator.errors import PtxError
from pallasite_simulator.programs import load

_HEADER = """.version 9.0
.target {target}
.address_size 64
.visible .entry kernel()
{{
{declarations}
"""


def rejected(lines: Sequence[str], declarations: str, target: str) -> set[int]:
    """Which of some instructions, one in each line, ptxas does not accept."""
    ptxas = find_tool("ptxas").path
    if ptxas is None:
        pytest.skip("there is no ptxas")
    head = _HEADER.format(target=target, declarations=declarations)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(head + "\n".join(lines) + "\nret;\n}\n")
        file.flush()
        command = [str(ptxas), f"-arch={target}", file.name, "-o", "/dev/null"]
        found = tool_results.run(command, pathlib.Path(file.name).parent)
    first = head.count("\n") + 1
    numbers = {int(one) - first for one in re.findall(r"line (\d+); error", found.stderr)}
    assert numbers or not found.returncode, found.stderr
    assert "Parsing error" not in found.stderr, found.stderr
    assert all(0 <= one < len(lines) for one in numbers), found.stderr
    return numbers


def refusals(lines: Sequence[str], declarations: str, target: str) -> dict[int, str]:
    """Which of them the simulator refuses, and why."""
    head = _HEADER.format(target=target, declarations=declarations)
    found = {}
    for number, line in enumerate(lines):
        try:
            load(f"{head}{line}\nret;\n}}\n", None, 148)
        except PtxError as error:
            found[number] = str(error)
    return found
