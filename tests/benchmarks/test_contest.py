"""Contests: what is right takes part, the fastest candidate is chosen, failures are reported."""

import dataclasses
import itertools
import json
import types

import contest
import contest_tables
import harness
import jax.numpy as jnp
import pytest
from contest import Candidate, Contender, Result, Row, RowResult
from timing import Batch


class SleepyTimer:
    """Takes the time of a call from an attribute of the function."""

    description = "pretended"

    def __init__(self):
        self.batches: list[str] = []

    def batch(self, framework, call, sets, count):
        results = [call(*sets[i % len(sets)]) for i in range(count)]
        framework.wait(results)
        self.batches.append(call.__name__)
        return Batch([call.milliseconds] * count, 2 * call.milliseconds)


def function(name: str, milliseconds: float, compute=lambda x: x + 1):
    """A function of that name that pretends to take so long."""

    def call(x):
        return compute(x)

    call.__name__ = name
    call.milliseconds = milliseconds
    return call


def errors(result, reference):
    return {"largest": jnp.max(jnp.abs(result - reference))}


ROW = Row(
    name="plus_one",
    group="sums",
    flops=10**9,
    bytes=64,
    input_bytes=2**27,
    inputs=lambda seed: (jnp.arange(4.0) + seed,),
    reference=lambda x: x + 1,
    errors=errors,
    limits={"largest": 1e-6},
)


def contender(name: str, *functions) -> Contender:
    """A contender with candidates that need no preparation."""

    def candidates():
        for one in functions:
            yield Candidate(one.__name__, one)

    return Contender(name, "jax", candidates)


def raising(message: str):
    def compute(x):
        raise ValueError(message)

    return compute


def run(*contenders: Contender, **options) -> tuple[RowResult, SleepyTimer]:
    timer = SleepyTimer()
    arguments = {k: options.pop(k) for k in ("notify", "skip") if k in options}
    settings = contest.Options(**{"rounds": 3, "calls": 8, **options})
    return contest.run_row(ROW, contenders, settings, timer, **arguments), timer


def test_the_fastest_right_candidate_of_each_contender_is_timed():
    slow, fast = function("slow", 4.0), function("fast", 2.0)
    wrong = function("wrong", 1.0, lambda x: x + 1.5)
    result, timer = run(
        contender("ours", slow, wrong, fast), contender("rival", function("other", 3.0))
    )
    ours, rival = result.results
    assert (ours.label, ours.milliseconds, ours.errors) == ("fast", 2.0, {"largest": 0.0})
    assert (rival.label, rival.milliseconds) == ("other", 3.0)
    assert [t.milliseconds for t in ours.trials] == [4.0, None, 2.0]
    assert ours.trials[1].note == "WrongResultError: largest 5.00e-01, allowed are 1e-06"
    assert ours.quartiles == (2.0, 2.0)
    assert (ours.kernels, ours.elapsed) == (2.0, 4.0)
    assert ours.calls == 3 * 6  # of 12 ms each
    assert timer.batches.count("other") == 4  # one to try it, three rounds
    assert result.ratio() == 1.5
    assert result.rate("ours") == 10**9 / 2e-3


def test_elapsed_time_counts_where_the_row_says_so():
    row = dataclasses.replace(ROW, metric="elapsed")
    contenders = [contender("ours", function("slow", 4.0), function("fast", 2.0))]
    (ours,) = contest.run_row(row, contenders, contest.Options(), SleepyTimer()).results
    assert (ours.milliseconds, ours.kernels, ours.elapsed) == (4.0, 2.0, 4.0)
    assert ours.quartiles == (4.0, 4.0)


def test_rounds_are_interleaved():
    _, timer = run(*[contender(n, function(n, 1.0)) for n in ("ours", "a", "b")], rounds=5)
    rounds = [timer.batches[3 + 3 * i : 6 + 3 * i] for i in range(5)]
    assert all(sorted(one) == ["a", "b", "ours"] for one in rounds)
    assert len(set(map(tuple, rounds))) > 1


@pytest.mark.parametrize("result", [jnp.nan, jnp.inf])
def test_nan_is_wrong(result: float):
    bad = function("bad", 1.0, lambda x: x * result)
    row, _ = run(contender("ours", bad))
    assert row.milliseconds("ours") is None
    assert row.results[0].note.startswith("WrongResultError")


def test_what_fails_is_reported_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]):
    def no_candidates():
        raise ImportError("no such library")
        yield

    row, _ = run(
        contender("ours", function("good", 2.0)),
        contender("raises", function("bad", 1.0, raising("too many tiles\nand more"))),
        Contender("missing", "jax", no_candidates),
        contender("none"),
    )
    notes = {r.contender: r.note for r in row.results}
    assert notes == {
        "ours": "",
        "raises": "ValueError: too many tiles",
        "missing": "ImportError: no such library",
        "none": "no candidate",
    }
    assert row.ratio() is None
    assert contest_tables.rates(row, ["ours", "raises", "absent"]) == ["0.5", "failed", "-"]
    assert "Traceback" not in capsys.readouterr().err


def test_traceback_of_ours_is_printed_once(capsys: pytest.CaptureFixture[str]):
    bad = function("bad", 1.0, raising("this one of ours"))
    run(contender("ours", bad, bad))
    assert capsys.readouterr().err.count("Traceback") == 1


def test_a_result_that_changes_after_timing_is_wrong():
    calls = []

    def drifting(x):
        calls.append(x)
        return x + 1 + (len(calls) > 20)

    row, _ = run(contender("ours", function("drifting", 1.0, drifting)))
    assert row.milliseconds("ours") is None
    assert row.results[0].note.startswith("after timing: WrongResultError")


def test_preparation_and_output_are_not_part_of_the_call():
    def candidates():
        yield Candidate("scaled", function("half", 1.0), lambda x: (2 * x,), lambda y: (y + 1) / 2)

    row, _ = run(Contender("ours", "jax", candidates))
    assert row.milliseconds("ours") == 1.0


def test_candidates_learn_the_time_of_the_last():
    heard = []

    def candidates():
        heard.append((yield Candidate("slow", function("slow", 4.0))))
        heard.append((yield Candidate("bad", function("bad", 1.0, raising("no")))))
        heard.append((yield Candidate("fast", function("fast", 2.0))))

    run(Contender("ours", "jax", candidates))
    assert heard == [4.0, None, 2.0]


def test_tuning_ends_with_its_time(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(contest, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
    tried = contender("ours", *[function(f"f{i}", 1.0 + i) for i in range(9)])
    row, _ = run(tried, seconds=0.0)
    trials = row.results[0].trials
    assert [(t.label, t.note) for t in trials] == [("f0", ""), ("f1", "out of time")]
    assert row.results[0].calls == 2 * 8  # two rounds in any case


def test_skipped_contenders_have_the_reason():
    told = []
    row, _ = run(
        contender("ours", function("mine", 1.0)),
        contender("rival", function("other", 1.0)),
        skip={"rival": "it hung"},
        notify=told.append,
    )
    assert row.results[1] == Result("rival", note="it hung")
    assert told[0] == told[-1] == ""
    assert set(told) == {"", "ours"}


def test_a_device_that_no_longer_computes_ends_the_contest(monkeypatch: pytest.MonkeyPatch):
    def broken(self):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(type(contest.FRAMEWORKS["jax"]), "check", broken)
    with pytest.raises(contest.BrokenDeviceError, match="ValueError: the kernel failed"):
        run(contender("ours", function("bad", 1.0, raising("the kernel failed"))))


def test_json_keeps_everything():
    row, _ = run(
        contender("ours", function("good", 2.0), function("bad", 1.0, raising("no"))),
        contender("rival"),
    )
    assert RowResult.from_json(
        json.loads(json.dumps(dataclasses.asdict(row)))
    ) == dataclasses.replace(
        row,
        results=[
            dataclasses.replace(r, quartiles=r.quartiles and list(r.quartiles)) for r in row.results
        ],
    )


def row_of(group: str, ours: float | None, rival: float | None) -> RowResult:
    results = [Result("ours", milliseconds=ours), Result("rival", milliseconds=rival)]
    return RowResult(f"{group} {ours} {rival}", group, 10**9, 1, results)


def test_geometric_means_leave_out_what_is_missing():
    rows = [
        row_of("a", 1.0, 4.0),
        row_of("a", 1.0, 1.0),
        row_of("a", None, 1.0),
        row_of("b", 1.0, None),
    ]
    assert contest_tables.group_means(rows) == {"a": pytest.approx(2.0), "b": None}
    assert harness.geometric_mean([]) is None
    assert harness.geometric_mean([None, 8.0, 2.0]) == pytest.approx(4.0)


def test_notes_name_the_rows_of_a_failure_once(capsys: pytest.CaptureFixture[str]):
    rows = [row_of("a", 1.0, None), row_of("b", 1.0, None)]
    for row in rows:
        row.results[1].note = "ValueError: not for this type"
    rows.append(RowResult("c", "c", 1, 1, [], note="not run: out of time"))
    contest_tables.print_notes(rows)
    printed = capsys.readouterr().out
    assert printed.count("rival: ValueError: not for this type\n    in a 1.0 None b 1.0 None") == 1
    assert "the whole row: not run: out of time\n    in c" in printed


def test_trials_are_printed_from_the_fastest_on(capsys: pytest.CaptureFixture[str]):
    slow, fast = function("slow", 4.0), function("fast", 2.0)
    row, _ = run(contender("ours", slow, fast, function("bad", 1.0, raising("no room"))))
    contest_tables.print_trials([row])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "plus_one: ours, 3 candidates"
    assert [line.split() for line in lines[3:5]] == [
        ["2000.0", "0.5", "fast"],
        ["4000.0", "0.2", "slow"],
    ]
    assert lines[5] == "failed: bad: ValueError: no room"
