"""Which code a key of the cache stands for: files, what is installed with them, edits, patches."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import sys
import time
import types

import numpy as np
import pytest

from pallasite import config
from pallasite_std.caching import loaded_code
from pallasite_std.caching.code_identity import CodeIdentity, EditedError
from pallasite_std.caching.loaded_code import LoadedCode
from pallasite_std.caching.object_fields import codes_of

LATER = 2**62
"""Nanoseconds of the epoch after every edit."""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path, into which distributions are installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    with config.scoped(cache_dir=tmp_path / "cache"):
        yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def install(site, files, name="some-plugin", version="0.1.0", requires=(), **metadata):
    """Writes a distribution's files and metadata, as an installer does."""
    information = site / f"{name.replace('-', '_')}-{version}.dist-info"
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    information.mkdir(exist_ok=True)
    lines = [f"Requires-Dist: {one}>=1" for one in requires]
    about = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    (information / "METADATA").write_text(about + "\n")
    record = [
        f"{path},sha256={hashlib.sha256(text.encode()).hexdigest()},{len(text)}\n"
        for path, text in files.items()
    ]
    (information / "RECORD").write_text("".join(record))
    for key, text in metadata.items():
        (information / key.replace("_json", ".json")).write_text(text)
    importlib.invalidate_caches()


def hash_of(package="some_plugin", name="some-plugin", since=LATER):
    return CodeIdentity().hashes({name: {package}}, since)[name]


FILES = {"some_plugin/__init__.py": "x = 1\n", "some_plugin/deep/rules.py": "", "other.py": "y = 1"}


@pytest.mark.parametrize("changed", [*FILES, "some_plugin/table.json", "some_plugin/deep/more.py"])
def test_another_build_of_one_version_is_other_code(site, changed):
    install(site, FILES)
    first = hash_of()
    assert hash_of() == first
    install(site, FILES | {changed: "z = 2\n"})
    second = hash_of()
    assert second != first
    install(site, FILES)
    (site / changed).unlink() if changed not in FILES else None
    assert hash_of() == first  # It is repaired.


def test_an_edit_that_keeps_size_and_time_is_noticed(site):
    install(site, FILES)
    path = site / "some_plugin/__init__.py"
    os.utime(path, (1, 1))
    first = hash_of()
    path.write_text("x = 2\n")
    os.utime(path, (1, 1))
    assert hash_of() != first


def test_files_are_read_once_for_each_state(site, monkeypatch):
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda f, n: read.append(f.name) or digest(f, n))
    install(site, FILES)
    first = hash_of()
    assert len(read) == 3
    hash_of()
    assert len(read) == 6  # So young a file may be edited without another time.
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**10)
    assert hash_of() == first and len(read) == 9
    for _ in range(3):
        assert hash_of() == first
    assert len(read) == 9


@pytest.mark.parametrize("way", ["pth", "finder", "no record"])
def test_modules_of_editable_installations_count(site, tmp_path, monkeypatch, way):
    source = tmp_path / "source"
    (source / "some_plugin").mkdir(parents=True)
    (source / "some_plugin/__init__.py").write_text("")
    (source / "beside.py").write_text("")
    monkeypatch.syspath_prepend(source)
    if way == "pth":
        install(site, {"_some_plugin.pth": f"{source}\n"})
    elif way == "finder":
        finder = types.ModuleType("__editable___some_plugin_finder")
        finder.MAPPING = {"some_plugin": "...", "beside": "..."}
        monkeypatch.setitem(sys.modules, finder.__name__, finder)
        install(site, {f"{finder.__name__}.py": ""})
    else:
        install(source, {})
        (source / "some_plugin-0.1.0.dist-info/RECORD").unlink()
    found = {hash_of()}
    for path in ("some_plugin/__init__.py", "beside.py"):
        (source / path).write_text("x = 1\n")
        found.add(hash_of())
    assert len(found) == 3


def test_what_a_plugin_requires_counts(site):
    install(site, FILES, requires=["some-library"])

    def found():
        return CodeIdentity().hashes({"some-plugin": {"some_plugin"}}, LATER)["some-library"]

    assert found() == "not installed"
    texts = set()
    for content in ("a = 1", "a = 2"):
        install(site, {"some_library.py": content}, name="some-library", version="1.0")
        texts.add(found())
    editable = json.dumps({"dir_info": {"editable": True}})
    install(
        site,
        {"some_library.py": content},
        name="some-library",
        version="1.0",
        direct_url_json=editable,
    )
    for content in ("a = 3", "a = 4"):
        (site / "some_library.py").write_text(content)
        texts.add(found())
    assert len(texts) == 4


def test_edits_after_the_import_are_refused(site):
    install(site, FILES)
    start = time.time_ns() + 30_000_000
    time.sleep(0.08)
    identity = CodeIdentity()
    importlib.import_module("some_plugin")
    first = hash_of(since=start)
    # What is not imported yet may be edited: the new code is what will be imported.
    (site / "some_plugin/deep/rules.py").write_text("r = 1\n")
    second = hash_of(since=start)
    assert second != first
    (site / "some_plugin/__init__.py").write_text("x = 2\n")
    for _ in range(2):
        with pytest.raises(EditedError, match=r"some_plugin.__init__\.py"):
            identity.hashes({"some-plugin": {"some_plugin"}}, start)


def test_edits_after_the_hash_are_noticed(site):
    install(site, FILES)
    identity = CodeIdentity()
    first = identity.hashes({"some-plugin": {"some_plugin"}}, LATER)
    assert identity.unchanged()
    (site / "some_plugin/new.txt").write_text("")
    assert not identity.unchanged()
    # What this process has loaded is what there was.
    assert identity.hashes({"some-plugin": {"some_plugin"}}, LATER) == first


def test_what_is_edited_and_imported_after_the_hash_is_noticed(site):
    install(site, FILES | {"some_plugin/table.json": "1"})
    identity = CodeIdentity()
    identity.hashes({"some-plugin": {"some_plugin"}}, LATER)
    importlib.import_module("some_plugin")
    assert identity.unchanged() and identity.unchanged()
    (site / "some_plugin/deep/rules.py").write_text("r = 1\n")
    importlib.import_module("some_plugin.deep.rules")
    assert not identity.unchanged()


@pytest.mark.parametrize("edited", ["some_plugin/table.json", "some_plugin/deep/more.py"])
def test_data_and_new_files_are_noticed_without_imports(site, edited):
    install(site, FILES | {"some_plugin/table.json": "1"})
    identity = CodeIdentity()
    identity.hashes({"some-plugin": {"some_plugin"}}, LATER)
    assert identity.unchanged() and identity.unchanged()
    (site / edited).write_text("2")
    assert not identity.unchanged()


def test_equal_constants_of_another_type_are_noticed(site):
    (site / "patched_plugin.py").write_text(MODULE)
    module = importlib.import_module("patched_plugin")
    watched = LoadedCode()
    assert watched.generation({"patched_plugin"}) == watched.generation({"patched_plugin"}) == 0
    module.LIMIT = 3.0
    assert watched.generation({"patched_plugin"}) != 0


def test_links_in_a_circle_end(site):
    install(site, FILES)
    (site / "some_plugin/loop").symlink_to(site / "some_plugin")
    (site / "some_plugin/gone").symlink_to(site / "nowhere")
    assert hash_of() == hash_of()


MODULE = """
import functools

LIMIT = 3
count = 0

def emit(x):
    return x

@functools.cache
def plan(x):
    return x

class Rule:
    SIZE = 4

    def apply(self):
        return 1

    @staticmethod
    def make():
        return 2
"""


def patches():
    def replaced(x):
        return None

    return {
        "function": lambda m: setattr(m, "emit", replaced),
        "cached": lambda m: setattr(m, "plan", functools.cache(replaced)),
        "method": lambda m: setattr(m.Rule, "apply", replaced),
        "static": lambda m: setattr(m.Rule, "make", staticmethod(replaced)),
        "class": lambda m: setattr(m, "Rule", type("Rule", (), {})),
        "constant": lambda m: setattr(m, "LIMIT", 4),
        "class constant": lambda m: setattr(m.Rule, "SIZE", 5),
        "code": lambda m: setattr(m.emit, "__code__", replaced.__code__),
        "gone": lambda m: delattr(m, "emit"),
        "reload": importlib.reload,
    }


@pytest.mark.parametrize("versions", sorted({False, loaded_code.HAS_VERSIONS}))
@pytest.mark.parametrize("fields", sorted({False, codes_of([]) is not None}))
@pytest.mark.parametrize("what", patches())
def test_patches_are_noticed(site, monkeypatch, what, fields, versions):
    monkeypatch.setattr(loaded_code, "HAS_VERSIONS", versions)
    if not fields:
        monkeypatch.setattr(loaded_code, "codes_of", lambda functions: None)
    (site / "patched_plugin.py").write_text(MODULE)
    module = importlib.import_module("patched_plugin")
    watched = LoadedCode()
    assert watched.generation({"patched_plugin"}) == 0
    module.count += 1
    module.plan(3)
    assert watched.generation({"patched_plugin"}) == 0
    assert watched.generation({"patched_plugin"}) == 0
    before = dict(vars(module))
    patches()[what](module)
    assert watched.generation({"other_plugin"}) == 0
    changed = watched.generation({"patched_plugin"})
    assert changed != 0 and watched.generation({"patched_plugin"}) == changed
    if what in ("function", "cached", "class", "constant", "gone"):
        vars(module).update(before)
        assert watched.generation({"patched_plugin"}) == 0


@pytest.mark.skipif(codes_of([]) is None, reason="it is not known where functions have their code")
def test_codes_of_functions_are_read_at_once():
    functions = [eval(f"lambda: {number}") for number in range(100)]
    fields = codes_of(functions)
    codes = [function.__code__ for function in functions]
    assert fields.read().tolist() == list(map(id, codes))
    functions[7].__code__ = functions[30].__code__
    assert np.flatnonzero(fields.read() != np.array(list(map(id, codes)))).tolist() == [7]
    functions[7].__code__ = codes[7]
    assert fields.read().tolist() == list(map(id, codes))


def test_patches_before_the_first_kernel_are_noticed(site):
    (site / "patched_plugin.py").write_text(MODULE)
    module = importlib.import_module("patched_plugin")
    module.emit = lambda x: x
    assert LoadedCode().generation({"patched_plugin"}) != 0
