"""Processes of tests that are forked rather than started behave like those that are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests import python_processes

PROGRAM = """
import atexit, json, os, sys
atexit.register(print, "the end", flush=True)
ours = sorted(name for name in sys.modules if name.startswith(("pallasite", "tests")))
print(json.dumps([__name__, sys.argv, ours, os.getcwd(), sorted(os.environ), sys.path[1:2]]))
sys.exit(f"left with {sys.argv[1]}")
"""


def start(arguments, **keywords):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, **keywords)


@pytest.mark.parametrize("script", [False, True])
def test_as_a_process_that_is_started(tmp_path, script):
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [tmp_path / "program.py"] if script else ["-c", PROGRAM]
    environment = {"PYTHONPATH": str(tmp_path / "first"), "ONE": "1"}
    ways = [
        way([*program, "an argument"], env=environment, cwd=tmp_path)
        for way in (start, python_processes.run)
    ]
    (name, argv, ours, folder, variables, first), *_ = found = [
        json.loads(done.stdout.splitlines()[0]) for done in ways
    ]
    assert found[0][:4] == found[1][:4]
    assert (name, argv[1:], ours, folder) == ("__main__", ["an argument"], [], str(tmp_path))
    assert {"ONE", "PYTHONPATH"} <= set(variables) and first == [str(tmp_path / "first")]
    assert found[1][4:] == [sorted(environment), first]
    for done in ways:
        assert done.returncode == 1
        assert (done.stdout.splitlines()[1:], done.stderr) == (
            ["the end"],
            "left with an argument\n",
        )


def test_exceptions_signals_and_limits():
    done = python_processes.run(["-c", "raise OSError('nothing there')"])
    assert done.returncode == 1 and done.stderr.endswith("\nOSError: nothing there\n")
    done = python_processes.run(["-c", "import os; os.kill(os.getpid(), 9)"])
    assert done.returncode == -9
    with pytest.raises(subprocess.CalledProcessError):
        python_processes.run(["-m", "no_such_module"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        python_processes.run(["-c", "import time; time.sleep(600)"], timeout=0.1)


def test_what_python_reads_when_it_begins():
    """Hash seeds hold, since such a process is not forked."""
    seeded = {**os.environ, "PYTHONHASHSEED": "1"}
    hashes = {python_processes.run(["-c", "print(hash('a'))"], env=seeded).stdout for _ in range(2)}
    assert len(hashes) == 1
