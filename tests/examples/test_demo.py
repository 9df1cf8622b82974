"""The demonstration: its table, what it says about missing features, its exit status."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pallasite
from examples import catalog, demo
from pallasite import gpu as plgpu


def examples_named(*names: str) -> list[catalog.Example]:
    return [one for one in catalog.all_examples() if one.name in names]


def test_table(capsys: pytest.CaptureFixture[str]):
    assert demo.compile_all(examples_named("vector_add_f32", "debug_print_f32")) == []
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line}
    assert rows["vector_add_f32"].split()[1:3] == ["0", "0"]
    assert rows["vector_add_f32"].endswith(" all")
    assert "debug_print_f32" in rows


def test_missing_feature_is_not_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PALLASITE_TARGET", "sm_90a")
    assert demo.compile_all(examples_named("warp_specialized_f32")) == []
    assert "sm_90 needs setmaxnreg" in capsys.readouterr().out


def test_failure_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def broken(x, y):
        raise ValueError("broken on purpose")

    monkeypatch.setenv("PALLASITE_TARGET", "sm_90a")
    example = dataclasses.replace(examples_named("vector_add_f32")[0], function=broken)
    monkeypatch.setattr(demo, "all_examples", lambda: [example])
    assert demo.main([]) == 1
    assert "FAILED vector_add_f32 on sm_90a: ValueError: broken" in capsys.readouterr().out
    assert demo.main(["no such example"]) == 1


def test_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo.jax, "default_backend", lambda: "cpu")
    with pallasite.config.scoped(disabled_plugins="simulator"):
        assert demo.run_all(examples_named("vector_add_f32")) == []
    out = capsys.readouterr().out
    assert "pip install 'pallasite[simulator]'" in out
    assert "pip install 'pallasite[cuda]'" in out


@pytest.mark.runs_kernels
def test_right_results(capsys: pytest.CaptureFixture[str], pallasite_executor: str):
    assert demo.run_all(examples_named("vector_add_f32", "debug_print_f32")) == []
    out = capsys.readouterr().out
    assert out.count("correct, relative error") == 2
    if pallasite_executor == "simulator":
        assert "Running them on 'cpu' by the executor 'simulator', with its checks:" in out
        assert "block 1 begins with" in out


@pytest.mark.runs_kernels
def test_wrong_result_is_reported(capsys: pytest.CaptureFixture[str]):
    example = examples_named("vector_add_f32")[0]
    wrong = dataclasses.replace(example, reference=lambda x, y: x - y)
    (failure,) = demo.run_all([wrong])
    assert failure.startswith("vector_add_f32: AssertionError: relative error")
    assert "vector_add_f32                FAILED" in capsys.readouterr().out


@pytest.mark.runs_kernels
def test_errors_of_kernels_are_reported(pallasite_executor: str):
    if pallasite_executor == "gpu":
        pytest.skip("a GPU does not look for races")

    def racing(x, y):
        def body(x_ref, y_ref, o_ref):
            thread = jax.lax.axis_index("t")
            o_ref[...] = x_ref[...] + thread.astype(x_ref.dtype)

        out_type = jax.ShapeDtypeStruct((128,), jnp.float32)
        return plgpu.kernel(body, out_type=out_type, num_threads=2, thread_name="t")(x[:128], y)

    example = dataclasses.replace(examples_named("vector_add_f32")[0], function=racing)
    (failure,) = demo.run_all([example])
    assert "SanitizerError" in failure and "data race in global memory" in failure
