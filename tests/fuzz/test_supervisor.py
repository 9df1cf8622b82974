"""Processes of a long run that crash, hang or lose their GPU are followed by others."""

from __future__ import annotations

import pathlib
import sys

import pytest
from tests.fuzz import _supervisor
from tests.fuzz._progress import LOST, read

PROGRAM = """
import json, os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
lines = path.read_text().splitlines() if path.exists() else ()
names = {json.loads(line)["name"] for line in lines}
for name in ("a", "crashes", "b", "loses", "c", "hangs", "d"):
    if name in names:
        continue
    with path.open("a") as file:
        print(json.dumps({"name": name}), file=file, flush=True)
        if name == "crashes":
            print("a message", flush=True)
            os.abort()
        if name == "hangs":
            time.sleep(60)
        outcome = "crash" if name == "loses" else "right"
        print(json.dumps({"name": name, "outcome": outcome, "message": ""}), file=file, flush=True)
        if name == "loses":
            os._exit(LOST)
"""


def test_programs_behind_a_crash_and_a_hang_are_run(tmp_path, monkeypatch):
    monkeypatch.setattr(_supervisor, "GRACE", 0.5)
    code = PROGRAM.replace("LOST", str(LOST))
    command = [sys.executable, "-c", code, str(tmp_path / "part-000.jsonl")]
    _supervisor.run([command], tmp_path, [{}], minutes=None, seconds=0)
    done = read(tmp_path)
    outcomes = {name: entry["outcome"] for name, entry in done.items()}
    right = dict.fromkeys("abcd", "right")
    assert outcomes == right | {"crashes": "crash", "loses": "crash", "hangs": "hang"}
    assert "a message" in done["crashes"]["message"]


def test_a_process_that_cannot_start_is_not_started_for_ever(tmp_path, capsys):
    command = [sys.executable, "-c", "raise SystemExit(2)"]
    _supervisor.run([command], tmp_path, [{}], minutes=None, seconds=5)
    assert "ends at its start, with status 2" in capsys.readouterr().out


def test_what_runs_when_time_is_up_is_interrupted(tmp_path: pathlib.Path, monkeypatch):
    monkeypatch.setattr(_supervisor, "GRACE", 30)
    command = [sys.executable, "-c", PROGRAM.replace("LOST", "0"), str(tmp_path / "part-000.jsonl")]
    (tmp_path / "part-000.jsonl").write_text(
        "".join(f'{{"name": "{name}", "outcome": "right"}}\n' for name in ("a", "crashes", "b"))
        + '{"name": "loses", "outcome": "right"}\n{"name": "c", "outcome": "right"}\n'
    )
    _supervisor.run([command], tmp_path, [{}], minutes=0.01, seconds=1)
    assert read(tmp_path)["hangs"]["outcome"] == "interrupted"


@pytest.mark.parametrize("status", [0, 1])
def test_a_process_that_ends_is_done(tmp_path, status, capsys):
    command = [sys.executable, "-c", f"raise SystemExit({status})"]
    _supervisor.run([command], tmp_path, [{}], minutes=None, seconds=5)
    assert not capsys.readouterr().out
