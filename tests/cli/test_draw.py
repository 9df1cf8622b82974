"""``pallasite inspect --draw``: pictures of a kernel's layouts, and of layouts alone."""

from __future__ import annotations

import pathlib
import xml.etree.ElementTree as ET

import pytest

from pallasite.drawing import draw_memory_layout, draw_register_layout
from pallasite.layouts import Replicated, Tiling, named, row_major, strided, tiled

SVG = "{http://www.w3.org/2000/svg}"
COPY = ("--target", "sm_90", "--arg", "bf16[64,64]")


def texts(path: pathlib.Path) -> list[str]:
    return [one.text or "" for one in ET.parse(path).getroot().iter(f"{SVG}text")]


# Kernels


def test_a_kernel(command, kernel, tmp_path):
    folder = tmp_path / "new" / "pictures"
    result = command("inspect", kernel("add"), "--target", "sm_90a", "--draw", folder)
    assert result.status == 0, result.err
    (path,) = folder.iterdir()
    assert path.name == "add-registers-1-strided-vector-2-256.svg"
    found = texts(path)
    assert found[0] == "strided(vector 2) float32[256]"
    line = "kernels_for_cli.py:21: out_ref[...] = x_ref[...] + y_ref[...] (get, add: float32)"
    assert line in " ".join(found)
    assert "drawings\n" in result.out and str(path) in result.out
    assert result.out.startswith("kernel add for sm_90a\n"), "the report is there as well"


def test_shared_memory_of_a_kernel(command, kernel, tmp_path):
    result = command("inspect", kernel("copy"), *COPY, "--draw", tmp_path, "--json")
    assert result.status == 0, result.err
    ((drawing,),) = [report["drawings"] for report in result.json]
    assert drawing == {
        "file": str(tmp_path / "copy-shared-1-64x64.svg"),
        "kind": "shared",
        "layout": "[(64:64), (64:1)]",
        "arrays": ["buffer: bfloat16[64, 64]"],
    }
    found = texts(pathlib.Path(drawing["file"]))
    assert found[0] == "bfloat16[64, 64] in shared memory, no swizzle"
    line = "plgpu.copy_gmem_to_smem(x_ref, buffer, barrier) (copy_gmem_to_smem: buffer bfloat16)"
    assert line in " ".join(found)


def test_a_cache_does_not_hide_layouts(command, kernel, tmp_path):
    command("compile", kernel("add"), "--target", "sm_90a", "-o", tmp_path / "add.ptx")
    pictures = []
    for number in range(2):
        folder = tmp_path / str(number)
        assert command("inspect", kernel("add"), "--target", "sm_90a", "--draw", folder).status == 0
        (path,) = folder.iterdir()
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]


def test_all_kernels_of_a_function(command, kernel, tmp_path):
    result = command("inspect", kernel("both"), "--target", "sm_90", "--draw", tmp_path, "--json")
    assert [one["name"] for one in result.json] == ["scale", "add"]
    assert sorted(path.name.partition("-")[0] for path in tmp_path.glob("*.svg")) == [
        "add",
        "scale",
    ]
    for report in result.json:
        assert [one["file"] for one in report["drawings"]] == [
            str(path) for path in tmp_path.glob(f"{report['name']}-*.svg")
        ]


def test_one_kernel_of_several(command, kernel, tmp_path):
    folder = tmp_path / "one"
    result = command(
        "inspect", kernel("both"), "--target", "sm_90", "--only", "scale", "--draw", folder
    )
    assert result.status == 0, result.err
    assert [path.name.partition("-")[0] for path in folder.iterdir()] == ["scale"]


def test_kernels_of_one_name(command, tmp_path):
    """Two different ones get files of their own; one that is called twice is drawn once."""
    source = tmp_path / "kernels.py"
    source.write_text(
        """
import jax, jax.numpy as jnp
from pallasite import gpu as plgpu

def call(x):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1
    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out_type, kernel_name="same")(x)

def several(x, y):
    return call(call(x)), call(y)

several.example_inputs = (
    jax.ShapeDtypeStruct((256,), jnp.float32), jax.ShapeDtypeStruct((512,), jnp.float32)
)
"""
    )
    folder = tmp_path / "pictures"
    result = command(
        "inspect", f"{source}::several", "--target", "sm_90", "--draw", folder, "--json"
    )
    assert result.status == 0, result.err
    assert [one["name"] for one in result.json] == ["same", "same"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "same-2-registers-1-strided-vector-4-512.svg",
        "same-registers-1-strided-vector-2-256.svg",
    ]


def test_a_view_whose_start_is_computed(command, tmp_path):
    source = tmp_path / "kernels.py"
    source.write_text(
        """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from pallasite import gpu as plgpu

@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((8, 32), jnp.float32),
    scratch_types=[plgpu.SMEM((8, 64), jnp.float32)],
    grid=(2,),
    grid_names=("block",),
)
def shifted(x_ref, out_ref, tile):
    tile[...] = x_ref[...]
    out_ref[...] = tile[:, pl.ds(jax.lax.axis_index("block") * 8, 32)]
"""
    )
    options = ("--target", "sm_90", "--arg", "f32[8,64]")
    folder = tmp_path / "pictures"
    result = command("inspect", f"{source}::shifted", *options, "--draw", folder)
    assert result.status == 0, result.err
    noted = {
        path.name: "begins at an index that the kernel computes, drawn for 0" in texts(path)
        for path in folder.glob("*shared*")
    }
    assert noted == {"shifted-shared-1-8x64.svg": False, "shifted-shared-2-8x32.svg": True}


def test_without_draw_nothing_is_drawn(command, kernel):
    result = command("inspect", kernel("add"), "--target", "sm_90")
    assert "drawings" not in result.out
    (report,) = command("inspect", kernel("add"), "--target", "sm_90", "--json").json
    assert "drawings" not in report


def test_a_folder_that_cannot_be_made(command, kernel, tmp_path):
    (tmp_path / "file").write_text("")
    result = command("inspect", kernel("add"), "--target", "sm_90", "--draw", tmp_path / "file")
    assert result.status == 1
    assert f"error: cannot write into {tmp_path / 'file'}: " in result.err


# Layouts alone


def alone(command, tmp_path, *arguments) -> str:
    path = tmp_path / "layout.svg"
    result = command("inspect", "--draw", path, *arguments)
    assert result.status == 0, result.err
    assert result.out == ""
    return path.read_text()


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("WGMMA", named.resolve("WGMMA", (), {}, (64, 16), 32)),
        ("WG_STRIDED", strided((64, 16), 4)),
        ("WG_STRIDED(vec_size=2)", strided((64, 16), 2)),
        ("MMA_ACC(m_warps=2)", named.resolve("MMA_ACC", (None,), {"m_warps": 2}, (64, 16), 32)),
        (
            "TILED(((64, 4), (16, 4), (2,)), (-5,), (-3, Replicated(2)), -1)",
            tiled((64, 16), Tiling(((64, 4), (16, 4), (2,))), (-5,), (-3, Replicated(2)), -1),
        ),
    ],
)
def test_a_register_layout(command, tmp_path, text, layout):
    got = alone(command, tmp_path, "--layout", text, "--shape", "64x16", "--dtype", "f32")
    assert got == draw_register_layout(layout, name=text, dtype="float32")


def test_the_dtype_may_be_left_out(command, tmp_path):
    got = alone(command, tmp_path, "--layout", "WGMMA", "--shape", "64,16")
    assert got == draw_register_layout(named.resolve("WGMMA", (), {}, (64, 16), 32))


def test_the_dtype_chooses_operands(command, tmp_path):
    got = alone(command, tmp_path, "--layout", "MMA_LHS", "--shape", "64x32", "--dtype", "int8")
    layout = named.resolve("MMA_LHS", ("int8",), {}, (64, 32), 8)
    assert got == draw_register_layout(layout, name="MMA_LHS", dtype="int8")
    layout_text = "SMEM_GMEM_COPY(swizzle=64)"
    got = alone(
        command, tmp_path, "--layout", layout_text, "--shape", "64x64", "--dtype", "bfloat16"
    )
    layout = named.specification("SMEM_GMEM_COPY", ((64, 64), None, 64), {}, 16).layout((64, 64))
    assert got == draw_register_layout(layout, name=layout_text, dtype="bfloat16")


def test_a_memory_layout(command, tmp_path):
    options = ("--shape", "64x128", "--dtype", "bf16")
    got = alone(command, tmp_path, "--tiling", "8x64", "--swizzle", "128", *options)
    layout = row_major((8, 2, 8, 64), 16, 128).untile((8, 64))
    name = "tiling 8x64, swizzle 128 bytes"
    assert got == draw_memory_layout(layout, name=name, dtype="bfloat16")
    got = alone(command, tmp_path, "--swizzle", "16", *options)
    assert got == draw_memory_layout(row_major((64, 128), 16), name="no swizzle", dtype="bfloat16")
    got = alone(command, tmp_path, "--tiling", "8x8", *options)
    layout = row_major((8, 16, 8, 8), 16).untile((8, 8))
    assert got == draw_memory_layout(layout, name="tiling 8x8, no swizzle", dtype="bfloat16")


def test_standard_output(command):
    result = command("inspect", "--draw", "-", "--layout", "WGMMA_ROW", "--shape", "64")
    assert result.status == 0
    assert ET.fromstring(result.out).tag == f"{SVG}svg"


MEMORY = ("--shape", "64x64", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is nothing to inspect"),
        (("--draw", "x.svg"), "there is nothing to inspect"),
        (("--draw", "x.svg", *MEMORY), "there is nothing to inspect"),
        (("--layout", "WGMMA"), "add --draw OUT.svg --shape 64x64"),
        (("--tiling", "8x64", "--shape", "64x64", "--draw", "x.svg"), "add --dtype bfloat16"),
        (
            ("--layout", "WGMMA", "--swizzle", "64", *MEMORY, "--draw", "x.svg"),
            "a layout is of registers or of shared memory",
        ),
        (("a.py", "--draw", "x"), "expected: a.py::KERNEL"),
        (("a.py::f", "--layout", "WGMMA", "--draw", "x"), "--layout is for pictures without"),
        (
            ("--draw", "-", "--layout", "WGMMB", "--shape", "64x16"),
            "there is no register layout WGMMB",
        ),
        (
            ("--draw", "-", "--layout", "WGMMA", "--shape", "60x16"),
            "dimension 0 of shape (60, 16) does not tile",
        ),
        (("--draw", "-", "--layout", "f()()", "--shape", "64"), "'f()()' is no register layout"),
        (
            ("--draw", "-", "--layout", "WGMMA(print)", "--shape", "64"),
            "'WGMMA(print)' is no register layout",
        ),
        (("--draw", "-", "--layout", "WGMMA(2)", "--shape", "64x8"), "WGMMA takes no arguments"),
        (("--draw", "-", "--swizzle", "100", *MEMORY), "there is no swizzle of 100 bytes"),
        (
            ("--draw", "-", "--tiling", "8x32", "--swizzle", "128", *MEMORY),
            "put TilingTransform((8, 64)) before SwizzleTransform",
        ),
        (("--draw", "-", "--tiling", "7x64", *MEMORY), "cannot be cut into tiles of 7"),
        (
            ("--draw", "/no/such/folder/x.svg", "--layout", "WGMMA", "--shape", "64x16"),
            "cannot write /no/such/folder/x.svg",
        ),
    ],
)
def test_what_cannot_be_drawn(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = command("inspect", *arguments)
    assert result.status == 1
    assert message in result.err
    assert result.err.startswith("error: ") and "Traceback" not in result.err
    assert not list(tmp_path.glob("*.svg"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--shape", "64xa", "is not a list of extents"),
        ("--tiling", "0x4", "is not a list of extents"),
        ("--dtype", "float33", "unknown dtype"),
        ("--swizzle", "wide", "invalid int value"),
    ],
)
def test_wrong_usage(command, option, value, message):
    result = command("inspect", "--draw", "-", option, value)
    assert result.status == 2
    assert message in result.err
