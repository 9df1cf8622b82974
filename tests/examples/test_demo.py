"""The demonstration: its table, what it says about missing features, its exit status."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from examples import catalog, demo


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


def test_says_what_to_install(capsys: pytest.CaptureFixture[str]):
    if jax.default_backend() == "gpu" or demo.plugins.registry().executor_for("cpu"):
        pytest.skip("something can run kernels here")
    assert demo.run_all(examples_named("vector_add_f32")) == []
    assert "pip install 'pallasite[cuda]'" in capsys.readouterr().out


@pytest.mark.runs_kernels
def test_wrong_result_is_reported(capsys: pytest.CaptureFixture[str]):
    example = examples_named("vector_add_f32")[0]
    wrong = dataclasses.replace(example, reference=lambda x, y: x - y)
    assert demo.run_all([wrong])
