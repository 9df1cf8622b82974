"""The page about the matrix product in steps says what the steps are and what becomes of them."""

from __future__ import annotations

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples.matmul_steps import STEPS
from tests.examples.test_documents import ROOT, blocks_of

import pallasite
from pallasite.codegen.tools import find_tool

PAGE = ROOT / "docs" / "matmul-tutorial.md"
QUOTES = [block for block in blocks_of(PAGE) if block.kind.startswith("python from ")]
COLUMNS = ("threads", "blocks", "shared memory", "barriers", "registers", "spills", "instructions")
COUNTED = ("HGMMA", "UTMALDG", "STG", "STS", "UTMASTG", "LDL", "STL")


def rows() -> dict[str, dict[str, str]]:
    """The table of what the compiler makes of the steps."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in STEPS:
            found[cells[0]] = dict(zip(COLUMNS, cells[1:], strict=True))
    return found


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: f"line {quote.line}")
def test_quoted_code_is_that_of_the_step(quote):
    source = (ROOT / quote.kind.removeprefix("python from ")).read_text()
    assert "\n" + quote.text in source


def test_every_step_is_quoted_linked_and_in_the_table():
    text = PAGE.read_text()
    folder = ROOT / "examples" / "matmul_steps"
    assert {path.stem for path in folder.glob("step*.py")} == set(STEPS) == set(rows())
    quoted = {block.kind.split("/")[-1].removesuffix(".py") for block in QUOTES}
    assert quoted == set(STEPS)
    for step in STEPS:
        assert f"](../examples/matmul_steps/{step}.py)" in text


@pytest.mark.parametrize("step", STEPS)
def test_resources_are_those_of_the_table(step):
    module = importlib.import_module(f"examples.matmul_steps.{step}")
    matrix = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    tools = all(find_tool(name).path is not None for name in ("ptxas", "nvdisasm"))
    kernel = pallasite.compile(
        module.matmul, matrix, matrix, target="sm_90a", assemble=tools, disassemble=tools
    )
    row = rows()[step]
    assert int(row["threads"]) == np.prod(kernel.launch.block)
    assert int(row["blocks"]) == np.prod(kernel.launch.grid)
    assert int(row["shared memory"]) == kernel.resources.shared_memory_bytes
    assert int(row["barriers"]) == kernel.resources.barriers
    if not tools:
        pytest.skip("registers and instructions need ptxas and nvdisasm")
    # Another version of the assembler may need a few registers more or less.
    assert abs(int(row["registers"]) - kernel.resources.registers) <= 8
    assert int(row["spills"]) == kernel.resources.spill_store_bytes
    counts = {name: len(re.findall(rf"\b{name}\b", kernel.sass)) for name in COUNTED}
    counted = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    assert row["instructions"] == counted


def test_steps_are_short():
    for step in STEPS:
        source = (ROOT / "examples" / "matmul_steps" / f"{step}.py").read_text()
        assert len(source.splitlines()) < 150
