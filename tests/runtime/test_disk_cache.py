"""The folder of cache entries: damage, bounds, several processes."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import time
import warnings

import pytest

from pallasite.runtime import store as store_module
from pallasite.runtime.store import CacheWarning, DocumentStore, SealedStore
from pallasite.stores import KERNELS, StoreNamespace

PARTS = StoreNamespace(name="parts", noun="part", folder="parts")
NOTES = StoreNamespace(name="notes", noun="note", folder="notes", suffix=".json", documents=True)


def key(number: int) -> str:
    return f"{number:064x}"


def test_put_and_get(tmp_path):
    cache = SealedStore(tmp_path / "new" / "cache", KERNELS)
    assert cache.get(key(1)) is None
    cache.put(key(1), b"one")
    cache.put(key(2), b"")
    assert cache.get(key(1)) == b"one"
    assert cache.get(key(2)) == b""
    assert SealedStore(cache.directory, KERNELS).get(key(1)) == b"one"
    cache.clear()
    assert cache.get(key(1)) is None


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "header"])
def test_damaged_entries_are_removed(tmp_path, damage):
    cache = SealedStore(tmp_path, KERNELS)
    cache.put(key(1), b"content" * 100)
    (path,) = cache.files()
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[:-1]
    elif damage == "empty":
        data = bytearray()
    elif damage == "flip":
        data[-5] ^= 1
    else:
        data[0] ^= 1
    path.write_bytes(data)
    with pytest.warns(CacheWarning, match="damaged"):
        assert cache.get(key(1)) is None
    assert not path.exists()
    cache.put(key(1), b"again")
    assert cache.get(key(1)) == b"again"
    cache.files()[0].write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # The second time there is no warning.
        assert cache.get(key(1)) is None


def test_least_recently_used_entries_go_first(tmp_path):
    cache = SealedStore(tmp_path, KERNELS, max_bytes=10_000)
    past = time.time() - 1000
    for number in range(8):
        cache.put(key(number), bytes(1000))
        os.utime(cache.path(key(number)), (past + number, past + number))
    assert cache.get(key(0)) is not None  # Now it is the most recent one.
    cache.put(key(8), bytes(2000))
    assert cache.get(key(0)) is not None
    assert cache.get(key(1)) is None
    assert cache.get(key(8)) is not None
    assert sum(path.stat().st_size for path in cache.files()) <= 10_000


def test_the_size_of_many_entries_is_told_by_one_folder(tmp_path, monkeypatch):
    """A process that writes one asks for those of others only where there may be too many."""
    keys = [f"{n % 256:02x}{n:062x}" for n in range(256 * 64)]
    first = SealedStore(tmp_path, KERNELS)
    first.put(keys[0], bytes(100))
    content = first.path(keys[0]).read_bytes()
    for one in keys:
        path = first.path(one)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    size = len(keys) * len(content)
    roomy = SealedStore(tmp_path, KERNELS, max_bytes=2 * size)
    with monkeypatch.context() as patched:
        patched.setattr(SealedStore, "_statuses", lambda *_: pytest.fail("asks for all"))
        for number in range(3):
            roomy.put(key(number), bytes(100))
    tight = SealedStore(tmp_path, KERNELS, max_bytes=size // 2)
    tight.put(key(3), bytes(100))
    assert tight.usage().bytes <= size // 2 and tight.get(key(3)) is not None


def test_stale_temporary_files_are_removed(tmp_path):
    cache = SealedStore(tmp_path, KERNELS)
    cache.put(key(1), b"x")
    stale = cache.path(key(1)).parent / ".tmp-left-over"
    stale.write_bytes(b"x")
    os.utime(stale, (0, 0))
    fresh = stale.with_name(".tmp-in-use")
    fresh.write_bytes(b"x")
    SealedStore(tmp_path, KERNELS).put(key(2), b"y")
    assert not stale.exists()
    assert fresh.exists()


def test_unwritable_folder_warns_once(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    cache = SealedStore(blocker / "cache", KERNELS)
    with pytest.warns(CacheWarning, match="cannot write"):
        cache.put(key(1), b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(key(2), b"x")


def _hammer(directory, seed, rounds, failures):
    cache = SealedStore(directory, KERNELS, max_bytes=40_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            for i in range(rounds):
                number = (seed * 7 + i * 13) % 30
                content = bytes([number]) * 2000
                cache.put(key(number), content)
                found = cache.get(key((number + seed) % 30))
                if found is not None and found != bytes([(number + seed) % 30]) * 2000:
                    failures.put("wrong content")
        except Exception as error:
            failures.put(repr(error))


def test_processes_share_a_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    failures = context.Queue()
    workers = [
        context.Process(target=_hammer, args=(tmp_path, seed, 200, failures)) for seed in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert failures.empty(), failures.get()
    assert all(worker.exitcode == 0 for worker in workers)
    assert SealedStore(tmp_path, KERNELS).files()


def test_entries_are_bound_to_their_keys(tmp_path):
    cache = SealedStore(tmp_path, KERNELS)
    cache.put(key(1), b"one")
    cache.put(key(2), b"two")
    cache.path(key(2)).write_bytes(cache.path(key(1)).read_bytes())
    with pytest.warns(CacheWarning, match="damaged"):
        assert cache.get(key(2)) is None
    assert cache.get(key(1)) == b"one"


def _pipe(path):
    os.mkfifo(path)


def _sparse(path):
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize("make", [_pipe, _sparse, os.mkdir])
def test_what_is_no_entry_is_removed_at_once(tmp_path, make):
    """It neither waits for a writer nor reads a terabyte."""
    cache = SealedStore(tmp_path, KERNELS)
    cache.put(key(1), b"one")
    cache.path(key(1)).unlink()
    make(cache.path(key(1)))
    with pytest.warns(CacheWarning, match="damaged"):
        assert cache.get(key(1)) is None
    cache.put(key(1), b"again")
    assert cache.get(key(1)) == b"again"


@pytest.mark.parametrize("which", ["cache folder", "its part", "file"])
def test_what_others_can_write_is_not_used(tmp_path, which):
    store = SealedStore(tmp_path, PARTS)
    store.put(key(1), b"one")
    path = {"cache folder": tmp_path, "its part": store.directory, "file": store.path(key(1))}[
        which
    ]
    mode = path.stat().st_mode
    path.chmod(mode | 0o002)
    with pytest.warns(CacheWarning, match="others may write it; chmod go-w"):
        assert SealedStore(tmp_path, PARTS).get(key(1)) is None
    if which != "file":
        with pytest.warns(CacheWarning, match="cannot write parts"):
            SealedStore(tmp_path, PARTS).put(key(2), b"two")
        assert not store.path(key(2)).exists()
    path.chmod(mode)
    assert store.get(key(1)) == b"one"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_not_used(tmp_path):
    store = SealedStore(tmp_path, PARTS)
    store.put(key(1), b"one")
    os.chown(store.path(key(1)), 12345, 12345)
    with pytest.warns(CacheWarning, match="it is user 12345's, and this is user 0"):
        assert store.get(key(1)) is None
    store.put(key(1), b"again")
    assert store.get(key(1)) == b"again"


class Killed(BaseException):
    """What ends a process at once, as far as the file system is concerned."""


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_process_that_is_killed_at_any_write_leaves_what_can_be_used(
    tmp_path, monkeypatch, documents, after
):
    """Each call of the system is the last one in turn; nothing is cleaned up then."""

    def write(folder, text):
        if documents:
            DocumentStore(folder, NOTES).put("a", {"about": text}, {"text": text})
        else:
            SealedStore(folder, PARTS).put(key(1), text.encode())

    def read(folder):
        if documents:
            entries = DocumentStore(folder, NOTES).all_entries()
            return sorted(entry["text"] for entry in entries)
        return SealedStore(folder, PARTS).get(key(1))

    old, new = (["old"], ["new", "old"]) if documents else (b"old", b"new")
    reached = 0
    for last in range(30):
        folder = tmp_path / str(last)
        write(folder, "old")
        calls = 0

        def wrapped(function, last=last):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls > last + after:  # From then on nothing is cleaned up, either.
                    raise Killed
                result = function(*args, **kwargs)
                if calls == last + after and after:
                    raise Killed
                return result

            return call

        with monkeypatch.context() as patch:
            for name in ("open", "replace", "chmod", "utime", "mkdir", "unlink"):
                patch.setattr(os, name, wrapped(getattr(os, name)))
            try:
                write(folder, "new")
            except Killed:
                reached = last
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert read(folder) in (old, new), last
            write(folder, "new")
            assert read(folder) == new
        if calls <= last:
            break
    assert 2 <= reached < 29


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("room", [0, 5, 40])
def test_a_full_disk_leaves_what_there_was(tmp_path, monkeypatch, documents, room):
    """The write fails after some bytes."""
    store = (DocumentStore if documents else SealedStore)(tmp_path, NOTES if documents else PARTS)

    def put(text):
        if documents:
            store.put("a", {"about": "x"}, {"text": text}, replace=True)
        else:
            store.put(key(1), text.encode())

    def get():
        return store.get("a", {"about": "x"})["text"] if documents else store.get(key(1)).decode()

    fdopen = os.fdopen

    def full(handle, mode="r", *args, **kwargs):
        if "w" not in mode:
            return fdopen(handle, mode, *args, **kwargs)
        file = fdopen(handle, mode, 0)
        write = file.write

        class Full:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                file.close()

            def write(self, data):
                write(data[:room])
                raise OSError(errno.ENOSPC, "No space left on device")

        return Full()

    put("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", full)
        with pytest.warns(CacheWarning, match="No space left on device"):
            put("new")
    assert get() == "old"
    assert not list(tmp_path.rglob(".tmp-*"))
    put("new")
    assert get() == "new"


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"{}", b"\xff\xfe", b"null", b"1" * 9999])
def test_documents_of_rubbish_count_as_absent(tmp_path, content):
    store = DocumentStore(tmp_path, NOTES)
    store.put("a", {"about": "x"}, {"text": "old"})
    store.path("a").write_bytes(content)
    with pytest.warns(CacheWarning, match="damaged"):
        assert DocumentStore(tmp_path, NOTES).get("a", {"about": "x"}) is None
    with pytest.warns(CacheWarning, match="damaged"):
        store.put("a", {"about": "x"}, {"text": "new"})
    assert DocumentStore(tmp_path, NOTES).get("a", {"about": "x"})["text"] == "new"


def test_a_lock_that_is_never_given_back_is_not_waited_for(tmp_path, monkeypatch):
    store = DocumentStore(tmp_path, NOTES)
    store.put("a", {"about": 1}, {"text": "x"})
    monkeypatch.setattr(store_module, "_LOCK_SECONDS", 0.05)
    with (store.directory / ".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.warns(CacheWarning, match="notes.*another process keeps it locked"):
            store.put("a", {"about": 2}, {"text": "y"})
    store.put("a", {"about": 2}, {"text": "y"})
    assert store.count() == 2
