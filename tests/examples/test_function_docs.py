"""The list of functions in docs/ is that of the registry."""

from __future__ import annotations

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_list_of_functions_is_current() -> None:
    path = ROOT / "tools/make_function_docs.py"
    spec = importlib.util.spec_from_file_location("make_function_docs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.page()
    assert "`cumsum`" in text and "`dot_general`" in text
    assert module.PAGE.read_text() == text, "run python tools/make_function_docs.py"
