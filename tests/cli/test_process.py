"""The command as a process: what it loads at first, exit status, pipes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests import python_processes


def start(*arguments: str, **keywords) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return python_processes.run(["-m", "pallasite", *arguments], env=environment, **keywords)


def test_help():
    done = start("--help")
    assert done.returncode == 0
    assert "doctor" in done.stdout


CORE = ("config", "errors", "executors", "files", "forks", "launch", "resource", "targets")
"""Modules of the framework that load little themselves."""

LOADED = """
import sys
before = set(sys.modules)
from pallasite.cli import main
assert main(["--help"]) == 0
print(*sorted(set(sys.modules) - before), file=sys.stderr)
"""


def test_help_loads_only_the_command_line():
    """Besides the standard library, and little of that; JAX alone would take seconds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    loaded = done.stderr.split()
    others = {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names}
    core = ("pallasite", *(f"pallasite.{name}" for name in CORE))
    assert {name for name in others if not name.startswith("pallasite.cli")} <= set(core)
    assert "pallasite.cli.entry" in others
    assert len(loaded) < 200


def test_version():
    import pallasite

    assert start("--version").stdout == f"pallasite {pallasite.__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("compile",)])
def test_wrong_usage(arguments):
    done = start(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: pallasite")


def test_compiles(kernel, tmp_path):
    done = start(
        "compile",
        kernel("add"),
        "--target",
        "sm_90",
        "-o",
        "add.ptx",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert ".entry add(" in (tmp_path / "add.ptx").read_text()


def test_standard_output_has_only_the_result(kernel):
    done = start("compile", kernel("add"), "--target", "sm_90")
    assert done.returncode == 0, done.stderr
    assert "when it is loaded" in done.stderr
    assert done.stdout.startswith("//")


def test_reader_that_stops_early(kernel):
    """Closing the pipe ends the command without a message."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "pallasite", "targets"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    process.stdout.close()
    message = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == 141
    assert message == ""


def test_doctor():
    done = start("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "JAX devices" in done.stdout
