"""The processes that run blocks, and how a launch is shared among them.

The process that launches is one of them. The others take a second to start, and then keep for later
launches; until they are there, and where they are late, it does their part.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import copy
import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from pallasite.plugin import PallasiteError, config, plugins
from pallasite_simulator.engine.wave import Watchdog
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.launch import Execution, Launch, wave_size
from pallasite_simulator.parallel.messages import (
    Channel,
    Chunk,
    Done,
    Failed,
    Job,
    Surroundings,
)
from pallasite_simulator.parallel.sharing import obstacle
from pallasite_simulator.parallel.worker import Work, failed
from pallasite_simulator.statistics.traffic import SECTOR_BYTES
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.memory import GlobalMemory
    from pallasite_simulator.sanitizer.findings import Findings

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from pallasite_simulator.parallel.worker import main;"
    " main()"
)

_ENVIRONMENT = {
    # Each process has one processor: more threads would only disturb the others.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "JAX_PLATFORMS": "cpu",
}

_MEMORY_FOLDER = "/dev/shm"
"""How much room is there says how much memory can be shared."""

_OPEN_FILES = "/proc/self/fd"
"""Where other processes can open files that have no name, if the system has that."""


def obstacle_of(launch: Launch) -> str | None:
    """Why the blocks of a launch must run in this process; None if they need not."""
    if launch.make_observer is not None:
        return "it has an observer of its own"
    if not sys.executable:
        return "there is no Python program to start"
    if _surroundings() is None:
        return "a plugin that was registered in this process is no module"
    return obstacle(launch.program)


@contextlib.contextmanager
def shared_bytes(size: int) -> Iterator[tuple[str, Array]]:
    """Zeroed memory that other processes can map, and the file behind it."""
    enough = False
    with contextlib.suppress(OSError):
        status = os.statvfs(_MEMORY_FOLDER)
        enough = status.f_bavail * status.f_frsize > 2 * size
    with contextlib.ExitStack() as stack:
        if not os.path.isdir(_OPEN_FILES):
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="pallasite-"))
            handle, name = file.fileno(), file.name
        else:
            # It has no name, so nothing is left of it however this process ends.
            if enough and hasattr(os, "memfd_create"):
                handle = os.memfd_create("pallasite")
                stack.callback(os.close, handle)
            else:
                handle = stack.enter_context(tempfile.TemporaryFile()).fileno()
            name = f"/proc/{os.getpid()}/fd/{handle}"
        os.ftruncate(handle, max(size, 1))
        yield name, np.asarray(np.memmap(name, np.uint8, "r+"))


def memory_bytes(launch: Launch, size: int) -> int:
    """Bytes to share for global memory of a size."""
    return size + launch.processes * _flags(launch, size)


def run_shared(
    launch: Launch,
    memory: GlobalMemory,
    parameters: Array,
    file: str,
    contents: Array,
) -> Execution | None:
    """Runs the blocks of a launch in several processes.

    The results are those of one process: chunks of blocks are put together in their order, and of
    several errors, that of the earliest chunk is raised.

    Args:
      launch: the launch; its sanitizer gets the findings of all processes.
      memory: global memory, ready.
      parameters: the parameter buffer.
      file, contents: from :func:`shared_bytes`; ``memory`` is in the beginning of them.

    Returns:
      What the launch did; None if blocks of different processes touch the same memory, which the
      sanitizer can judge only if it sees both: the launch must be run again, in one process.

    Raises:
      SimulationError: what the kernel does has no meaning.
    """
    program = launch.program
    chunks = _chunks(launch.order, launch)
    flags = _flags(launch, memory.size)
    sanitizer = launch.sanitizer
    job = Job(
        program.source,
        program.name,
        program.multiprocessors,
        tuple(config.get("disabled_plugins")),
        launch.geometry,
        launch.dynamic_shared_bytes,
        parameters.tobytes(),
        tuple(memory.allocations),
        file,
        memory.size,
        None,
        launch.statistics,
        None if sanitizer is None else sanitizer.groups,
        () if sanitizer is None else sanitizer.allocations,
        Watchdog(launch.timeout) if launch.timeout else None,
    )
    with _lock:
        team = _team(min(launch.processes, len(chunks)) - 1)
        jobs = [
            dataclasses.replace(job, sectors_at=memory.size + place * flags) if flags else job
            for place in range(len(team) + 1)
        ]
        try:
            execution = _Round(team, jobs, chunks, launch).run()
        except PallasiteError:
            raise
        except BaseException:
            _dismiss()
            raise
    if not flags:
        return execution
    sectors = contents[memory.size :].view(np.bool_).reshape(launch.processes, 2, -1)
    if launch.statistics:
        execution.sectors = (sectors[:, 0].any(axis=0), sectors[:, 1].any(axis=0))
    if sanitizer is not None and sanitizer.records and _meet(sectors):
        return None
    return execution


def _flags(launch: Launch, size: int) -> int:
    """Bytes in which each process says which sectors it touches."""
    if launch.statistics or launch.recorded:
        return 2 * -(-size // SECTOR_BYTES)
    return 0


def _meet(sectors: Array) -> bool:
    """Whether a process writes a sector that another one reads or writes."""
    touched = sectors.any(axis=1).sum(axis=0)
    return bool((sectors[:, 1].any(axis=0) & (touched > 1)).any())


def _chunks(order: Array, launch: Launch) -> list[Array]:
    """Blocks in pieces of whole clusters: as large as waves, but some for each process."""
    cluster = launch.geometry.cluster_size
    share = -(-len(order) // (launch.processes * cluster)) * cluster
    size = max(cluster, min(_wave_size(launch), share))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _wave_size(launch: Launch) -> int:
    return wave_size(launch.geometry, launch.shared_bytes, launch.recorded)


class _Round:
    """One launch, and a thread for each other process that hands out its chunks."""

    def __init__(
        self,
        team: Sequence[_Worker],
        jobs: Sequence[Job],
        chunks: Sequence[Array],
        launch: Launch,
    ):
        self._team = team
        self._jobs = jobs
        self._launch = launch
        self._chunks = collections.deque(enumerate(chunks))
        self._done: dict[int, Done] = {}
        self._counted: list[Execution] = []
        self._errors: dict[int, BaseException] = {}
        self._busy = 0
        self._changed = threading.Condition()

    def run(self) -> Execution:
        """Runs all chunks; returns what they did.

        Raises:
          SimulationError: that of the earliest chunk that failed.
        """
        for worker, job in zip(self._team, self._jobs[1:], strict=True):
            worker.begin(functools.partial(self._attend, worker, job))
        self._take_part(self._jobs[0])
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() and not self._busy)
        execution = Execution.empty(self._launch.program)
        last = min(self._errors, default=len(self._done))
        for number in range(last):
            done = self._done[number]
            assert done.execution is not None
            execution.add(done.execution)
            self._add(done.findings)
        if self._errors:
            self._raise(self._errors[last], "".join(execution.output))
        for counted in self._counted:
            execution.add(counted)
        return execution

    def _raise(self, error: BaseException, printed: str) -> NoReturn:
        """Raises an error, with what was printed and found before."""
        if isinstance(error, _ChunkFailed):
            failed = error.failed
            if failed.details:
                failed.error.add_note(failed.details)
            if isinstance(failed.error, SimulationError):
                failed.error.printed = printed + failed.error.printed
                if self._launch.sanitizer is not None:
                    self._add(failed.findings)
                    self._launch.sanitizer.annotate(failed.error)
            raise failed.error
        raise error

    def _add(self, findings: Findings | None) -> None:
        """Adds what was found in a chunk to what was found before."""
        if findings is None or self._launch.sanitizer is None:
            return
        whole = self._launch.sanitizer.findings
        whole.kernel = findings.kernel
        for key, finding in findings.found.items():
            whole.add(key, functools.partial(copy.copy, finding), finding.count)
        whole.more |= findings.more - whole.found.keys()

    def _is_over(self) -> bool:
        """Whether no more chunks will begin."""
        return not self._chunks or bool(self._errors)

    def _take(self, busy: int = 0) -> tuple[int, Array] | None:
        """The next chunk, to be waited for by ``busy`` processes more; None if there is none."""
        with self._changed:
            if self._is_over():
                return None
            self._busy += busy
            return self._chunks.popleft()

    def _put(self, number: int, done: Done) -> None:
        """Keeps what a chunk did."""
        with self._changed:
            self._done[number] = done
            if self._launch.progress is not None:
                found = [one.execution for one in self._done.values()]
                self._launch.progress(sum(one.blocks for one in found if one is not None))

    def _take_part(self, job: Job) -> None:
        """Runs chunks in this process, until there are no more."""
        work, number = None, -1
        try:
            work = Work(job)
            while (item := self._take()) is not None:
                number, blocks = item
                self._put(number, Done(work.run(blocks), work.findings))
            self._counted.append(work.end())
        except Exception as error:
            self._fail(number, _ChunkFailed(failed(error, work)))

    def _attend(self, worker: _Worker, job: Job) -> None:
        """Has chunks run by another process, until there are no more; nobody waits for it if it
        begins too late for any."""
        number, counts = -1, 0
        try:
            while not worker.is_ready(0.02):
                if self._is_over():
                    return
            worker.ask(job)
            while (item := self._take(1 - counts)) is not None:
                (number, blocks), counts = item, 1
                self._put(number, worker.ask(Chunk(blocks)))
            counted = worker.ask(Chunk(None)).execution
            assert counted is not None
            if counts:
                self._counted.append(counted)
        except BaseException as error:
            if counts or not self._is_over():
                self._fail(number, error)
        finally:
            with self._changed:
                self._busy -= counts
                self._changed.notify_all()

    def _fail(self, number: int, error: BaseException) -> None:
        with self._changed:
            self._errors[number] = error
            self._changed.notify_all()


class _ChunkFailed(Exception):
    """A worker's answer that is an error."""

    def __init__(self, failed: Failed):
        super().__init__(failed)
        self.failed = failed


class _Worker:
    """A process that runs blocks."""

    def __init__(self, surroundings: Surroundings):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=list(surroundings.path))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._channel = Channel(self._process.stdout, self._process.stdin)
        self._channel.send(surroundings)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        """Waits until the process is ready, or has ended, which the first question to it shows."""
        with contextlib.suppress(EOFError, OSError):
            self._channel.receive()
        self._ready.set()

    def has_ended(self) -> bool:
        """Whether there is no such process any more."""
        return self._process.poll() is not None

    def is_ready(self, seconds: float) -> bool:
        """Whether the process can be asked, at most so many seconds later."""
        return self._ready.wait(seconds)

    def begin(self, attend: Callable[[], None]) -> None:
        """Calls a function that asks the process, in a thread, when the last one has ended."""
        before = self._thread

        def run() -> None:
            before.join()
            attend()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def ask(self, message: Job | Chunk) -> Done:
        """Has a message answered.

        Raises:
          _ChunkFailed: the other process answers with an error.
          SimulationError: it has ended.
        """
        try:
            self._channel.send(message)
            answer: Any = self._channel.receive()
        except (EOFError, OSError) as error:
            status = self._process.wait()
            raise SimulationError(
                "a process that runs blocks of the grid has ended",
                got=f"exit status {status}",
                hint="run in one process to see why, or with less memory: processes=1",
            ) from error
        if isinstance(answer, Failed):
            raise _ChunkFailed(answer)
        assert isinstance(answer, Done)
        return answer

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # What it was not told any more.
            self._channel.close()


_lock = threading.Lock()
_members: list[_Worker] = []
_known: list[Surroundings] = []


def _team(size: int) -> list[_Worker]:
    """So many processes; those of earlier launches are used again."""
    surroundings = _surroundings()
    assert surroundings is not None
    if _known != [surroundings]:
        _dismiss()
        _known[:] = [surroundings]
    for one in [one for one in _members if one.has_ended()]:
        _members.remove(one)
        one.stop()
    while len(_members) < size:
        _members.append(_Worker(surroundings))
    return _members[:size]


def _dismiss() -> None:
    """Ends all processes."""
    while _members:
        _members.pop().stop()


def _in_child() -> None:
    """A forked process starts others of its own: these belong to the one that it is forked from."""
    global _lock
    _lock = threading.Lock()
    _of_parent.extend(_members)
    _members.clear()


_of_parent: list[_Worker] = []
atexit.register(_dismiss)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _surroundings() -> Surroundings | None:
    """What other processes must know; None if there is a plugin that they cannot import."""
    manager = plugins.manager()
    registered = []
    for name, plugin in manager.registered().items():
        if isinstance(plugin, types.ModuleType) and plugin.__name__ != "__main__":
            registered.append((name, plugin.__name__))
        elif hasattr(plugin, plugins.INSTRUCTIONS):
            return None
    return Surroundings(tuple(sys.path), tuple(registered))
