"""The folder of cache entries: damage, bounds, several processes."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings

import pytest

from pallasite.runtime.disk_cache import CacheWarning, DiskCache


def key(number: int) -> str:
    return f"{number:064x}"


def test_put_and_get(tmp_path):
    cache = DiskCache(tmp_path / "new" / "cache")
    assert cache.get(key(1)) is None
    cache.put(key(1), b"one")
    cache.put(key(2), b"")
    assert cache.get(key(1)) == b"one"
    assert cache.get(key(2)) == b""
    assert DiskCache(cache.directory).get(key(1)) == b"one"
    cache.clear()
    assert cache.get(key(1)) is None


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "header"])
def test_damaged_entries_are_removed(tmp_path, damage):
    cache = DiskCache(tmp_path)
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
    cache = DiskCache(tmp_path, max_bytes=10_000)
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


def test_stale_temporary_files_are_removed(tmp_path):
    cache = DiskCache(tmp_path)
    cache.put(key(1), b"x")
    stale = cache.path(key(1)).parent / ".tmp-left-over"
    stale.write_bytes(b"x")
    os.utime(stale, (0, 0))
    fresh = stale.with_name(".tmp-in-use")
    fresh.write_bytes(b"x")
    DiskCache(tmp_path).put(key(2), b"y")
    assert not stale.exists()
    assert fresh.exists()


def test_unwritable_folder_warns_once(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    cache = DiskCache(blocker / "cache")
    with pytest.warns(CacheWarning, match="cannot write"):
        cache.put(key(1), b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(key(2), b"x")


def _hammer(directory, seed, rounds, failures):
    cache = DiskCache(directory, max_bytes=40_000)
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
    assert DiskCache(tmp_path).files()
