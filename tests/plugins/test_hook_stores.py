"""The hook ``pallasite_stores``: parts of the cache folder for plugins."""

from __future__ import annotations

import contextlib
import json
import os
import warnings

import pytest

from pallasite import cli
from pallasite.plugin import PluginError, StoreNamespace, config, hookimpl, manager
from pallasite.plugin.runtime import CacheWarning, DocumentStore, SealedStore

PICTURES = StoreNamespace(name="pictures", noun="picture", folder="pictures", max_bytes=5000)
NOTES = StoreNamespace(
    name="notes",
    noun="note",
    folder="notes",
    suffix=".json",
    documents=True,
    max_entries=3,
    valid=lambda entry: "text" in entry,
    table=lambda entries: (("about", "text"), [(e["key"]["about"], e["text"]) for e in entries]),
    empty="nobody wrote a note",
)


class Plugin:
    def __init__(self, *namespaces):
        self.namespaces = namespaces

    @hookimpl
    def pallasite_stores(self):
        return self.namespaces


@contextlib.contextmanager
def registered(plugin, name="notebook"):
    manager().register(plugin, name)
    try:
        yield
    finally:
        manager().unregister(name)


@pytest.fixture
def command(capsys, tmp_path):
    """Runs ``pallasite cache``; returns the status and what it printed."""

    def run(*arguments):
        with config.scoped(cache_dir=tmp_path):
            status = cli.main(["cache", *arguments])
        return status, capsys.readouterr().out

    with registered(Plugin(PICTURES, NOTES)):
        yield run


def key(number):
    return f"{number:064x}"


def test_the_command_lists_and_clears_every_part(command, tmp_path):
    pictures, notes = SealedStore(tmp_path, PICTURES), DocumentStore(tmp_path, NOTES)
    assert command("notes") == (0, "nobody wrote a note\n")
    pictures.put(key(1), b"a picture")
    notes.put("garden", {"about": "roses"}, {"text": "water them"})
    lines = dict(line.split(None, 1) for line in command()[1].splitlines())
    ours = {"kernels", "tuned", "code", "loops"}
    assert {"directory", "state", "pictures", "notes"} | ours <= set(lines)
    assert lines["pictures"].startswith("1 picture, ")
    assert lines["notes"].endswith(": pallasite cache notes")
    shown = [line.split(None, 1) for line in command("notes")[1].splitlines()]
    assert shown == [["about", "text"], ["roses", "water them"]]
    status, out = command("clear", "--only", "pictures", "--json")
    assert (status, json.loads(out)["removed"]["pictures"]["entries"]) == (0, 1)
    assert pictures.get(key(1)) is None
    assert notes.get("garden", {"about": "roses"})["text"] == "water them"
    command("clear")
    assert notes.files() == []


def test_parts_do_not_mix(tmp_path):
    """One folder holds all, and an entry of one part is none of another."""
    other = StoreNamespace(name="other", noun="thing", folder="pictures")
    SealedStore(tmp_path, PICTURES).put(key(1), b"content")
    with pytest.warns(CacheWarning, match="a damaged file of things was removed"):
        assert SealedStore(tmp_path, other).get(key(1)) is None


@pytest.mark.parametrize("documents", [False, True])
def test_entries_of_another_version_count_as_absent(tmp_path, documents):
    import dataclasses

    old = NOTES if documents else PICTURES
    new = dataclasses.replace(old, version=2)
    if documents:
        DocumentStore(tmp_path, old).put("a", {"about": 1}, {"text": "x"})
        with pytest.warns(CacheWarning, match="a damaged file of notes is ignored"):
            assert DocumentStore(tmp_path, new).get("a", {"about": 1}) is None
    else:
        SealedStore(tmp_path, old).put(key(1), b"x")
        with pytest.warns(CacheWarning, match="a damaged file of pictures was removed"):
            assert SealedStore(tmp_path, new).get(key(1)) is None


def test_documents_are_checksummed(tmp_path):
    store = DocumentStore(tmp_path, NOTES)
    store.put("a", {"about": "roses"}, {"text": "water them"})
    path = store.path("a")
    content = json.loads(path.read_text())
    path.write_text(path.read_text().replace("water", "burn"))
    fresh = DocumentStore(tmp_path, NOTES)
    with pytest.warns(CacheWarning, match="damaged"):
        assert fresh.get("a", {"about": "roses"}) is None
    # What a person writes has no checksum.
    del content["sha256"]
    path.write_text(json.dumps(content))
    assert DocumentStore(tmp_path, NOTES).get("a", {"about": "roses"})["text"] == "water them"


def test_bounds(tmp_path):
    notes = DocumentStore(tmp_path, NOTES)
    for number in range(5):
        notes.put("a", {"about": number}, {"text": str(number)})
    assert [entry["text"] for entry in notes.all_entries()] == ["2", "3", "4"]
    pictures = SealedStore(tmp_path, PICTURES)
    for number in range(8):
        pictures.put(key(number), bytes(1000))
        os.utime(pictures.path(key(number)), (number, number))
    assert pictures.usage().bytes <= 5000
    assert pictures.get(key(7)) is not None and pictures.get(key(0)) is None


def test_entries_are_private(tmp_path):
    notes, pictures = DocumentStore(tmp_path / "c", NOTES), SealedStore(tmp_path / "c", PICTURES)
    notes.put("a", {"about": 1}, {"text": "x"})
    pictures.put(key(1), b"x")
    for path in (notes.path("a"), pictures.path(key(1))):
        assert path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o077 == 0


def test_a_full_disk_is_one_warning(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    notes, pictures = DocumentStore(tmp_path, NOTES), SealedStore(tmp_path, PICTURES)
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(CacheWarning) as caught:
        for number in range(2):
            notes.put("a", {"about": number}, {"text": "x"})
            pictures.put(key(number), b"x")
    assert [str(one.message).partition(" in ")[0] for one in caught] == [
        "cannot write notes",
        "cannot write pictures",
    ]
    assert all("No space left on device" in str(one.message) for one in caught)
    assert not list(tmp_path.rglob(".tmp-*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert notes.get("a", {"about": 1}) is None


def test_two_plugins_with_one_part():
    same_name = StoreNamespace(name="tuned", noun="thing", folder="things")
    same_folder = StoreNamespace(name="mine", noun="thing", folder="tuning", suffix=".json")
    for namespace, message in (
        (same_name, "parts of the cache named 'tuned'"),
        (same_folder, "parts of the cache in folder"),
    ):
        with registered(Plugin(namespace)), pytest.raises(PluginError) as error:
            manager().stores()
        assert message in str(error.value)
        assert "'notebook'" in str(error.value) and "'standard'" in str(error.value)
