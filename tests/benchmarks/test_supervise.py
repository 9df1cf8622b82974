"""Supervision: rows go on after a worker hangs, crashes or has no device left."""

import pathlib

import pytest
import supervise

SCRIPT = """
import os, pathlib, sys, time
sys.path.append({folder!r})
import supervise

class Worker:
    def facts(self):
        return {{"process": os.getpid()}}

    def run(self, key, skip, notify, seconds):
        notify("")
        ran = []
        for name in ("first", key, "last"):
            if name in skip:
                continue
            notify(name)
            if name == "hangs":
                time.sleep(60)
            if name == "crashes":
                os._exit(9)
            if name == "breaks":
                raise supervise.BrokenError("no more device")
            ran.append(name)
        notify("")
        if key == "crashes at the end":
            os._exit(9)
        return {{"ran": ran, "skip": skip, "arguments": sys.argv[1:-2]}}

if "--fail" in sys.argv:
    sys.exit("cannot start")
if "--silent" in sys.argv:
    time.sleep(60)
task = pathlib.Path(sys.argv[sys.argv.index("--worker") + 1])
supervise.serve(task, Worker)
"""


@pytest.fixture
def script(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(folder=str(pathlib.Path(supervise.__file__).parent)))
    return str(path)


def test_all_rows_run_in_one_worker(script: str):
    events = []
    outcome = supervise.run(
        script,
        ["--option"],
        ["a", "b"],
        seconds=60,
        on_event=lambda outcome, key: events.append((key, outcome.facts["process"])),
    )
    assert outcome.results["b"] == {
        "ran": ["first", "b", "last"],
        "skip": {},
        "arguments": ["--option"],
    }
    assert [key for key, _ in events] == [None, "a", "b"]
    assert len({process for _, process in events}) == 1
    assert outcome.lost == {}


@pytest.mark.parametrize(
    "key, message",
    [
        ("crashes", "the process ended with status 9"),
        ("breaks", "no more device"),
        ("hangs", "ended after 2 seconds without progress"),
    ],
)
def test_what_breaks_a_worker_is_left_out_of_the_next(script: str, key: str, message: str):
    outcome = supervise.run(script, [], ["a", key, "b"], seconds=60, step_seconds=2)
    assert outcome.results["a"]["ran"] == ["first", "a", "last"]
    assert outcome.results[key]["ran"] == ["first", "last"]
    assert outcome.results[key]["skip"] == {key: message}
    assert outcome.results["b"]["ran"] == ["first", "b", "last"]
    assert outcome.lost == {}


def test_a_row_that_breaks_with_nothing_to_leave_out_is_lost(script: str):
    outcome = supervise.run(script, [], ["crashes at the end", "b"], seconds=60)
    assert outcome.lost == {"crashes at the end": "the process ended with status 9"}
    assert list(outcome.results) == ["b"]


def test_rows_that_come_too_late_are_lost(script: str):
    outcome = supervise.run(script, [], ["hangs", "b"], seconds=2, step_seconds=3)
    assert outcome.results == {}
    assert outcome.lost == dict.fromkeys(["hangs", "b"], "not run: out of time")


def test_a_worker_that_cannot_start_ends_the_run(script: str):
    with pytest.raises(SystemExit) as failure:
        supervise.run(script, ["--fail"], ["a"], seconds=60)
    assert failure.value.code == 1


def test_a_worker_that_never_speaks_is_ended(script: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervise, "START_SECONDS", 1.0)
    with pytest.raises(SystemExit, match="ended after 1 seconds without progress"):
        supervise.run(script, ["--silent"], ["a"], seconds=60, step_seconds=0.5)
