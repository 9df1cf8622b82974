"""What the assembler made of a file is read the next time, by whatever process and session."""

from __future__ import annotations

import pathlib
import subprocess

import pytest
from tests import tool_results
from tests.tool_results import ToolResults

PROGRAM = """#!/bin/sh
echo call >> {log}
for word; do last=$word; [ "$before" = -o ] && output=$word; before=$word; done
echo "{version}: $* " | sed "s|$output|out|" >&2
cat "$last"
if grep -q wrong "$last"; then echo "$last, line 1; error" >&2; exit 255; fi
if grep -q killed "$last"; then kill -9 $$; fi
[ -n "$output" ] && tr a-z A-Z < "$last" > "$output"
exit 0
"""


class Tool:
    """A program that makes capital letters, and notes how often it was called."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / "ptxas"
        self._log = folder / "calls"
        self.install("one")

    def install(self, version: str) -> None:
        self.path.write_text(PROGRAM.format(log=self._log, version=version))
        self.path.chmod(0o755)
        tool_results._identity.cache_clear()

    def calls(self) -> int:
        """How often it was called since this was last asked."""
        count = len(self._log.read_text().splitlines()) if self._log.exists() else 0
        self._log.unlink(missing_ok=True)
        return count


@pytest.fixture
def tool(tmp_path: pathlib.Path) -> Tool:
    (tmp_path / "bin").mkdir()
    return Tool(tmp_path / "bin")


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


@pytest.fixture
def known(tool: Tool, folder: pathlib.Path) -> ToolResults:
    return ToolResults(folder, [tool.path])


def execute(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True)


def assemble(known: ToolResults, tool: Tool, tmp_path: pathlib.Path, text: str, *options: str):
    """The result for a text in a folder of its own, and what was written."""
    place = tmp_path / f"place-{len(list(tmp_path.iterdir()))}"
    place.mkdir()
    source, output = place / "kernel.ptx", place / "kernel.cubin"
    source.write_text(text)
    done = known.run([str(tool.path), *options, "-o", str(output), str(source)], execute)
    printed = (done.stdout, done.stderr.replace(str(place), "."))
    assert str(place) in done.stderr
    return done.returncode, *printed, output.read_text() if output.exists() else None


@pytest.mark.parametrize("text", ["right", "wrong"])
def test_a_result_is_found_again(tool, folder, known, tmp_path, text):
    first = assemble(known, tool, tmp_path, text)
    assert tool.calls() == 1
    assert first[0] == (255 if text == "wrong" else 0)
    assert first[3] == (None if text == "wrong" else "RIGHT")
    for other in (known, ToolResults(folder, [tool.path])):
        assert assemble(other, tool, tmp_path, text) == first
    assert tool.calls() == 0


def test_content_options_and_program_count(tool, known, tmp_path):
    for text, *options in (["a"], ["b"], ["a", "-v"], ["a", "-arch=sm_90"], ["a", "-v", "-v"]):
        for calls in (1, 0):
            assert assemble(known, tool, tmp_path, text, *options)[3] == text.upper()
            assert tool.calls() == calls, (text, options)
    tool.install("another one")
    assert "another one" in assemble(known, tool, tmp_path, "a")[2]
    assert tool.calls() == 1


def test_files_in_the_folder_where_it_runs(tool, known, tmp_path):
    command = [str(tool.path), "-o", "kernel.cubin", "kernel.ptx"]
    for number in range(2):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "kernel.ptx").write_text("text")
        run = lambda words, at=place: subprocess.run(words, cwd=at, capture_output=True, text=True)  # noqa: E731
        assert known.run(command, run, place).stdout == "text"
        assert (place / "kernel.cubin").read_text() == "TEXT"
    assert tool.calls() == 1


def test_other_programs_and_those_that_are_ended_run_again(tool, known, folder, tmp_path):
    for _ in range(2):
        assert assemble(ToolResults(folder, []), tool, tmp_path, "text")[0] == 0
        assert tool.calls() == 1
    for _ in range(2):
        assert assemble(known, tool, tmp_path, "killed")[0] < 0
        assert tool.calls() == 1


def test_damaged_files_are_not_read(tool, known, folder, tmp_path):
    first = assemble(known, tool, tmp_path, "text")
    (file,) = folder.iterdir()
    for damaged in (b"", b"text", file.read_bytes()[:-5]):
        file.write_bytes(damaged)
        tool.calls()
        assert assemble(known, tool, tmp_path, "text") == first
        assert tool.calls() == 1


def test_the_oldest_are_forgotten(tool, known, folder, tmp_path, monkeypatch):
    for text in "abc":
        assemble(known, tool, tmp_path, text)
    monkeypatch.setattr(tool_results, "MOST_BYTES", 0)
    ToolResults(folder, [tool.path])
    assert list(folder.iterdir()) == []
