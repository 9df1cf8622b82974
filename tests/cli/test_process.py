"""The command as a process: speed of start, exit status, pipes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest


def start(*arguments: str, **keywords) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "pallasite", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        **keywords,
    )


def test_help_is_quick_and_imports_no_jax():
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        done = start("--help")
        times.append(time.perf_counter() - begin)
        assert done.returncode == 0
    assert "doctor" in done.stdout
    assert min(times) < 0.5  # 0.1 on a machine with nothing else to do
    program = "import sys, pallasite.cli.entry as e; e.make_parser(); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    ).stdout.split()
    assert not {"jax", "jaxlib", "numpy", "llvmlite", "pallasite.plugins"} & set(loaded)


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
