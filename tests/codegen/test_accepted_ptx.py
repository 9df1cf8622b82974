"""The texts that ptxas has accepted: each is assembled once, in whatever process and session."""

from __future__ import annotations

import pathlib

import pytest
from tests import accepted_ptx
from tests.accepted_ptx import AcceptedPtx

from pallasite.codegen.tools import find_tool

PROGRAM = """#!/bin/sh
if [ "$1" = --version ]; then echo "release {version}"; exit; fi
echo "$*" >> {log}
for last; do case "$last" in *.ptx) texts="$texts $last";; esac; done
if grep -q wrong $texts; then echo "line 1; error: wrong" >&2; exit 255; fi
if grep -q spills $texts; then
  echo "warning: spills" >&2
  case "$*" in *--warning-as-error*) exit 255;; esac
fi
"""


class Assembler:
    """A program in place of ptxas, that refuses what is wrong and notes how it was called."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / "ptxas"
        self._log = folder / "calls"
        self.install("13.0")

    def install(self, version: str) -> None:
        self.path.write_text(PROGRAM.format(version=version, log=self._log))
        self.path.chmod(0o755)

    def calls(self) -> list[str]:
        """The targets for which it was called since this was last asked."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return [line.split()[0].removeprefix("-arch=") for line in lines]


@pytest.fixture
def assembler(tmp_path: pathlib.Path) -> Assembler:
    return Assembler(tmp_path)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_each_text_is_assembled_once_for_each_target(assembler, folder):
    accepted = AcceptedPtx(assembler.path, folder)
    for _ in range(2):
        accepted.check("one", "sm_90")
        accepted.check("one", "sm_90a")
        accepted.check("two", "sm_90")
    assert assembler.calls() == ["sm_90", "sm_90a", "sm_90"]


def test_later_sessions_know_what_was_accepted(assembler, folder):
    AcceptedPtx(assembler.path, folder).check("one", "sm_90")
    assert len(assembler.calls()) == 1
    AcceptedPtx(assembler.path, folder).check("one", "sm_90")
    assert not assembler.calls()


def test_processes_know_what_others_have_accepted(assembler, folder):
    """Also what they accept after both have begun."""
    one, other = AcceptedPtx(assembler.path, folder), AcceptedPtx(assembler.path, folder)
    one.check("one", "sm_90")
    other.check("two", "sm_90")
    one.check("two", "sm_90")
    other.check("one", "sm_90")
    assert len(assembler.calls()) == 2


def test_what_is_refused_is_refused_again(assembler, folder):
    for _ in range(2):
        accepted = AcceptedPtx(assembler.path, folder)
        for _ in range(2):
            with pytest.raises(AssertionError, match="line 1; error: wrong"):
                accepted.check("wrong", "sm_90")
    assert len(assembler.calls()) == 4


def test_what_something_else_has_assembled_is_accepted(assembler, folder):
    AcceptedPtx(assembler.path, folder).add("one", "sm_90")
    AcceptedPtx(assembler.path, folder).check("one", "sm_90")
    assert not assembler.calls()


def test_another_version_begins_anew(assembler, folder):
    AcceptedPtx(assembler.path, folder).check("one", "sm_90")
    (before,) = folder.iterdir()
    assembler.install("13.1")
    AcceptedPtx(assembler.path, folder).check("one", "sm_90")
    assert len(assembler.calls()) == 2
    (after,) = folder.iterdir()
    assert before != after


def test_without_a_folder_texts_are_remembered_by_the_process(assembler):
    accepted = AcceptedPtx(assembler.path, None)
    accepted.check("one", "sm_90")
    accepted.check("one", "sm_90")
    AcceptedPtx(assembler.path, None).check("one", "sm_90")
    assert len(assembler.calls()) == 2


def test_a_line_that_is_not_complete_is_read_when_it_is(assembler, folder):
    AcceptedPtx(assembler.path, folder).check("one", "sm_90")
    (file,) = folder.iterdir()
    line = file.read_bytes()
    file.write_bytes(line[:40])
    accepted = AcceptedPtx(assembler.path, folder)
    assembler.calls()
    accepted.check("two", "sm_90")
    assert assembler.calls() == ["sm_90"]
    file.write_bytes(line)
    accepted.check("one", "sm_90")
    assert not assembler.calls()


def test_the_oldest_are_forgotten(assembler, folder, monkeypatch):
    monkeypatch.setattr(accepted_ptx, "MOST_TEXTS", 4)
    accepted = AcceptedPtx(assembler.path, folder)
    for text in "abcde":
        accepted.check(text, "sm_90")
    (file,) = folder.iterdir()
    assert len(file.read_text().splitlines()) == 5
    assembler.calls()
    accepted = AcceptedPtx(assembler.path, folder)
    (file,) = folder.iterdir()
    assert len(file.read_text().splitlines()) == 2
    for text in "de":
        accepted.check(text, "sm_90")
    assert not assembler.calls()
    accepted.check("a", "sm_90")
    assert assembler.calls() == ["sm_90"]


def test_what_is_noted_is_assembled_together(assembler, folder):
    accepted = AcceptedPtx(assembler.path, folder)
    accepted.add("known", "sm_90")
    for _ in range(2):
        for text in ("one", "two", "one", "known"):
            accepted.check_later(text, "sm_90", "a test")
        accepted.check_later("three", "sm_90a", "a test")
        assert not assembler.calls()
        accepted.check("two", "sm_90")  # meanwhile
        accepted.check_noted()
        assert assembler.calls() in (["sm_90", "sm_90", "sm_90a"], [])
    for text in ("one", "two"):
        accepted.check(text, "sm_90")
    assert not assembler.calls()


def test_what_must_not_be_warned_of(assembler, folder):
    """It is assembled once, whether others have noted it as well."""
    accepted = AcceptedPtx(assembler.path, folder)
    accepted.check_later("spills", "sm_90", "a test")
    accepted.check_noted()
    for text in ("one", "spills"):
        accepted.check_later(text, "sm_90", f"the test of {text}", strict=True)
        accepted.check_later(text, "sm_90", "a test")
    assembler.calls()
    with pytest.raises(AssertionError, match="the test of spills:\nwarning: spills") as caught:
        accepted.check_noted()
    assert "test of one" not in str(caught.value)
    assert len(assembler.calls()) == 3  # both, then each alone
    accepted.check("one", "sm_90")
    accepted.check_later("one", "sm_90", "a test", strict=True)
    accepted.check_noted()
    assert not assembler.calls()


def test_tests_are_named_whose_texts_are_refused(assembler, folder):
    accepted = AcceptedPtx(assembler.path, folder)
    for text in ("one", "wrong", "two", "also wrong"):
        accepted.check_later(text, "sm_90", f"the test of {text}")
    refused = "ptxas refuses the PTX of a kernel of the test of {}:\nline 1; error: wrong\n"
    with pytest.raises(AssertionError) as caught:
        accepted.check_noted()
    assert str(caught.value).endswith(refused.format("also wrong"))
    assert refused.format("wrong") in str(caught.value)
    assert "test of one" not in str(caught.value) and "test of two" not in str(caught.value)
    assembler.calls()
    for text in ("one", "two"):
        accepted.check(text, "sm_90")
    assert not assembler.calls()


@pytest.mark.parametrize("limit", ["TOGETHER", "LENGTH_TOGETHER"])
def test_many_texts_are_assembled_at_once(assembler, folder, monkeypatch, limit):
    monkeypatch.setattr(accepted_ptx, limit, 3)
    accepted = AcceptedPtx(assembler.path, folder)
    calls = []
    for text in "abcdefg":
        accepted.check_later(text, "sm_90", "a test")
        calls.append(len(assembler.calls()))
    assert calls == ([0, 0, 1, 0, 0, 1, 0] if limit == "TOGETHER" else [0, 0, 0, 1, 0, 0, 0])


KERNEL = """.version 8.6
.target sm_90
.address_size 64
.extern .shared .align {align} .b8 memory[];
.global .u{bits} counter;
.extern .func (.param .b32 result) vprintf (.param .b64 format, .param .b64 values);
.func twice(.param .b64 x) {{ ret; }}
.visible .entry kernel(.param .b64 kernel_param_0)
{{
	.reg .b64 %rd<4>;
	.reg .b{bits} %counter<2>;
	.loc	1 7 0
$L__kernel:
	ld.param.b64 %rd1, [kernel_param_0];
	ld.global.u{bits} %counter1, [{name}];
	{{ .param .b64 x; st.param.b64 [x], %rd1; call.uni twice, (x); }}
	ret;
}}
	.file	1 "/{align}.py"
"""


@pytest.mark.skipif(find_tool("ptxas").path is None, reason="there is no ptxas")
def test_kernels_of_equal_names_are_kept_apart():
    accepted = AcceptedPtx(find_tool("ptxas").path, None)
    texts = [KERNEL.format(align=16 * bits, bits=bits, name="counter") for bits in (32, 64)]
    wrong = KERNEL.format(align=8, bits=32, name="counter_of_another")
    assert accepted._assemble(texts, "sm_90") is not None
    assert accepted._assemble(accepted_ptx._made_distinct(texts), "sm_90") is None
    for text in (*texts, wrong):
        accepted.check_later(text, "sm_90", "a test")
    with pytest.raises(AssertionError, match="counter_of_another"):
        accepted.check_noted()
