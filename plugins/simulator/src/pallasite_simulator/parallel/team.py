"""The processes that run blocks, and how a launch is shared among them."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite import config, plugins
from pallasite.errors import PallasiteError
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
from pallasite_simulator.statistics.traffic import SECTOR_BYTES
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.memory import GlobalMemory

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


def obstacle_of(launch: Launch) -> str | None:
    """Why the blocks of a launch must run in this process; None if they need not."""
    if launch.sanitizer is not None or launch.make_observer is not None:
        return "what its blocks do is compared with one another"
    if not sys.executable:
        return "there is no Python program to start"
    if _surroundings() is None:
        return "a plugin that was registered in this process is no module"
    return obstacle(launch.program)


@contextlib.contextmanager
def shared_bytes(size: int) -> Iterator[tuple[str, Array]]:
    """Zeroed memory that other processes can map, and the file behind it."""
    folder = None
    with contextlib.suppress(OSError):
        status = os.statvfs(_MEMORY_FOLDER)
        if status.f_bavail * status.f_frsize > 2 * size and os.access(_MEMORY_FOLDER, os.W_OK):
            folder = _MEMORY_FOLDER
    with tempfile.NamedTemporaryFile(prefix="pallasite-", dir=folder) as file:
        file.truncate(max(size, 1))
        yield file.name, np.asarray(np.memmap(file.name, np.uint8, "r+"))


def memory_bytes(size: int, statistics: bool) -> int:
    """Bytes to share for global memory of a size."""
    return size + (2 * -(-size // SECTOR_BYTES) if statistics else 0)


def run_shared(
    launch: Launch,
    memory: GlobalMemory,
    parameters: Array,
    file: str,
    contents: Array,
) -> Execution:
    """Runs the blocks of a launch in several processes.

    The results are those of one process: chunks of blocks are put together in their order, and of
    several errors, that of the earliest chunk is raised.

    Args:
      launch: the launch.
      memory: global memory, ready.
      parameters: the parameter buffer.
      file, contents: from :func:`shared_bytes`; ``memory`` is in the beginning of them.

    Raises:
      SimulationError: what the kernel does has no meaning.
    """
    program = launch.program
    order = launch.order
    chunks = _chunks(order, launch)
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
        launch.statistics,
    )
    execution = Execution.empty(program)
    with _lock:
        team = _team(min(launch.processes, len(chunks)))
        try:
            done, counted = _Round(team, job, chunks, launch).run()
        except PallasiteError:
            raise
        except BaseException:
            _dismiss()
            raise
    for one in done:
        execution.add(one)
    for one in counted:
        execution.add(one)
    if launch.statistics:
        sectors = -(-memory.size // SECTOR_BYTES)
        flags = contents[memory.size :].view(np.bool_)
        execution.sectors = (flags[:sectors].copy(), flags[sectors : 2 * sectors].copy())
    return execution


def _chunks(order: Array, launch: Launch) -> list[Array]:
    """Blocks in pieces of whole clusters: as large as waves, but some for each process."""
    cluster = launch.geometry.cluster_size
    share = -(-len(order) // (launch.processes * cluster)) * cluster
    size = max(cluster, min(wave_size(launch.geometry, launch.shared_bytes), share))
    return [order[start : start + size] for start in range(0, len(order), size)]


class _Round:
    """One job, and a thread for each process that hands out its chunks."""

    def __init__(self, team: Sequence[_Worker], job: Job, chunks: Sequence[Array], launch: Launch):
        self._team = team
        self._job = job
        self._launch = launch
        self._chunks: queue.SimpleQueue[tuple[int, Array]] = queue.SimpleQueue()
        for item in enumerate(chunks):
            self._chunks.put(item)
        self._done: dict[int, Execution] = {}
        self._counted: dict[int, Execution] = {}
        self._errors: dict[int, BaseException] = {}
        self._lock = threading.Lock()

    def run(self) -> tuple[list[Execution], list[Execution]]:
        """Runs all chunks; returns what they did, and what each process counted.

        Raises:
          SimulationError: that of the earliest chunk that failed.
        """
        threads = [
            threading.Thread(target=self._attend, args=item, daemon=True)
            for item in enumerate(self._team)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            first = min(self._errors)
            error = self._errors[first]
            if isinstance(error, SimulationError):
                before = [one for number, one in sorted(self._done.items()) if number < first]
                texts = [text for one in before for text in one.output]
                error.printed = "".join([*texts, error.printed])
            raise error
        return [one for _, one in sorted(self._done.items())], list(self._counted.values())

    def _attend(self, place: int, worker: _Worker) -> None:
        number = -1
        try:
            worker.ask(self._job)
            while not self._errors:
                try:
                    number, blocks = self._chunks.get_nowait()
                except queue.Empty:
                    break
                found = worker.ask(Chunk(blocks))
                assert found is not None
                with self._lock:
                    self._done[number] = found
                    if self._launch.progress is not None:
                        self._launch.progress(sum(one.blocks for one in self._done.values()))
            counted = worker.ask(Chunk(None))
            assert counted is not None
            self._counted[place] = counted
        except BaseException as error:
            self._errors[number] = error


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
        self.ended = False

    def ask(self, message: Job | Chunk) -> Execution | None:
        """Has a message answered.

        Raises:
          SimulationError: the error of the other process, or its end.
        """
        try:
            self._channel.send(message)
            answer: Any = self._channel.receive()
        except (EOFError, OSError) as error:
            self.ended = True
            status = self._process.wait()
            raise SimulationError(
                "a process that runs blocks of the grid has ended",
                got=f"exit status {status}",
                hint="run in one process to see why, or with less memory: processes=1",
            ) from error
        if isinstance(answer, Failed):
            if answer.details:
                answer.error.add_note(answer.details)
            raise answer.error
        assert isinstance(answer, Done)
        return answer.execution

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
    for one in [one for one in _members if one.ended]:
        _members.remove(one)
        one.stop()
    while len(_members) < size:
        _members.append(_Worker(surroundings))
    return _members[:size]


def _dismiss() -> None:
    """Ends all processes."""
    while _members:
        _members.pop().stop()


atexit.register(_dismiss)


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
