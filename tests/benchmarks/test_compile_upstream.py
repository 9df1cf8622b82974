"""The comparison of compile times with JAX's own compiler."""

from __future__ import annotations

import pytest

pytest.importorskip("absl", reason="JAX's kernels import it")
import compile_time
import compile_upstream
import jax
import jax_compiler


def test_without_its_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax_compiler, "missing", lambda: "there is none")
    with pytest.raises(SystemExit, match="--upstream: .* there is none"):
        compile_time.main(["--upstream"])


def test_pairs_are_the_same_kernels():
    """Each repetition is a kernel of its own, of the same types for both."""
    found = {one.name: one for one in compile_upstream.pairs(compile_time.KERNELS)}
    assert list(compile_time.KERNELS) == list(found)[:4] and len(found) == 12
    for name in ("tiled_copy", "published matmul"):
        ours, upstream = found[name].ours(1), found[name].upstream(1)
        assert jax.tree.leaves(ours[1]) == jax.tree.leaves(upstream[1])
    _, types = found["published matmul"].ours(2)
    assert types != found["published matmul"].ours(1)[1]


def test_medians_and_failures(capsys: pytest.CaptureFixture[str]):
    times = iter([(9.0, 9.0), (9.0, 9.0), (0.125, 0.0), (0.5, 0.0), (0.25, 0.0), (0.25, 0.125)])

    class Compilers:
        def __getattr__(self, who: str):
            return lambda function, args: next(times)

    pair = compile_upstream.Pair("k", lambda repeat: (None, ()), lambda repeat: (None, ()))
    row = compile_upstream._compare(pair, Compilers(), 2)
    assert row == compile_upstream.Comparison("k", 187.5, 62.5, 375.0, 2.5)

    def fails(repeat: int):
        raise NotImplementedError("not yet")

    times = iter([(1.0, 1.0)])
    failed = compile_upstream._compare(
        compile_upstream.Pair("f", fails, pair.upstream), Compilers(), 1
    )
    assert failed.note.startswith("ours: ") and "not yet" in failed.note and failed.ratio is None
    compile_upstream.print_table([row, failed])
    assert "upstream / ours" in capsys.readouterr().out
