"""``pallasite inspect``: the report and its JSON."""

from __future__ import annotations

import pytest

from pallasite.codegen.tools import find_tool
from pallasite.runtime.compiler import clear_memory

COPY = ("--target", "sm_90", "--arg", "bf16[64,64]")


def test_report(command, kernel):
    result = command("inspect", kernel("filled_copy"), *COPY)
    assert result.status == 0, result.err
    assert result.out.startswith("kernel copy for sm_90\n")
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    for line in (
        "grid 1 x 1 x 1 blocks",
        "block 128 x 1 x 1 threads",
        "0 input 0 bfloat16[64, 64] TMA descriptor",
        "1 output 0 bfloat16[64, 64] pointer",
        "barriers 1",
    ):
        assert line in lines
    assert any(line.startswith("0 BFLOAT16 [64, 64] [64, 1] [64, 64] none") for line in lines)
    assert any(line.startswith("SMEM bfloat16[64, 64] 8192 bytes") for line in lines)
    assert any(line.startswith("barrier barrier x 1 8 bytes") for line in lines)
    assert any(line.startswith("lower ") for line in lines)
    assert any(line.startswith("total ") for line in lines)


def test_json(command, kernel, ticking_clock):
    clear_memory()  # What was compiled before has times of another clock.
    result = command("inspect", kernel("filled_copy"), *COPY, "--json")
    assert result.status == 0, result.err
    (report,) = result.json
    assert report["name"] == "copy"
    assert report["launch"]["block"] == [128, 1, 1]
    first = report["launch"]["parameters"][0]
    assert first["kind"] == "tensor_map"
    assert first["buffer"]["kind"] == "input"
    assert (first["shape"], first["strides"], first["box"]) == ([64, 64], [64, 1], [64, 64])
    assert first["element_type"] == "BFLOAT16"
    assert report["resources"]["shared_memory_bytes"] == 8192 + 8
    assert {one["space"] for one in report["resources"]["allocations"]} == {"smem", "barrier"}
    assert report["timings"]["ptx-emit"] == ticking_clock
    known = find_tool("ptxas").path is not None
    assert (report["resources"]["registers"] is not None) == known


def test_all_kernels_of_a_function(command, kernel):
    result = command("inspect", kernel("both"), "--target", "sm_90", "--json")
    assert [one["name"] for one in result.json] == ["scale", "add"]
    result = command("inspect", kernel("both"), "--target", "sm_90")
    assert "kernel scale for sm_90\n" in result.out
    assert "\n\nkernel add for sm_90\n" in result.out


def test_without_an_assembler(command, kernel, monkeypatch):
    monkeypatch.setenv("PALLASITE_PTXAS", "off")
    result = command("inspect", kernel("add"), "--target", "sm_90")
    assert result.status == 0, result.err
    assert "not known: switched off by the option ptxas; PALLASITE_PTXAS=auto" in result.out
    assert "spills" not in result.out


def test_lists_a_file(command, kernel):
    result = command("inspect", kernel("")[:-2])
    assert result.status == 0
    assert "add_args()" in result.out


@pytest.mark.parametrize("name", ["missing", ""])
def test_no_such_file(command, name):
    result = command("inspect", f"{name}.py::f")
    assert result.status == 1
    assert "error: cannot read" in result.err
