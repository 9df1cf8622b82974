"""Machine code for Blackwell: how it is counted, and that of a kernel that JAX publishes."""

from __future__ import annotations

import pathlib
import sys

import pytest

pytest.importorskip("absl", reason="JAX's kernels import it")
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import blackwell_blocks
import blackwell_cases
import blackwell_code
import machine_code
import numpy as np

import pallasite
from pallasite.codegen.tools import find_tool

TEXT = """
.L_x_1:
        /*0000*/                   ULOP3.LUT UR31, UR5, 0x3, URZ, 0xc0, !UPT ;
        /*0010*/              @!P3 BRA `(.L_x_3) ;
.L_x_2:
        /*0020*/                   UTCHMMA.2CTA gdesc[UR8], gdesc[UR10], tmem[UR16], UP1 ;
        /*0030*/                   UTCQMMA gdesc[UR8], gdesc[UR10], tmem[UR16], UPT ;
        /*0040*/              @!P4 BRA `(.L_x_5) ;
        /*0050*/              @!UP1 UTCBAR.2CTA.MULTICAST [UR16], URZ, UR13 ;
        /*0060*/               @P2 UTMALDG.2D [UR20], [UR6] ;
.L_x_5:
        /*0070*/              @!P5 BRA `(.L_x_4) ;
.L_x_6:
        /*0080*/                   BRA.U UP1, `(.L_x_2) ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_1) ;
        /*00a0*/                   STL [R1], R2 ;
        /*00b0*/                   EXIT ;
.L_x_4:
        /*00c0*/                   BRA `(.L_x_6) ;
"""


def test_loops_and_what_lanes_decide():
    instructions, labels = machine_code.parsed(TEXT)
    assert [one.name for one in instructions][:3] == ["ULOP3.LUT", "BRA", "UTCHMMA.2CTA"]
    guards = [None, "!P3", None, None, "!P4", "!UP1", "P2", "!P5", None, None, None, None, None]
    assert [one.guard for one in instructions] == guards
    assert list(machine_code.loops(instructions, labels)) == [(2, 8), (0, 9)]
    assert machine_code.issuing_loop(instructions, labels) == (2, 8)
    assert [one.of_lanes for one in instructions[:8]] == [False, True] + [False] * 2 + [
        True,
        False,
        True,
        True,
    ]
    # What P4 skips; what P3 skips is a loop of its own, and P5 only leads to code that waits.
    skipped = [
        machine_code.is_skipped_by_lanes(instructions, labels, n) for n in range(len(instructions))
    ]
    assert [n for n, one in enumerate(skipped) if one] == [5, 6]
    with pytest.raises(ValueError, match="no loop issues"):
        machine_code.issuing_loop(instructions[:2], labels)


REGISTERS = {
    "blackwell_matmul_mgpu, pairs": 59,
    "blackwell_matmul_mgpu": 55,
    "blackwell_ragged_dot_mgpu": 123,
}
"""What JAX's compiler needs, with one of two versions of ptxas the least."""


@pytest.mark.parametrize("name", REGISTERS)
def test_published_kernels(name):
    """Triton and CuTe DSL make 11.8 machine instructions for each matrix instruction."""
    if find_tool("ptxas").path is None or find_tool("nvdisasm").path is None:
        pytest.skip("the CUDA toolkit is not installed")
    (case,) = [one for one in blackwell_cases.cases(None) if one.name == name]
    with blackwell_cases.multiprocessors(148):
        function = case.function(blackwell_cases.OURS)
        made = pallasite.compile(function, *case.shapes(), target="sm_100a")
    code = machine_code.read_code(made.ptx, case.name)
    assert code.products == 4 and code.ratio <= 12
    assert (code.spills, code.local, code.guarded, code.branched) == (0, 0, 0, 0)
    assert code.registers <= REGISTERS[name]


@pytest.mark.parametrize("groups", [0, 3])
def test_what_was_written_is_compared(groups):
    """Elements that were not written do not count; one wrong element does."""
    case = blackwell_cases.Case("", {}, lambda module: module, groups=groups)
    a, b, *sizes = inputs = case.inputs((256, 128, 64))
    of_row = np.repeat(np.arange(max(groups, 1)), sizes[0] if groups else [256])
    whole = np.einsum(
        "mk,mkn->mn", a.astype(float), (b if groups else b[None]).astype(float)[of_row]
    )
    result = np.full((256, 128), 0xCDCD, np.uint16).view(np.float16)
    result[128:200] = whole[128:200]
    right = blackwell_blocks.compare(result, inputs, 1)
    assert (right.blocks, right.tiles) == (1, 1) and right.error < 1e-3
    result[150, 7] = 1 - result[150, 7]
    assert blackwell_blocks.compare(result, inputs, 1).error > 2e-3


def test_table(capsys):
    code = machine_code.Code(50, 0, 0, 100, 40, 4, 0, 2, 0, 0, 0.5)
    theirs = machine_code.Code(60, 0, 0, 200, 50, 4, 3, 4, 0, 0, 1.0)
    row = {blackwell_code.OURS: code, blackwell_code.JAX: theirs, "in_flight": (3, 4)}
    row["blocks"] = blackwell_blocks.Right(2, 7, 2.5e-4)
    blackwell_code.print_table({"kernel": row})
    head, line = capsys.readouterr().out.splitlines()
    shown = [part.strip() for part in line.split("  ") if part.strip()]
    assert shown == [
        "kernel",
        "10.00 / 12.50",
        "50 / 60",
        *["0 / 0"] * 2,
        "2 / 7",
        "100 / 200",
        "500 / 1000",
        "0.80",
        "0.83",
        "0.50",
        "3 of 4",
        "7: 2.5e-04",
    ]
    assert head.split()[0] == "kernel,"
