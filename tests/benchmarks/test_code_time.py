"""Times to machine code: steps of each compiler, other kernels each time, failures."""

import code_time
import contest
import jax.numpy as jnp
import pytest


def compiler(calls: list, name: str, fails_at: int | None = None):
    def make(repetition: int):
        calls.append((name, repetition))
        if repetition == fails_at:
            raise NotImplementedError(f"no {name} for {repetition}")
        return (lambda x: x * 2 + repetition), (jnp.ones((4 + repetition,)),)

    return make


def test_compilers_take_turns_on_different_kernels(
    capsys: pytest.CaptureFixture[str], ticking_clock: float
):
    calls: list = []
    kernel = code_time.Kernel("sum", {name: compiler(calls, name) for name in ("ours", "upstream")})
    ours, theirs = code_time.measure(kernel, repeats=2)
    assert calls == [
        *[("upstream", 0), ("ours", 0), ("ours", 1), ("upstream", 1), ("upstream", 2), ("ours", 2)]
    ]
    assert list(ours.steps) == list(code_time.STEPS)
    assert all(value >= 1e3 * ticking_clock for value in ours.steps.values())
    assert ours.total is not None and theirs.total is not None
    code_time.print_table([ours, theirs])
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[-1] == f"{theirs.total / ours.total:.3f}"
    assert lines[4].split()[-1] == "-"


def test_a_compiler_that_fails_is_reported(capsys: pytest.CaptureFixture[str]):
    calls: list = []
    kernel = code_time.Kernel(
        "sum", {"ours": compiler(calls, "ours"), "upstream": compiler(calls, "upstream", 1)}
    )
    ours, theirs = code_time.measure(kernel, repeats=2)
    assert ours.total is not None
    assert theirs == code_time.CodeTime(
        "sum", "upstream", note="NotImplementedError: no upstream for 1"
    )
    assert ("upstream", 2) not in calls
    code_time.print_table([ours, theirs])
    assert "sum: upstream: NotImplementedError: no upstream for 1" in capsys.readouterr().out


def test_a_skipped_compiler_and_a_broken_device(monkeypatch: pytest.MonkeyPatch):
    calls: list = []
    kernel = code_time.Kernel("sum", {"ours": compiler(calls, "ours", 0)})
    (skipped,) = code_time.measure(kernel, 1, skip={"ours": "it hung"})
    assert (skipped.note, calls) == ("it hung", [])

    def broken(self):
        raise RuntimeError("no more device")

    monkeypatch.setattr(type(contest.FRAMEWORKS["jax"]), "check", broken)
    with pytest.raises(contest.BrokenDeviceError, match="no ours for 0"):
        code_time.measure(kernel, 1)
