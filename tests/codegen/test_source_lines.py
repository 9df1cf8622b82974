"""Machine code knows the lines of the kernel's source."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from tests import tool_results

import pallasite
from pallasite import gpu as plgpu
from pallasite.codegen.tools import find_tool


@plgpu.kernel(out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
def shifted(x, o):
    value = x[...]
    o[...] = value + 1.0


def test_machine_code_has_the_lines_of_the_kernel(tmp_path):
    disassembler = find_tool("nvdisasm").path
    if find_tool("ptxas").path is None or disassembler is None:
        pytest.skip("no ptxas or nvdisasm")
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    compiled = pallasite.compile(shifted, x, target="sm_90", assemble=True)
    assert compiled.cubin is not None
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled.cubin)
    command = [str(disassembler), "-g", "-c", str(path)]
    done = tool_results.run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    listing = done.stdout
    lines = {int(n) for n in re.findall(rf'File "{re.escape(__file__)}", line (\d+)', listing)}
    source = pathlib.Path(__file__).read_text().splitlines()
    assert {source[line - 1].strip() for line in lines} >= {"value = x[...]"}
    instructions = listing.split("line ", 1)[1]
    assert "LDG" in instructions
