"""Machine code for Blackwell: how it is counted, and that of a kernel that JAX publishes."""

from __future__ import annotations

import pathlib
import sys

import pytest

pytest.importorskip("absl", reason="JAX's kernels import it")
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import blackwell_code
import jax
import jax.numpy as jnp

import pallasite
from pallasite.codegen.tools import find_tool

TEXT = """
.L_x_1:
        /*0000*/                   ULOP3.LUT UR31, UR5, 0x3, URZ, 0xc0, !UPT ;
        /*0010*/              @!P3 BRA `(.L_x_3) ;
.L_x_2:
        /*0020*/                   UTCHMMA.2CTA gdesc[UR8], gdesc[UR10], tmem[UR16], UP1 ;
        /*0030*/                   UTCQMMA gdesc[UR8], gdesc[UR10], tmem[UR16], UPT ;
        /*0040*/              @!UP1 UTCBAR.2CTA.MULTICAST [UR16], URZ, UR13 ;
        /*0050*/               @P2 UTMALDG.2D [UR20], [UR6] ;
        /*0060*/                   BRA.U UP1, `(.L_x_2) ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_1) ;
        /*0080*/                   STL [R1], R2 ;
"""


def test_the_loop_that_issues_products():
    instructions, labels = blackwell_code.parsed(TEXT)
    assert [one.name for one in instructions][:3] == ["ULOP3.LUT", "BRA", "UTCHMMA.2CTA"]
    assert [one.guard for one in instructions] == [None, "!P3", None, None, "!UP1", "P2"] + 3 * [
        None
    ]
    assert blackwell_code.issuing_loop(instructions, labels) == (2, 6)
    with pytest.raises(ValueError, match="no loop issues"):
        blackwell_code.issuing_loop(instructions[:2], labels)


@pytest.mark.parametrize("place", [0, 1])
def test_published_matmul(place):
    """Triton and CuTe DSL make 11.8 machine instructions for each matrix instruction."""
    if find_tool("ptxas").path is None or find_tool("nvdisasm").path is None:
        pytest.skip("the CUDA toolkit is not installed")
    case = blackwell_code.cases(None)[place]
    m, n, k = blackwell_code.M, blackwell_code.N, blackwell_code.K
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((m, k), (k, n))]
    function = case.call(case.modules[blackwell_code.OURS])
    made = pallasite.compile(function, *arguments, target="sm_100a")
    code = blackwell_code.read_code(made.ptx, case.name)
    assert code.products == 4 and code.ratio <= 12
    assert (code.spills, code.local, code.divergent) == (0, 0, 0)
    assert code.registers <= 55  # What JAX's compiler needs without pairs; 61 with them.
