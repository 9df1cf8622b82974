"""Sources that are kept as differences from the library's."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pathlib

import explicit_layouts
import pytest
from explicit_layouts import sources
from hypothesis import given, settings
from hypothesis import strategies as st

import layouts

lines = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "d\n"]), max_size=12)


@settings(deadline=None)
@given(lines, lines, st.integers(0, 3))
def test_differences_are_applied(old, new, context):
    differences = "".join(difflib.unified_diff(old, new, "old", "new", n=context))
    assert sources.patched("".join(old), differences, "some") == "".join(new)


@given(lines, lines, st.lists(st.just("e\n"), max_size=5))
def test_differences_are_applied_where_lines_have_moved(old, new, inserted):
    """Lines that were put before all others, with enough context to tell where."""
    old, new = ["first\n", *old], ["first\n", *new]
    differences = "".join(difflib.unified_diff(old, new, "old", "new", n=20))
    moved = sources.patched("".join([*inserted, *old]), differences, "some")
    assert moved == "".join([*inserted, *new])


def test_another_original_is_refused():
    differences = "".join(difflib.unified_diff(["a\n", "b\n"], ["a\n", "c\n"], n=1))
    with pytest.raises(ValueError, match=r"line 2: carry the change over to some\.diff"):
        sources.patched("a\nd\n", differences, "some")


def test_sources_can_be_written_and_compared(tmp_path):
    sources.write(tmp_path / "sources")
    (tmp_path / "made").mkdir()
    sources.compare(tmp_path / "sources", tmp_path / "made")
    for name in sources.ORIGINALS:
        made = (tmp_path / "made" / f"{name}.diff").read_text()
        original = pathlib.Path(importlib.import_module(sources.ORIGINALS[name]).__file__)
        assert sources.patched(original.read_text(), made, name) == sources.source(name)


def test_modules_have_their_own_lines():
    """Messages and tracebacks show the source that runs."""
    module = importlib.import_module("explicit_layouts.dense")
    assert module.__file__ is not None and module.__file__.endswith("explicit_layouts/dense.py")
    text = sources.source("dense")
    function = inspect.getsource(module.build)
    first = module.build.__code__.co_firstlineno
    assert function in text
    assert text.splitlines()[first - 1] == function.splitlines()[0]


def test_every_family_has_layouts_in_its_source():
    for family in explicit_layouts.FAMILIES:
        library, named = explicit_layouts.source_texts(family)
        assert "SwizzleTransform" not in "".join(library)
        assert "LoweringSemantics.Lane" in "".join(named) or "Layout." in "".join(named)
        assert sum(map(layouts.code_lines, library)) < sum(map(layouts.code_lines, named))
