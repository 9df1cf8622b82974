"""``pallasite compile``: what it finds, what it writes, and its errors."""

from __future__ import annotations

import stat

import pytest

from pallasite.codegen.tools import find_tool

needs_ptxas = pytest.mark.skipif(find_tool("ptxas").path is None, reason="ptxas is not installed")
TARGET = ("--target", "sm_90")


def test_lists_what_a_file_offers(command, kernel):
    result = command("compile", kernel("")[:-2])
    assert result.status == 0
    lines = {line.split("::")[-1].split()[0]: line for line in result.out.splitlines()[1:]}
    ends = {name: line.split(maxsplit=1)[1] for name, line in lines.items()}
    assert ends == {
        "scale": "example scale_128",
        "add": "add_args()",
        "both": "both.example_inputs",
        "twice": "twice.example_inputs",
        "copy": "give --arg for x_ref",
        "filled_copy": "give --arg for x_ref",
        "zeros": "takes none",
        "wrong": "give --arg for x",
        "no_kernel": "give --arg for x",
        "scale_128": "example scale_128",
        "scale_512": "example scale_512",
    }
    assert result.err == "the file prints this when it is loaded\n"


def test_output_needs_a_kernel(command, kernel, tmp_path):
    result = command("compile", kernel("")[:-2], "-o", tmp_path / "out.ptx")
    assert result.status == 1
    assert result.err.endswith("lists what the file offers\n")
    assert "error: no kernel was named" in result.err
    assert not (tmp_path / "out.ptx").exists()


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("jaxpr", "add"),
        ("mlir", "llvm.func"),
        ("llvm", "define"),
        ("ptx", ".target sm_90\n"),
        ("sass", "FADD"),
    ],
)
def test_emits_a_stage(command, kernel, stage, text):
    if stage == "sass" and None in (find_tool("ptxas").path, find_tool("nvdisasm").path):
        pytest.skip("no ptxas or nvdisasm")
    result = command("compile", kernel("add"), *TARGET, "--emit", stage)
    assert result.status == 0, result.err
    assert text in result.out
    assert result.out.endswith("\n")


def test_arguments_of_the_file(command, kernel):
    """A sibling function, an example by its name, none, and ``--arg``, which wins."""
    for name, given, element in (
        ("add", (), "f32[256]"),
        ("scale_512", (), "f32[512]"),
        ("scale", (), "f32[128]"),
        ("scale", ("--arg", "bf16[1024]"), "bf16[1024]"),
        ("copy", ("--arg", "bf16[64,64]"), "bf16[64,64]"),
        ("zeros", (), "i32[128]"),
    ):
        result = command("compile", kernel(name), *TARGET, *given, "--emit", "jaxpr")
        assert result.status == 0, result.err
        assert element in result.out


def test_settings(command, kernel):
    result = command("compile", kernel("scale"), *TARGET, "--set", "factor=5.0", "--emit", "jaxpr")
    assert result.status == 0, result.err
    assert "5.0" in result.out


def test_several_kernels(command, kernel):
    result = command("compile", kernel("both"), *TARGET)
    assert result.status == 1
    assert "both calls 2 different kernels\n  got: scale, add\n  try: --only scale" in result.err
    result = command("compile", kernel("both"), *TARGET, "--only", "add")
    assert ".entry add(" in result.out
    result = command("compile", kernel("both"), *TARGET, "--only", "sub")
    assert "calls no kernel named 'sub'\n  expected: one of scale, add" in result.err


def test_several_kernels_of_one_name(command, kernel):
    for options in ((), ("--only", "scale")):
        result = command("compile", kernel("twice"), *TARGET, *options)
        assert result.status == 1
        expected = "2 different kernels\n  got: scale, scale\n  try: give each another kernel_name"
        assert expected in result.err


def test_writes_a_file_as_a_whole(command, kernel, tmp_path, monkeypatch):
    out = tmp_path / "add.ll"
    out.write_text("old")
    out.chmod(0o640)
    link = tmp_path / "link.ll"
    link.symlink_to(out)
    result = command("compile", kernel("add"), *TARGET, "-o", link)
    assert (result.status, result.out) == (0, "")
    assert link.is_symlink()
    assert "define" in out.read_text()
    assert stat.S_IMODE(out.stat().st_mode) == 0o640

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    before = out.read_text()
    monkeypatch.setattr("os.replace", fail)
    result = command("compile", kernel("scale"), *TARGET, "--emit", "ptx", "-o", out)
    assert result.status == 1
    assert f"error: cannot write {out}: No space left on device" in result.err
    assert out.read_text() == before
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_file()) == ["add.ll", "link.ll"]


def test_folder_of_the_output_must_exist(command, kernel, tmp_path):
    result = command("compile", kernel("add"), *TARGET, "-o", tmp_path / "none" / "add.ptx")
    assert result.status == 1
    assert "No such file or directory\n  expected: a file in a folder that exists" in result.err


@needs_ptxas
def test_machine_code(command, kernel, tmp_path):
    out = tmp_path / "add.cubin"
    assert command("compile", kernel("add"), *TARGET, "-o", out).status == 0
    assert out.read_bytes().startswith(b"\x7fELF")


def test_machine_code_without_tools(command, kernel, monkeypatch):
    monkeypatch.setenv("PALLASITE_PTXAS", "off")
    result = command("compile", kernel("add"), *TARGET, "--emit", "sass")
    assert result.status == 1
    assert result.out == ""
    assert result.err.splitlines()[-2:] == [
        "error: cannot assemble: ptxas was not found (switched off by the option ptxas)",
        "  try: PALLASITE_PTXAS=auto",
    ]


def test_dump(command, kernel, tmp_path):
    folder = tmp_path / "stages"
    assert command("compile", kernel("add"), *TARGET, "--dump", folder).status == 0
    names = {path.suffix for path in folder.iterdir()}
    assert {".txt", ".mlir", ".ll", ".ptx"} <= names


@pytest.mark.parametrize(
    ("name", "options", "lines"),
    [
        ("scal", (), ["has no kernel 'scal'", "expected: one of scale, add", "::scale"]),
        ("NUMBER", (), ["'NUMBER' in ", "cannot be called", "got: int"]),
        ("copy", (), ["for which arguments to compile 'copy'", "copy_args()", "try: --arg"]),
        ("add", ("--arg", "f32[4]"), ["takes more arrays", "got: f32[4]", "expected: 2: x, y"]),
        ("no_kernel", ("--arg", "f32[4]"), ["no_kernel calls no kernel"]),
        ("add", ("--target", "sm_42"), ["no target named 'sm_42' (from --target)", "sm_90"]),
        (
            "wrong",
            ("--arg", "f32[4]"),
            ["kernels_for_cli.py:", "(body): ValueError: the body is wrong", "try: --trace"],
        ),
    ],
)
def test_errors(command, kernel, name, options, lines):
    result = command("compile", kernel(name), *options)
    assert result.status == 1
    assert result.out == ""
    assert "error: " in result.err
    assert "Traceback" not in result.err
    for line in lines:
        assert line in result.err


def test_traceback(command, kernel):
    result = command("compile", kernel("wrong"), "--arg", "f32[4]", "--traceback")
    assert result.status == 1
    assert "Traceback (most recent call last)" in result.err
    assert "ValueError: the body is wrong" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--arg", "f32(3)"), "'f32(3)' is not an array type; expected a dtype and a shape"),
        (("--arg", "f33[3]"), "'f33[3]' has an unknown dtype 'f33'; expected one of bf16, bool"),
        (("--set", "a"), "'a' is not a setting; expected NAME=VALUE"),
        (("--emit", "wasm"), "invalid choice: 'wasm'"),
    ],
)
def test_wrong_usage(command, kernel, options, message):
    result = command("compile", kernel("add"), *options)
    assert result.status == 2
    assert message in result.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "got: no file"),
        ("def f(:\n", "file.py:1: SyntaxError: invalid syntax"),
        ("\nimport no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("\n\nraise KeyError('x')\n", "file.py:3 (<module>): KeyError: 'x'"),
        ("import sys\nsys.exit(3)\n", 'under: if __name__ == "__main__":'),
        ("x = 1\n", "file.py defines no public function"),
    ],
)
def test_files_that_cannot_be_loaded(command, tmp_path, content, message):
    path = tmp_path / "file.py"
    if content is not None:
        path.write_text(content)
    result = command("compile", path)
    assert result.status == (0 if content == "x = 1\n" else 1)
    assert message in result.err + result.out
    assert "Traceback" not in result.err


def test_file_in_a_package(command, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    package = tmp_path / "cli_package" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "cli_package" / "__init__.py").write_text("VALUE = 1\n")
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from cli_package import VALUE\ndef f(x): pass\n")
    result = command("compile", package / "one.py")
    assert result.status == 0, result.err
    assert "one.py::f  give --arg for x" in result.out
