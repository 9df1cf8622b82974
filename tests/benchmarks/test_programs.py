"""The programs: rows, references, tables, options, and a run from the command line."""

import dataclasses
import json
import pathlib

import attention
import contest
import jax
import jax.numpy as jnp
import matmul
import numpy as np
import program
import pytest
import timing
from contest import Result, RowResult
from tests import python_processes

BENCHMARKS = pathlib.Path(matmul.__file__).parent


def parse(*argv: str):
    return program.parse(program.parser("a program"), argv)


def run(row: contest.Row, contenders: list[contest.Contender], *names: str) -> RowResult:
    chosen = [one for one in contenders if one.name in names]
    options = contest.Options(rounds=2, calls=4)
    return contest.run_row(row, chosen, options, timing.ClockTimer())


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration of a pretended kernel of ours."""

    tile: int = 64
    group: int = 8
    grid_minor: str = "m"
    split: str = "m"


@pytest.fixture
def our_operations(monkeypatch: pytest.MonkeyPatch) -> list[Config | None]:
    """Ours are JAX's own operations; has the configurations they were called with."""
    configs: list[Config | None] = []

    def product(a, b, *, transpose_b=False, out_dtype=None, config=None):
        configs.append(config)
        b = b.T if transpose_b else b
        return jnp.dot(a, b, preferred_element_type=out_dtype or a.dtype)

    def attend(q, k, v, *, causal=False, config=None):
        configs.append(config)
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    operations = {
        "matmul": product,
        "attention": attend,
        "matmul_configs": lambda m, n, k, dtype, out_dtype: [
            Config(tile, group) for tile in (64, 128) for group in (8, 4, 16)
        ],
    }
    monkeypatch.setattr(program, "our_operation", operations.get)
    return configs


@pytest.mark.parametrize("group", matmul.TINY_SHAPES)
def test_products_of_all_groups(group: str, our_operations: list[Config | None]):
    (shape,) = matmul.TINY_SHAPES[group]
    row = matmul.make_row(group, shape)
    a, b = row.inputs(3)
    b = b.T if group == matmul.FP8 else b
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(row.reference(*row.inputs(3)), expected, rtol=1e-4, atol=1e-4)
    result = run(row, matmul.contenders(row, parse()), "ours", "xla")
    for one in result.results:
        assert one.milliseconds is not None, one.note
        assert 0 < one.errors["norm"] < 4e-3
    names = ["xla"] if group == matmul.PEAK else ["ours", "xla"]
    assert [one.contender for one in result.results] == names


def test_a_single_wrong_element_is_seen():
    row = matmul.make_row(matmul.SQUARE, (128, 256, 128))
    reference = row.reference(*row.inputs(0))
    right = reference.astype(jnp.bfloat16)
    assert all(row.errors(right, reference)[n] < limit for n, limit in row.limits.items())
    wrong = right.at[17, 200].set(0)
    assert row.errors(wrong, reference)["largest"] > row.limits["largest"]
    with pytest.raises(contest.WrongResultError, match=r"float32\[128, 256\]"):
        row.errors(reference, reference)


def problems(backward: bool):
    return [p for p in attention.problems(rehearse=True) if p.backward == backward]


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_the_reference(causal: bool):
    problem = attention.Problem(2, 64, 3, 32, causal, backward=True)
    row = attention.make_row(problem)
    q, k, v, do = (x.astype(jnp.float32) for x in row.inputs(0))

    def attend(q, k, v):
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(q, k, v, is_causal=problem.causal)

    out, pull = jax.vjp(attend, q, k, v)
    for result, expected in zip(row.reference(q, k, v, do), pull(do), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-5)
    forward = attention.make_row(dataclasses.replace(problem, backward=False))
    np.testing.assert_allclose(forward.reference(q, k, v), out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_contenders(backward: bool, our_operations: list[Config | None]):
    problem = problems(backward)[-1]
    assert problem.causal
    row = attention.make_row(problem)
    result = run(row, attention.contenders(problem, parse()), "ours", "cudnn")
    ours, rival = result.results
    assert ours.milliseconds is not None, ours.note
    if jax.default_backend() != "gpu":
        assert rival.note == "RuntimeError: cuDNN not found."


def test_a_wrong_chunk_of_attention_is_seen():
    row = attention.make_row(attention.Problem(1, 512, 4, 64, False, False))
    reference = row.reference(*row.inputs(0))
    right = reference.astype(jnp.bfloat16)
    assert all(row.errors(right, reference)[n] < limit for n, limit in row.limits.items())
    wrong = right.at[0, 200:204, 3].multiply(1.5)
    assert row.errors(wrong, reference)["chunk"] > row.limits["chunk"]


def test_operations_and_bytes():
    assert matmul.make_row(matmul.SQUARE, (4096, 8192, 2048)).flops == 2 * 4096 * 8192 * 2048
    fp8 = matmul.make_row(matmul.FP8, (16, 32, 64))
    assert fp8.bytes == 16 * 64 + 32 * 64 + 2 * 16 * 32
    rows = {p.name: p for p in attention.problems(rehearse=False)}
    assert len(rows) == 16
    forward = rows["forward_s4096_d128"]
    assert forward.flops == 4 * 4 * 16 * 4096 * 4096 * 128
    assert rows["forward_causal_s4096_d128"].flops == forward.flops // 2
    assert rows["backward_s4096_d128"].flops == forward.flops * 5 // 2
    assert {p.batch * p.sequence for p in rows.values()} == {16384}


def named(name: str, group: str, flops: int, **milliseconds: float | None) -> RowResult:
    results = [Result(contender, milliseconds=ms) for contender, ms in milliseconds.items()]
    return RowResult(name, group, flops, 10**9, results)


def test_table_of_products(capsys: pytest.CaptureFixture[str]):
    rows = [
        named("peak_8192x8192x16384", matmul.PEAK, 8 * 10**11, xla=1.0, torch=1.25),
        named("bf16_4096x4096x4096", matmul.SQUARE, 4 * 10**11, ours=1.0, xla=0.5, torch=2.0),
        named("fp8_8192x8192x8192", matmul.FP8, 10**12, ours=0.5, torch=1.0, upstream=None),
        named("skinny_16x8192x8192", matmul.SKINNY, 10**9, ours=0.5, xla=0.5),
    ]
    summary = matmul.print_table(rows, {"bandwidth": 4e12, "bandwidth_by": "copy"})
    assert summary["peaks"] == {"bf16": 8e14, "fp8": 2e15}
    assert summary["ours_of_peak"] == {
        "peak_8192x8192x16384": None,
        "bf16_4096x4096x4096": 0.5,
        "fp8_8192x8192x8192": 1.0,
        "skinny_16x8192x8192": 0.5,
    }
    assert summary["geometric_means"] == pytest.approx(
        {matmul.SQUARE: 0.5, matmul.FP8: 2.0, matmul.SKINNY: 1.0}
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split() == (
        ["fp8_8192x8192x8192", "500.0", "2000.0", "-", "failed", "1000.0", "100.0", "%", "2.000"]
    )
    assert "peak: bf16 800.0 TFLOP/s, fp8 2000.0 TFLOP/s" in lines
    assert lines[-1].endswith("bf16 square 0.500, fp8 2.000, skinny 1.000")


def test_table_of_attention(capsys: pytest.CaptureFixture[str]):
    rows = [
        named("forward_s4096_d128", "forward", 10**12, ours=2.0, cudnn=4.0, torch=3.0),
        named("forward_s4096_d64", "forward", 10**12, ours=2.0, cudnn=1.0, torch=None),
    ]
    summary = attention.print_table(rows, {})
    assert summary["geometric_means"] == {"forward": pytest.approx((1.5 * 0.5) ** 0.5)}
    assert "500.0" in capsys.readouterr().out


def candidates(our_operations: list[Config | None], *argv: str) -> list[str]:
    """Labels of ours that are tried with these options, each faster than the one before."""
    chosen = matmul.ours(matmul.SQUARE, (64, 64, 64), parse(*argv))
    labels, milliseconds = [], 10.0
    a = jnp.ones((64, 64), jnp.bfloat16)
    try:
        candidate = next(chosen)
        while True:
            labels.append(candidate.label)
            candidate.call(a, a)
            milliseconds -= 1.0
            candidate = chosen.send(milliseconds)
    except StopIteration:
        return labels


def test_our_default_and_changed_configurations(our_operations: list[Config | None]):
    assert candidates(our_operations) == ["default"]
    assert our_operations == [None]
    assert candidates(our_operations, "--config", "tile=256", "split=n") == ["tile=256 split=n"]
    assert our_operations[-1] == Config(256, split="n")
    with pytest.raises(program.OptionError, match="the fields are tile, group, grid_minor, split"):
        candidates(our_operations, "--config", "tiles=2")


def test_our_configurations_are_tuned_in_two_steps(our_operations: list[Config | None]):
    assert candidates(our_operations, "--tune") == [
        "all fields at their defaults",
        "tile=128",
        "tile=128 group=4",
        "tile=128 group=16",
    ]
    assert len(candidates(our_operations, "--tune", "--tune-limit", "2")) == 3


def test_variants_change_one_field():
    found = program.variants(Config(), tile=(64, 128), split=("n",), stages=(2, 3))
    assert found == [Config(tile=128), Config(split="n")]

    @dataclasses.dataclass(frozen=True)
    class Even:
        number: int = 2

        def __post_init__(self):
            if self.number % 2:
                raise ValueError("odd")

    assert program.variants(Even(), number=(1, 2, 3, 4)) == [Even(4)]


def test_options_that_ours_cannot_follow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program, "our_operation", {}.get)
    with pytest.raises(program.OptionError, match="no list of our configurations"):
        next(matmul.ours(matmul.SQUARE, (64, 64, 64), parse("--tune")))


def test_selection():
    arguments = parse("--rows", "fp8", "skinny_16", "--code-time", "0")
    this = matmul.benchmark(arguments)
    assert program.selected(this, arguments) == [
        "skinny_16x8192x8192",
        "fp8_4096x4096x4096",
        "fp8_8192x8192x8192",
        "fp8_4096x7168x16384",
    ]
    assert len(program.selected(this, parse("--quick"))) == len(matmul.QUICK) + len(this.kernels)
    with pytest.raises(SystemExit, match="no row has int4 in its name; there are peak_8192"):
        program.selected(this, parse("--rows", "int4"))
    assert program.takes_part("ours", parse()) and not program.takes_part(
        "ours", parse("--ours", "none")
    )
    assert program.takes_part("xla", parse()) and not program.takes_part("xla", parse("--rivals"))


def test_a_run_from_the_command_line(tmp_path: pathlib.Path):
    path = tmp_path / "rows.json"
    command = [BENCHMARKS / "matmul.py", "--rehearse", "--timing", "clock"]
    command += ["--ours", "none", "--rivals", "xla", "upstream", "--rows", "bf16", "fp8"]
    command += ["--seconds", "3600", "--step-seconds", "3600"]
    done = python_processes.run([*command, "--code-time", "0", "--json", path])
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    assert data["benchmark"] == "matmul"
    assert data["machine"]["jax"] == jax.__version__
    assert data["facts"]["bandwidth"] > 0
    assert data["arguments"][0] == "--rehearse"
    rows = [RowResult.from_json(row) for row in data["rows"]]
    assert [row.name for row in rows] == ["bf16_128x256x128", "fp8_128x256x128"]
    for row in rows:
        assert row.milliseconds("xla") is not None
        if jax.default_backend() != "gpu":
            assert row.milliseconds("upstream") is None
            assert f"upstream: {row.results[1].note}" in done.stdout
    assert "failed" in done.stdout
    assert "ours / best rival, geometric means: bf16 square -, fp8 -" in done.stdout
