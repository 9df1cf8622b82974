"""Supervision: rows go on after a worker hangs, crashes or has no device left."""

import contextlib
import os
import pathlib
import time

import pytest
import supervise

SCRIPT = """
import os, pathlib, sys, threading
sys.path.append({folder!r})
import supervise

def hang():
    note = pathlib.Path({hanging!r})
    note.with_suffix(".new").write_text(str(os.getpid()))
    note.with_suffix(".new").rename(note)
    threading.Event().wait()

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
                hang()
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
    hang()
task = pathlib.Path(sys.argv[sys.argv.index("--worker") + 1])
supervise.serve(task, Worker)
"""


class Clock:
    """Stands for ``time`` where workers are watched: time passes while they are looked at and hang,
    and none while they do something, however long that takes.

    Attributes:
      step: seconds that pass from one look to the next.
    """

    def __init__(self, hanging: pathlib.Path):
        self.step = 1.0
        self._hanging = hanging
        self._begin = time.time()
        self._passed = 0.0

    def time(self) -> float:
        return self._begin + self._passed

    def monotonic(self) -> float:
        return self._passed

    def sleep(self, seconds: float) -> None:
        time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(self._hanging.read_text()), 0)  # Whether that process is still there.
            self._passed += self.step


@pytest.fixture
def clock(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(tmp_path / "hanging")
    monkeypatch.setattr(supervise, "time", clock)
    return clock


@pytest.fixture
def script(tmp_path: pathlib.Path, clock: Clock) -> str:
    path = tmp_path / "script.py"
    folder = str(pathlib.Path(supervise.__file__).parent)
    path.write_text(SCRIPT.format(folder=folder, hanging=str(tmp_path / "hanging")))
    return str(path)


def test_all_rows_run_in_one_worker(script: str):
    events = []
    outcome = supervise.run(
        script,
        ["--option"],
        ["a", "b"],
        seconds=3600,
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
    outcome = supervise.run(script, [], ["a", key, "b"], seconds=3600, step_seconds=2)
    assert outcome.results["a"]["ran"] == ["first", "a", "last"]
    assert outcome.results[key]["ran"] == ["first", "last"]
    assert outcome.results[key]["skip"] == {key: message}
    assert outcome.results["b"]["ran"] == ["first", "b", "last"]
    assert outcome.lost == {}


def test_a_row_that_breaks_with_nothing_to_leave_out_is_lost(script: str):
    outcome = supervise.run(script, [], ["crashes at the end", "b"], seconds=3600)
    assert outcome.lost == {"crashes at the end": "the process ended with status 9"}
    assert list(outcome.results) == ["b"]


def test_rows_that_come_too_late_are_lost(script: str, clock: Clock):
    clock.step = 1000.0
    outcome = supervise.run(script, [], ["hangs", "b"], seconds=3600, step_seconds=4500)
    assert outcome.results == {}
    assert outcome.lost == dict.fromkeys(["hangs", "b"], "not run: out of time")


def test_a_worker_that_cannot_start_ends_the_run(script: str):
    with pytest.raises(SystemExit) as failure:
        supervise.run(script, ["--fail"], ["a"], seconds=3600)
    assert failure.value.code == 1


def test_a_worker_that_never_speaks_is_ended(script: str, clock: Clock):
    clock.step = 100.0
    with pytest.raises(SystemExit, match="ended after 300 seconds without progress"):
        supervise.run(script, ["--silent"], ["a"], seconds=3600, step_seconds=0.5)
