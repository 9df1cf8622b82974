"""The Python code in README.md and docs/ runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import io
import pathlib
import re
from collections.abc import Iterator

import jax
import pytest

from pallasite import cli, hookspecs, plugins

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_GPU = "<!-- runs on a GPU -->"


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block: what its fence says, its text, the number of its first line."""

    kind: str
    text: str
    line: int
    needs_gpu: bool


def blocks_of(page: pathlib.Path) -> list[Block]:
    blocks = []
    lines = page.read_text().splitlines()
    position = 0
    while position < len(lines):
        fence = re.fullmatch(r"```(.+)", lines[position])
        if fence:
            end = lines.index("```", position)
            text = "\n".join(lines[position + 1 : end]) + "\n"
            needs_gpu = NEEDS_GPU in lines[max(0, position - 2) : position]
            blocks.append(Block(fence[1].strip(), text, position + 2, needs_gpu))
            position = end
        position += 1
    return blocks


@pytest.fixture
def _plugins_of_this_process() -> Iterator[None]:
    """Removes the plugins that a page registers."""
    before = {one.name for one in plugins.plugins()}
    yield
    for one in plugins.plugins():
        if one.name not in before:
            plugins.unregister(one.name)


@pytest.mark.usefixtures("_plugins_of_this_process")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page: pathlib.Path):
    namespace: dict[str, object] = {"__name__": "document"}
    printed = ""
    for block in blocks_of(page):
        if block.kind == "python":
            if block.needs_gpu and jax.default_backend() != "gpu":
                continue
            # Empty lines in front make the line numbers in errors those of the page.
            source = "\n" * (block.line - 1) + block.text
            name = str(page.relative_to(ROOT))
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(source, name, "exec", dont_inherit=True), namespace)
            printed = output.getvalue()
        elif block.kind == "text output":
            same = doctest.OutputChecker().check_output(block.text, printed, doctest.ELLIPSIS)
            assert same, f"{page.name}:{block.line} is not what is printed:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_hook_is_described():
    """Each has a section, or a paragraph that begins with it; those of rules share one."""
    page = (ROOT / "docs" / "write-a-plugin.md").read_text()
    described = re.findall(r"^(?:### |\*\*`)(pallasite_\w+)", page, re.MULTILINE)
    hooks = [name for name in vars(hookspecs) if name.startswith("pallasite_")]
    rules = {name for name in hooks if name.endswith("_rules")}
    assert sorted(described) == sorted(set(hooks) - rules)
    (paragraph,) = [text for text in page.split("\n\n") if "`pallasite_lowering_rules`, " in text]
    assert set(re.findall(r"`(pallasite_\w+)`", paragraph)) == rules


def test_kernel_of_the_readme_is_short():
    kernel = next(b for b in blocks_of(ROOT / "README.md") if "plgpu.kernel" in b.text)
    assert len([line for line in kernel.text.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_that_are_named_exist(page: pathlib.Path):
    for name in re.findall(r"`(examples/[\w/.]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_commands_of_the_readme_work(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    commands = re.findall(
        r"^    pallasite (.+?)(?:\s+#.*)?$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(commands) >= 6
    monkeypatch.setenv("PALLASITE_CACHE", "off")
    for command in commands:
        words = command.replace("-o softmax.ptx", f"-o {tmp_path / 'softmax.ptx'}").split()
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
        # What doctor finds missing on this machine is no defect of the page.
        assert cli.main(words) == 0 or command == "doctor", command
    assert ".target sm_100a" in (tmp_path / "softmax.ptx").read_text()
