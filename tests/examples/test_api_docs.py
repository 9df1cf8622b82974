"""The API reference has an entry with a text for every public name."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import types

import pytest

import pallasite
import pallasite.ops
import pallasite_std.ops
from pallasite import config, gpu, hookspecs
from pallasite_hopper import ops

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("make_api_docs", ROOT / "tools/make_api_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generator: types.ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = generator.main(tmp_path_factory.mktemp("api"))
    return {path.stem: path.read_text() for path in paths}


def entries_of(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def text_of(entry: str) -> str:
    """What an entry says in words, without its signature."""
    return re.sub(r"```.*?```", "", entry, flags=re.DOTALL).strip()


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("pallasite.gpu", sorted(dir(gpu))),
        ("pallasite.errors", ["PallasiteError", "MissingRuleError", "SourceLocation"]),
        ("hooks", [name for name in vars(hookspecs) if name.startswith("pallasite_")]),
        ("pallasite.ops", dir(pallasite.ops)),
        ("pallasite_std.ops", pallasite_std.ops.__all__),
        ("pallasite_hopper.ops", ops.__all__),
        ("pallasite", ["compile", "compile_all", "target", "CompiledKernel", "Target", "Pass"]),
    ],
)
def test_every_name_is_described(pages: dict[str, str], page: str, names: list[str]):
    entries = entries_of(pages[page])
    for name in names:
        assert len(text_of(entries[name])) > 15, f"{name} has no docstring"


def test_every_name_of_the_plugin_door_is_described(pages: dict[str, str], generator):
    undescribed = {
        f"{module.__name__}.{name}"
        for module in generator.door_modules()
        for name, text in entries_of(pages[module.__name__]).items()
        if len(text_of(text)) <= 15
    }
    assert undescribed == set()
    for module in generator.door_modules():
        page = pages[module.__name__]
        for name in generator.imports_of(module):
            assert f"## {name}\n" in page or f"`{name}`" in page, name


def test_all_of_pallasite_is_somewhere(pages: dict[str, str]):
    entries = entries_of(pages["pallasite"]) | entries_of(pages["pallasite.errors"])
    modules = {"config", "errors", "gpu", "ops", "plugins"}
    assert set(pallasite.__all__) - modules - {"__version__"} <= set(entries)


@pytest.mark.parametrize("page", ["pallasite.ops", "pallasite_hopper.ops"])
def test_operations_say_what_they_take(pages: dict[str, str], page: str):
    for name, entry in entries_of(pages[page]).items():
        parameters = set(re.findall(r"^    (\w+): ", entry, re.MULTILINE))
        described = set(re.findall(r"\w+", " ".join(re.findall(r"^- `([\w, ]+)`:", entry, re.M))))
        if name not in ("attention_backward", "attention_forward"):  # They refer to attention.
            assert parameters - {"transpose_a", "transpose_b"} <= described, name


def test_options_are_listed(pages: dict[str, str]):
    for name, option in config.OPTIONS.items():
        assert f"| `{name}` | `{option.variable}` |" in pages["options"]


def test_pages_are_in_the_index(pages: dict[str, str]):
    for name in pages:
        assert name == "index" or f"({name}.md)" in pages["index"]


def test_docstrings_become_markdown(generator: types.ModuleType):
    text = "Does ``this``; see :class:`Other`.\n\nArgs:\n  x: a number\n    of a kind.\n  *y: more."
    assert generator.as_markdown(text) == (
        "Does `this`; see `Other`.\n\n**Args**\n\n- `x`: a number\n  of a kind.\n- `*y`: more."
    )


def test_signatures_are_readable(pages: dict[str, str]):
    entry = entries_of(pages["pallasite.gpu"])["copy_gmem_to_smem"]
    expected = "    barrier: Any = None,\n    *,\n    collective_axes: str | tuple[str, ...] | None"
    assert expected in entry
