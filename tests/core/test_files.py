"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess
import sys
import threading

import pytest

from pallasite import files


def names(folder):
    return sorted(one.name for one in folder.iterdir())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_new_and_replaced(tmp_path):
    path = tmp_path / "a.txt"
    files.write(path, "grün\r\n")
    assert path.read_bytes() == "grün\r\n".encode()
    files.write(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["a.txt"]


def test_permissions(tmp_path):
    old_mask = os.umask(0o027)
    try:
        path = tmp_path / "plain"
        files.write(path, "x")
        assert mode(path) == 0o640  # That of any new file.
        path.chmod(0o755)
        files.write(path, "y")
        assert mode(path) == 0o755  # That which it had.
        files.write(path, "z", mode=0o600)
        assert mode(path) == 0o600
        files.write(tmp_path / "given", "z", mode=0o644, exclusive=True)
        assert mode(tmp_path / "given") == 0o644  # Whatever the umask.
    finally:
        os.umask(old_mask)


def test_a_private_file_is_never_open_to_others(tmp_path, monkeypatch):
    seen = []
    chmod = os.chmod
    monkeypatch.setattr(
        os, "chmod", lambda path, bits: (seen.append(mode(pathlib.Path(path))), chmod(path, bits))
    )
    files.write(tmp_path / "secret", "x", mode=0o600)
    assert [bits & 0o077 for bits in seen] == [0]


def test_links_stay(tmp_path):
    target = tmp_path / "folder" / "target"
    files.write(files.make_folder(target.parent) / target.name, "old")
    link = tmp_path / "link"
    link.symlink_to(target)
    files.write(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert names(target.parent) == ["target"]


def test_a_pipe_is_written_to_directly(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    files.write(pipe, b"through")
    reader.join(60)
    assert received == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("function", ["fdopen", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_whatever_fails_the_old_file_stays(tmp_path, monkeypatch, function, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*arguments, **keywords):
        if function == "fdopen":
            os.close(arguments[0])
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(type(error)):
            files.write(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_write_that_breaks_off(tmp_path, monkeypatch):
    """Half of the content is on the disk when the disk is full."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    fdopen = os.fdopen

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, content):
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", lambda *arguments: Full(fdopen(*arguments)))
    for exclusive, name in ((False, "a.txt"), (True, "b.txt")):
        with pytest.raises(OSError, match="No space left"):
            files.write(tmp_path / name, "new content", exclusive=exclusive)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("links", [True, False])
def test_exclusive(tmp_path, monkeypatch, links):
    def no_links(*arguments):
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "a.txt"
    files.write(path, "first", exclusive=True)
    with pytest.raises(FileExistsError):
        files.write(path, "second", exclusive=True)
    assert path.read_text() == "first"
    dangling = tmp_path / "link"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        files.write(dangling, "third", exclusive=True)
    assert names(tmp_path) == ["a.txt", "link"]


def test_a_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    program = (
        "import os, signal, sys\n"
        "from pallasite import files\n"
        "os.replace = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write(sys.argv[1], 'new')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, path], env=environment)
    assert done.returncode == -9
    assert path.read_text() == "old"
    (left,) = set(names(tmp_path)) - {"a.txt"}
    assert left.startswith(files.TEMPORARY)


def test_folders(tmp_path):
    folder = files.make_folder(tmp_path / "a" / "b", mode=0o700)
    assert folder.is_dir() and mode(folder) == 0o700
    assert files.make_folder(folder) == folder
    files.write(folder / "file", "x")
    with pytest.raises(FileExistsError):
        files.make_folder(folder / "file")
    assert files.remove(folder / "file") is True
    assert files.remove(folder / "file") is False
    with pytest.raises(FileNotFoundError):
        files.write(tmp_path / "none" / "file", "x")
