"""The benchmark of the matrix product in steps, and the table that it writes."""

import dataclasses
import json
import pathlib

import contest
import matmul
import matmul_steps
import pytest
import timing
from contest import Result, RowResult


def row_of(**milliseconds: float | None) -> RowResult:
    results = [Result(name, milliseconds=ms, calls=40) for name, ms in milliseconds.items()]
    return RowResult("bf16_4096x4096x4096", matmul.SQUARE, 10**12, 10**9, results)


@pytest.fixture
def row() -> RowResult:
    return row_of(step1_tile=4.0, step2_swizzle=2.0, step3_ring=None, ours=1.0, xla=1.25)


def test_cells(row: RowResult):
    assert matmul_steps.cells(row) == [
        ("step1_tile", "4000", "250.0", "-", "0.312"),
        ("step2_swizzle", "2000", "500.0", "2.00", "0.625"),
        ("step3_ring", "-", "failed", "-", "-"),
        ("ours", "1000", "1000.0", "-", "1.250"),
        ("xla", "1250", "800.0", "-", "1.000"),
    ]


def test_table_on_the_terminal(row: RowResult, capsys: pytest.CaptureFixture[str]):
    summary = matmul_steps.print_table([row], {})
    assert summary["rates"][row.name]["step2_swizzle"] == 5e14
    assert summary["rates"][row.name]["step3_ring"] is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["XLA", "1250", "800.0", "-", "1.000"]


def test_table_of_the_page(row: RowResult, tmp_path: pathlib.Path):
    data = {
        "machine": {"device": "NVIDIA H200", "jax": "0.11.2"},
        "rows": [dataclasses.asdict(row)],
    }
    source, page = tmp_path / "run.json", tmp_path / "page.md"
    source.write_text(json.dumps(data))
    page.write_text(f"before\n{matmul_steps.BEGIN}\nold\n{matmul_steps.END}\nafter\n")
    for _ in range(2):  # What is there is replaced.
        matmul_steps.render(source, page)
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith(f"{matmul_steps.END}\nafter\n")
        assert "old" not in text
        assert text.count("| 2. 128-byte swizzle | 2000 | 500.0 | 2.00 | 0.625 |") == 1
        assert "4096 x 4096 times 4096 x 4096" in text and "one NVIDIA H200" in text
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="has no <!-- measured: begin -->"):
        matmul_steps.render(source, page)


def test_the_page_has_a_place_for_it():
    text = matmul_steps.PAGE.read_text()
    assert text.index(matmul_steps.BEGIN) < text.index(matmul_steps.END)


def test_contenders():
    names = [one.name for one in matmul_steps.contenders()]
    assert names == list(matmul_steps.DESCRIPTIONS)


@pytest.mark.runs_kernels
def test_a_step_in_the_contest():
    row = matmul.make_row(matmul.SQUARE, matmul_steps.TINY_SHAPE)
    chosen = [one for one in matmul_steps.contenders() if one.name in ("step3_ring", "xla")]
    options = contest.Options(rounds=1, calls=1, trial_calls=1)
    result = contest.run_row(row, chosen, options, timing.ClockTimer())
    for one in result.results:
        assert one.milliseconds is not None, one.note
        assert 0 < one.errors["norm"] < 4e-3
