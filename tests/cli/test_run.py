"""``pallasite run``: kernels of Python files, PTX files, reports."""

from __future__ import annotations

import contextlib
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

import pallasite
from pallasite import plugins
from pallasite.cli.run_arguments import Argument, argument, make, random_array
from pallasite.extensions import RunReport
from pallasite_std.host_calls import run_on_host

FILE = pathlib.Path(__file__).parent / "runs_for_cli.py"


@pytest.fixture
def run(command):
    """Runs ``pallasite run`` on the simulator, on a kernel of the file for these tests."""

    def run(name, *options):
        result = command("run", f"{FILE}::{name}", "--executor", "simulator", *options)
        return result

    return run


def words(text):
    return " ".join(text.split())


def test_random_inputs(run):
    result = run("triple")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("triple on simulator\n")
    assert "0 float32[512] " in words(result.out)
    assert "check: correct" in result.out
    assert run("triple").out == result.out
    assert run("triple", "--seed", "1").out != result.out


def test_given_inputs(run, tmp_path):
    result = run("triple", "--arg", "f32[512]:iota", "--save", tmp_path / "new")
    assert "0 float32[512] 0 1533 766.5 0, 3, 6, 9, ..." in words(result.out)
    assert "check: correct" in result.out
    saved = np.load(tmp_path / "new" / "output_0.npy")
    np.testing.assert_array_equal(saved, 3 * np.arange(512))
    np.save(tmp_path / "x.npy", np.full(512, 2, np.float32))
    for text in (tmp_path / "x.npy", f"f32[512]:{tmp_path / 'x.npy'}"):
        assert "0 float32[512] 6 6 6 6, 6, 6, 6, ..." in words(run("triple", "--arg", text).out)


def test_files_of_types_that_numpy_does_not_know(run, tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.full(512, 2, ml_dtypes.bfloat16))
    result = run("triple", "--arg", path)
    assert result.status == 1
    assert "none of numbers\n  got: void16[512]\n  try: say the type" in result.err
    read = make(argument(f"bf16[512]:{path}"), np.random.default_rng(0))
    np.testing.assert_array_equal(read, np.full(512, 2, ml_dtypes.bfloat16))


def test_inputs_of_the_file(run):
    result = run("thrice")
    assert result.status == 1
    assert "0 float32[512] 27 27 27" in words(result.out)
    assert "check: wrong: 27, not 26" in result.out


def test_examples(run):
    result = run("right")
    assert result.status == 0
    assert "check: correct, relative error 0.0e+00" in result.out
    result = run("wrong")
    assert result.status == 1
    assert "check: wrong: error " in result.out


def test_listing(command):
    result = command("run", FILE)
    assert result.status == 0
    lines = [line.split()[0].partition("::")[2] for line in result.out.splitlines()[1:]]
    assert {"triple", "thrice", "beyond", "right", "wrong"} <= set(lines)
    assert not [line for line in lines if line.endswith(("_args", "_check"))]


def test_target(run):
    result = run("triple", "--target", "sm_100", "--statistics")
    assert result.out.startswith("triple for sm_100 on simulator\n")
    assert "kernel triple for sm_100: 4 blocks" in result.out
    assert "on B200 with 4 of 148 multiprocessors" in result.out
    result = run("triple", "--target", "sm_1")
    assert (result.status, result.err.splitlines()[0]) == (
        1,
        "error: no target named 'sm_1' (from --target)",
    )


def test_statistics(run):
    result = run("triple", "--statistics")
    assert "kernel triple for sm_90a: 4 blocks" in result.out
    assert "global write 2,048" in words(result.out)
    assert "kernel triple" not in run("triple").out


def test_blocks(run):
    result = run("triple", "--blocks", "0,2-3", "--statistics")
    assert "3 of 4 blocks" in result.out
    assert "check" not in result.out
    result = run("triple", "--blocks", "4")
    assert result.status == 1
    assert "error: there is no such block in the grid" in result.err
    result = run("triple", "--blocks", "1-x")
    assert result.status == 2
    assert "'1-x' is no list of blocks" in result.err


def test_processes(run):
    one, two = (run("triple", "--statistics", "--processes", n) for n in (1, 2))
    assert one.out == two.out
    assert run("triple", "--processes", "0").status == 2


def test_progress(run):
    assert "%|" in run("triple", "--progress").err
    assert run("triple", "--no-progress").err == ""


def test_findings(run, monkeypatch):
    arguments = ("forgetful", "--arg", "f32[512]")
    assert run(*arguments).status == 0
    result = run(*arguments, "--sanitize")
    assert result.status == 1
    assert "1 error in kernel forgetful:\n  1. " in result.out
    assert f"{FILE}:{line_of('tile[...] + x_ref')}" in result.out
    assert run(*arguments, "--checks", "races").status == 0
    assert run(*arguments, "--checks", "initialized").status == 1
    monkeypatch.setenv("PALLASITE_SANITIZE", "on")
    assert run(*arguments).status == 1
    assert run(*arguments, "--no-sanitize").status == 0
    result = run(*arguments, "--checks", "nonsense")
    assert "error: there is no such group of checks" in result.err


def line_of(text):
    lines = FILE.read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line)


def test_printed_text_comes_first(run):
    result = run("talkative", "--arg", "f32[512]:2")
    assert result.out.startswith("first: 2\ntalkative on simulator\n")


def test_json(run, tmp_path):
    result = run("forgetful", "--arg", "f32[512]", "--sanitize", "--statistics", "--json", "-")
    assert result.status == 1
    data = result.json
    assert (data["what"], data["executor"], data["good"]) == ("forgetful", "simulator", False)
    assert data["outputs"][0]["shape"] == [512]
    (kernel,) = data["kernels"]
    assert kernel["name"] == "forgetful" and len(kernel["findings"]) == 1
    assert kernel["statistics"]["bytes"]["global"]["write"] == 2048
    path = tmp_path / "report.json"
    result = run("thrice", "--json", path)
    assert result.out.startswith("thrice on simulator")
    data = json.loads(path.read_text())
    assert data["check"] == {"correct": False, "text": "wrong: 27, not 26"}
    assert [kernel["name"] for kernel in data["kernels"]] == ["triple"] * 3


# Errors -------------------------------------------------------------------------------------------


def test_errors_of_kernels(run):
    result = run("beyond", "--arg", "f32[512]:5")
    assert result.status == 1
    assert result.err.startswith(f"error: {FILE}:{line_of('ds(jnp.int32(x_ref[0])')}")
    assert "accesses memory out of bounds" in result.err
    assert run("beyond", "--arg", "f32[512]:0").status == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "has no kernel 'nothing'"),
        (("fails", "--arg", "f32[2]"), "RuntimeError: no luck"),
        (("beyond",), "it is not known for which arguments to compile 'beyond'"),
        (("triple", "--arg", "out:f32[512]"), "an argument that only a PTX kernel can have"),
        (("triple", "--arg", "no.npy"), "cannot read no.npy"),
        (("triple", "--grid", "4"), "says itself how it is launched"),
        (("triple", "--arg", "i8[512]:300"), "300 is not a number of type int8"),
        (("triple", "--arg", "f64[512]"), "--arg f64[512], which would become float32"),
    ],
)
def test_user_errors(run, arguments, message):
    result = run(*arguments)
    assert result.status == 1
    assert result.err.startswith("error: ") and message in result.err


@pytest.mark.parametrize("text", ["f32", "f32[4]:many", "x32[4]", "out:", "i32=x", "x.txt"])
def test_malformed_arguments(run, text):
    result = run("triple", "--arg", text)
    assert result.status == 2
    assert "argument --arg" in result.err


# Executors ----------------------------------------------------------------------------------------


class Doubling:
    """An executor without reports, which doubles its inputs."""

    @pallasite.hookimpl
    def pallasite_executors(self):
        def run(compiled, *operands, request):
            return run_on_host(
                lambda _, arrays: [2 * array for array in arrays], compiled, *operands
            )

        return [pallasite.Executor(name="doubling", platforms=("cpu",), run=run, priority=-1)]


class Reporting:
    """An executor that gives reports, and runs PTX."""

    def run(self, compiled, *operands, request):
        raise AssertionError("the command asks for reports")

    @pallasite.hookimpl
    def pallasite_executors(self):
        return [
            pallasite.Executor(
                name="reporting",
                platforms=("cpu",),
                run=self.run,
                priority=1000,
                inspect=lambda compiled, inputs, options: RunReport(
                    name=compiled.name,
                    outputs=tuple(inputs),
                    sections={"options": str(options)},
                    data={"processes": options.processes},
                ),
                run_ptx=lambda launch, options: RunReport(
                    name="ptx", sections={"launch": f"grid {launch.grid} block {launch.block}"}
                ),
            )
        ]


@pytest.fixture(params=[Doubling, Reporting])
def other(request):
    plugins.register(request.param(), "other")
    yield request.param
    plugins.unregister("other")


@pytest.mark.parametrize("other", [Doubling], indirect=True)
def test_executor_without_reports(command, other):
    result = command("run", f"{FILE}::triple", "--arg", "f32[512]:4", "--executor", "doubling")
    assert result.out.startswith("triple on doubling\n")
    assert "0 float32[512] 8 8 8" in words(result.out)
    assert result.status == 1 and "check: wrong" in result.out
    for option in ("--statistics", "--sanitize", "--progress"):
        result = command("run", f"{FILE}::triple", "--executor", "doubling", option)
        assert f"error: executor 'doubling' cannot do this\n  got: {option}" in result.err
    result = command("run", "x.ptx", "--grid", "1", "--block", "1", "--executor", "doubling")
    assert "cannot read x.ptx" in result.err


@pytest.mark.parametrize("other", [Reporting], indirect=True)
def test_the_executor_of_the_highest_priority(command, other, tmp_path):
    result = command("run", f"{FILE}::triple", "--processes", "7", "--json", "-")
    if not result.json["executor"].startswith("NVIDIA"):
        assert result.json["executor"] == "reporting"
        assert result.json["kernels"][0]["processes"] == 7
    (tmp_path / "x.ptx").write_text("anything")
    result = command("run", tmp_path / "x.ptx", "--grid", "3,2", "--block", "64")
    assert "launch: grid (3, 2, 1) block (64, 1, 1)" in result.out


def test_unknown_executors(command):
    result = command("run", f"{FILE}::triple", "--executor", "nothing")
    assert result.err.startswith(
        "error: no executor named 'nothing'\n  expected: one of gpu, jax-launcher, simul"
    )


def test_no_gpu(command, monkeypatch):
    monkeypatch.setattr("pallasite.cli.run._backend", lambda: "cpu")
    result = command("run", f"{FILE}::triple", "--executor", "gpu")
    assert result.status == 1
    assert "executor 'gpu' needs a CUDA GPU" in result.err


def test_an_executor_for_the_gpu_by_its_name(command, monkeypatch):
    monkeypatch.setattr("pallasite.cli.run._backend", lambda: "cpu")
    result = command("run", f"{FILE}::triple", "--executor", "jax-launcher")
    assert result.status == 1
    assert "executor 'jax-launcher' needs a CUDA GPU that JAX can use" in result.err
    chosen = []
    monkeypatch.setattr("pallasite.cli.run._backend", lambda: "gpu")
    monkeypatch.setattr(
        "pallasite.cli.run._observed",
        lambda *_: contextlib.nullcontext(chosen.append(pallasite.config.get("executor"))),
    )
    command("run", f"{FILE}::triple", "--executor", "jax-launcher")
    command("run", f"{FILE}::triple", "--executor", "gpu")
    assert chosen == ["jax-launcher", None]


def test_no_executor(command, monkeypatch):
    monkeypatch.setattr("pallasite.cli.run._backend", lambda: "cpu")
    with pallasite.config.scoped(disabled_plugins="simulator"):
        result = command("run", f"{FILE}::triple")
    assert result.status == 1
    assert "no installed plugin has an executor" in result.err
    assert "enable plugin 'simulator'" in result.err


# PTX ----------------------------------------------------------------------------------------------

ADD = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry axpy(.param .u64 x, .param .u64 y, .param .u32 n, .param .f32 a)
{
.reg .b32 %r<5>; .reg .b64 %d<4>; .reg .f32 %f<4>; .reg .pred %p;
ld.param.u64 %d0, [x]; ld.param.u64 %d1, [y]; ld.param.u32 %r0, [n]; ld.param.f32 %f3, [a];
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r4, %r1, %r2, %r3;
setp.ge.u32 %p, %r4, %r0;
@%p ret;
mul.wide.u32 %d3, %r4, 4;
add.u64 %d0, %d0, %d3;
add.u64 %d1, %d1, %d3;
ld.global.f32 %f0, [%d0];
ld.global.f32 %f1, [%d1];
fma.rn.f32 %f2, %f0, %f3, %f1;
st.global.f32 [%d1], %f2;
ret;
}
"""


@pytest.fixture
def ptx(command, tmp_path):
    """Runs the PTX on the simulator."""
    file = tmp_path / "axpy.ptx"
    file.write_text(ADD)

    def run(*options, grid="4", block="128", name=""):
        launch = ("--grid", grid, "--block", block) if grid else ()
        return command("run", f"{file}{name}", "--executor", "simulator", *launch, *options)

    return run


def arguments(*texts):
    return [word for text in texts for word in ("--arg", text)]


GOOD = arguments("f32[500]:iota", "inout:f32[500]:ones", "u32=500", "f32=0.5")


def test_ptx(ptx, tmp_path):
    result = ptx(*GOOD, "--save", tmp_path)
    assert (result.status, result.err) == (0, "")
    assert "axpy.ptx on simulator" in result.out
    assert "0 float32[500] 1 250.5 125.75 1, 1.5, 2, 2.5, ..." in words(result.out)
    np.testing.assert_array_equal(np.load(tmp_path / "output_0.npy"), 1 + np.arange(500) / 2)
    assert words(ptx(*GOOD, name="::axpy").out).endswith("1, 1.5, 2, 2.5, ...")
    assert (
        "kernel axpy for sm_90: 2 of 4 blocks" in ptx(*GOOD, "--statistics", "--blocks", "0-1").out
    )
    assert "on B200" in ptx(*GOOD, "--statistics", "--target", "sm_100").out


def test_outputs_begin_with_rubbish(ptx):
    rubbish = float(np.frombuffer(b"\xcd" * 4, np.float32)[0])
    result = ptx(*arguments("f32[500]:zeros", "out:f32[500]", "u32=500", "f32=0"), "--json", "-")
    assert result.json["outputs"][0]["max"] == rubbish


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("f32[500]", "f32[500]", "u32=500", "f32=1"), "accesses memory read-only"),
        (("f32[499]", "inout:f32[500]", "u32=500", "f32=1"), "behind argument 0 (1996 bytes)"),
        (("f32[500]", "inout:f32[500]", "u64=500", "f32=1"), "has the wrong size"),
        (("f32[500]", "inout:f32[500]"), "wrong number of arguments"),
        (("null", "inout:f32[500]", "u32=500", "f32=1"), "accesses memory out of bounds"),
    ],
)
def test_errors_of_ptx(ptx, texts, message):
    result = ptx(*arguments(*texts))
    assert result.status == 1
    assert result.err.startswith("error: ") and message in result.err


def test_wrong_use_of_ptx(ptx, command, tmp_path):
    result = ptx(grid=None)
    assert "error: --grid is missing: PTX does not say how it is launched" in result.err
    assert ptx(grid="4,x").status == 2
    assert "there is no kernel 'other'" in ptx(*GOOD, name="::other").err
    assert "--set is for functions" in ptx(*GOOD, "--set", "a=1").err
    (tmp_path / "bad.ptx").write_text("rubbish")
    result = command("run", tmp_path / "bad.ptx", "--grid", "1", "--block", "1")
    assert result.err.startswith("error: PTX line 1, column 1: ")
    result = command("run", tmp_path / "none.ptx", "--grid", "1", "--block", "1")
    assert "cannot read" in result.err


# Values -------------------------------------------------------------------------------------------


def test_values():
    generator = np.random.default_rng(0)
    assert argument("out:bf16[4,2]") == Argument(
        argument("bf16[4,2]").type, "rubbish", read=False, written=True
    )
    for text, expected in (
        ("i32=5", np.int32(5)),
        ("i8=-5", np.int8(-5)),
        ("f16=1e3", np.float16(1000)),
        ("pred=true", np.bool_(True)),
        ("u8[3]:ones", np.ones(3, np.uint8)),
        ("bf16[2,2]:iota", np.arange(4).reshape(2, 2).astype(ml_dtypes.bfloat16)),
        ("f32[2]:-0.5", np.full(2, -0.5, np.float32)),
        ("out:u8[2]", np.full(2, 0xCD, np.uint8)),
    ):
        value = make(argument(text), generator)
        assert value.dtype == expected.dtype and isinstance(value, type(expected))
        np.testing.assert_array_equal(value, expected)
    assert make(argument("null"), generator) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "uint4", "bool"])
def test_random_values(dtype):
    value = random_array(np.random.default_rng(0), (1000,), dtype)
    assert value.dtype == dtype
    assert len(np.unique(value)) >= (2 if dtype == "bool" else 16 if dtype == "uint4" else 50)
    wide = value.astype(np.float64)
    assert np.isfinite(wide).all() and abs(wide).max() <= 100
