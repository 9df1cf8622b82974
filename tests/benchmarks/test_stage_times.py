"""Times of stages: medians, caches, order, failures, and what can be measured."""

import json
import pathlib

import compile_time
import jax
import jax.numpy as jnp
import pytest
import stage_times
from stage_times import StageTimes

import pallasite
from pallasite import gpu as plgpu


def doubled(rows: int):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((rows, 128), jnp.float32),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(),
    )
    def double(x_ref, o_ref):
        row = jax.lax.axis_index("row")
        o_ref[row] = x_ref[row] * 2

    return double


ROWS = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def test_every_repetition_compiles_anew(ticking_clock: float):
    kernel, made = doubled(8), []

    def make():
        made.append(kernel)
        return kernel, (ROWS,)

    row = stage_times.measure("double", make, repeats=2)
    assert len(made) == 3
    assert list(row.milliseconds)[0] == "trace"
    assert {"lower", "llvm-optimize", "ptx-emit"} < set(row.milliseconds)
    # A kernel that is found in a cache brings back the times of its compilation, so that what is
    # left for tracing is less than nothing.
    assert all(value >= 1e3 * ticking_clock for value in row.milliseconds.values())
    assert row.total == pytest.approx(sum(row.milliseconds.values()))


def test_stages_of_several_kernels_add_up(monkeypatch: pytest.MonkeyPatch):
    def both(x):
        return doubled(24)(jnp.concatenate([x] * 3)), doubled(16)(jnp.concatenate([x, x]))

    compiled = []

    def compile_all(*args, **kwargs):
        compiled.extend(original(*args, **kwargs))
        return compiled

    original = pallasite.compile_all
    monkeypatch.setattr(pallasite, "compile_all", compile_all)
    found = stage_times.once(both, (ROWS,), "sm_90a", False)
    assert len(compiled) == 2
    lowered = [dict(kernel.timings)["lower"] for kernel in compiled]
    assert found["lower"] == pytest.approx(1e3 * sum(lowered))


def test_a_kernel_that_fails_has_a_note(capsys: pytest.CaptureFixture[str]):
    def make():
        raise NotImplementedError("not yet\nand more")

    row = stage_times.measure("later", make, repeats=1)
    assert row == StageTimes("later", note="NotImplementedError: not yet")
    sums = {"trace": 1.0, "infer layouts": 0.5, "lower": 2.5}
    rows = [StageTimes("sum", sums), row]
    stage_times.print_table(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == [
        "kernel",
        "trace",
        "infer",
        "layouts",
        "lower",
        "sum",
        "inference",
        "%",
    ]
    assert lines[3].split() == ["sum", "1.0", "0.5", "2.5", "4.000", "12.5"]
    assert lines[4].split() == ["later", "-", "-", "-", "-", "-"]
    assert lines[5] == "later: NotImplementedError: not yet"


def test_stages_are_in_their_order():
    rows = [
        StageTimes("a", {"trace": 1, "lower": 1, "ptx": 1}),
        StageTimes("b", {"trace": 1, "infer": 1, "lower": 1, "link": 1, "ptx": 1}),
    ]
    assert stage_times.ordered(rows) == ["trace", "infer", "lower", "link", "ptx"]
    assert stage_times.medians([{"a": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 2.0}]) == {"a": 2.0, "b": 1}


def test_what_can_be_measured():
    pytest.importorskip("absl", reason="JAX's kernels import it")
    lane = stage_times.published("lane")
    assert list(lane)[:2] == ["matmul, lane", "mixed, lane"] and len(lane) == 8
    row = stage_times.measure("mixed", lane["mixed, lane"], repeats=1)
    assert row.total is not None, row.note
    ours = stage_times.library()
    assert "matmul skinny_64x8192x8192" in ours and "library decode_b64_c8192" in ours
    assert "attention backward_s4096_d128" in ours and len(ours) == 13
    row = stage_times.measure("int4", ours["library int4_64x8192x8192"], repeats=1)
    assert row.total is not None, row.note


def test_a_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], ticking_clock: float):
    path = tmp_path / "rows.json"
    options = ["--repeats", "1", "--kernels", "rms_norm", "int4", "--stages", "library"]
    assert compile_time.main([*options, "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert [row["kernel"] for row in data["rows"]] == ["rms_norm"]
    stages = {row["kernel"]: row["milliseconds"] for row in data["stages"]}
    assert list(stages) == ["rms_norm", "library int4_64x8192x8192"]
    assert all(values["lower"] >= 1e3 * ticking_clock for values in stages.values())
    assert "milliseconds of each stage" in capsys.readouterr().out
