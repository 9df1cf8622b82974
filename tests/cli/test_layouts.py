"""``pallasite inspect --layouts``: layouts, reasons and conversions by source line."""

from __future__ import annotations

import textwrap

import pytest

SOURCE = """
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from pallasite import gpu as plgpu


def params(semantics):
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics[semantics])


def body(x_ref, out_ref, tile):
    x = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA)
    y = x - jnp.max(x, axis=1)[:, None]
    tile[...] = y.astype(jnp.bfloat16)
    out_ref[...] = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)


def kernel(semantics, name):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16)],
        compiler_params=params(semantics),
        kernel_name=name,
    )


inferred = kernel("Warpgroup", "inferred")
given = kernel("Lane", "given")


def both(x):
    return given(inferred(x))
"""
ARGUMENTS = ("--target", "sm_90a", "--arg", "f32[64,64]", "--layouts")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file with kernels, in the present folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text(SOURCE.lstrip())
    return "kernels.py"


def section(text: str, title: str) -> str:
    """A section of a report: the indented lines after its title."""
    lines = iter(text.splitlines())
    next(line for line in lines if line == title)
    found = []
    for line in lines:
        if line and not line.startswith(" "):
            break
        found.append(line)
    return textwrap.dedent("\n".join(found)).strip()


def test_warpgroup_semantics(command, file):
    result = command("inspect", f"{file}::inferred", *ARGUMENTS)
    assert result.status == 0, result.err
    assert result.out.startswith("kernel inferred for sm_90a\n"), "the report is there as well"
    cast = "the program casts to this layout (line 13)"
    rows = section(result.out, "layouts").splitlines()
    assert [row for row in rows if not row.startswith(" ")] == [
        "kernels.py:13: x = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA)",
        "kernels.py:14: y = x - jnp.max(x, axis=1)[:, None]",
        "kernels.py:15: tile[...] = y.astype(jnp.bfloat16)",
        "kernels.py:16: out_ref[...] = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)",
    ]
    words = [" ".join(row.split()) for row in rows]
    assert f"get float32[64, 64] WGMMA {cast}" in words
    assert f"reduce_max float32[64] WGMMA_ROW follows by reduce_max (line 14); {cast}" in words
    assert f"convert_element_type bfloat16[64, 64] WGMMA {cast}" in words
    (converts,) = [row for row in words if row.startswith("CONVERTS")]
    assert converts.startswith(
        "CONVERTS float32[64, 64] WGMMA -> WGMMA_TRANSPOSED once through shared memory, cost "
    )
    assert converts.endswith(": the program casts to this layout (line 16)")
    shared = [
        " ".join(row.split()) for row in section(result.out, "layouts in shared memory").split("\n")
    ]
    assert shared[0] == "name type line layout why"
    assert shared[1].startswith(
        "tile bfloat16[64, 64] kernels.py:20 TilingTransform((8, 64)), SwizzleTransform(128) "
        "the store has no bank conflicts; row-major takes "
    )
    total = section(result.out, "conversions")
    assert total.startswith("1, of which 1 through shared memory; cost ")


def test_lane_semantics(command, file):
    """The layouts are those that the program gives; there is nothing to explain."""
    result = command("inspect", f"{file}::given", *ARGUMENTS)
    assert result.status == 0, result.err
    words = [" ".join(row.split()) for row in section(result.out, "layouts").splitlines()]
    assert "layout_cast float32[64, 64] WGMMA" in words
    assert "layout_cast float32[64, 64] WGMMA_TRANSPOSED" in words
    assert not any(row.startswith("CONVERTS") for row in words)
    shared = section(result.out, "layouts in shared memory").splitlines()
    assert " ".join(shared[1].split()) == "tile bfloat16[64, 64] kernels.py:15 row-major"
    assert section(result.out, "conversions") == "none"


def test_json(command, file):
    result = command("inspect", f"{file}::inferred", *ARGUMENTS, "--json")
    assert result.status == 0, result.err
    (report,) = result.json
    assert set(report["layouts"]) == {"arrays", "shared", "conversions", "insertions"}
    (conversion,) = report["layouts"]["conversions"]
    place = {"file": str(conversion["location"]["file"]), "line": 16, "function": "body"}
    assert conversion.pop("cost") > 100
    assert conversion == {
        "location": place,
        "primitive": "layout_cast",
        "dtype": "float32",
        "shape": [64, 64],
        "source": "WGMMA",
        "target": "WGMMA_TRANSPOSED",
        "through": "shared memory",
        "times": 1.0,
        "why": [{"text": "the program casts to this layout", "location": place}],
    }
    (tile,) = report["layouts"]["shared"]
    assert (tile["name"], tile["location"]["line"]) == ("tile", 20)
    assert {one["layout"] for one in report["layouts"]["arrays"]} >= {"WGMMA", "WGMMA_ROW"}


UNFENCED = """
import jax
import jax.numpy as jnp
from pallasite import gpu as plgpu


@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
    scratch_types=[plgpu.SMEM((64, 64), jnp.float32)],
)
def turned(x_ref, out_ref, tile):
    tile[...] = x_ref[...]
    tile[...] = tile[...].T
    plgpu.copy_smem_to_gmem(tile, out_ref)
    plgpu.wait_smem_to_gmem(0)
"""


def test_fences_and_barriers_that_are_added(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unfenced.py").write_text(UNFENCED.lstrip())
    result = command("inspect", "unfenced.py::turned", *ARGUMENTS)
    assert result.status == 0, result.err
    added = section(result.out, "fences, barriers and waits that are added").splitlines()
    assert [" ".join(row.split()) for row in added] == [
        "unfenced.py:12 a barrier before get",
        "unfenced.py:12 a barrier before swap",
        "unfenced.py:13 a fence before copy_smem_to_gmem",
    ]
    (report,) = command("inspect", "unfenced.py::turned", *ARGUMENTS, "--json").json
    kinds = [one["what"] for one in report["layouts"]["insertions"]]
    assert kinds == ["barrier", "barrier", "fence"]


def test_all_kernels_of_a_function(command, file):
    result = command("inspect", f"{file}::both", *ARGUMENTS, "--json")
    assert [one["name"] for one in result.json] == ["inferred", "given"]
    reasons = [any(a["why"] for a in one["layouts"]["arrays"]) for one in result.json]
    assert reasons == [True, False]


def test_with_pictures(command, file, tmp_path):
    result = command("inspect", f"{file}::inferred", *ARGUMENTS, "--draw", tmp_path / "pictures")
    assert result.status == 0, result.err
    assert section(result.out, "layouts") and section(result.out, "drawings")
    assert list((tmp_path / "pictures").glob("*.svg"))


def test_only_when_asked(command, file):
    result = command("inspect", f"{file}::inferred", *ARGUMENTS[:-1])
    assert "\nlayouts" not in result.out
    (report,) = command("inspect", f"{file}::inferred", *ARGUMENTS[:-1], "--json").json
    assert "layouts" not in report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kernels.py", "--layouts"), "expected: kernels.py::KERNEL"),
        (("--layouts",), "--layouts is for kernels"),
    ],
)
def test_without_a_kernel(command, file, arguments, message):
    result = command("inspect", *arguments)
    assert result.status == 1
    assert message in result.err
