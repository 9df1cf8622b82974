"""The process that runs blocks for another one, which talks to it through its standard streams."""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback

import numpy as np

from pallasite.plugin import PallasiteError, config, plugins
from pallasite_simulator.engine.memory import GlobalMemory
from pallasite_simulator.engine.program import Program
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.launch import Execution, Launch, run_blocks
from pallasite_simulator.parallel.messages import Channel, Chunk, Done, Failed, Job, Surroundings
from pallasite_simulator.programs import load
from pallasite_simulator.sanitizer.findings import Findings
from pallasite_simulator.sanitizer.launch_state import LaunchState
from pallasite_simulator.statistics.traffic import Touches, Traffic
from pallasite_simulator.types import Array


def main() -> None:
    """Serves until the other process ends."""
    channel = Channel(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # Whatever is printed must not get between the results.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        surroundings = channel.receive()
        assert isinstance(surroundings, Surroundings)
        for name, module in surroundings.plugins:
            plugins.register(importlib.import_module(module), name=name)
        channel.send(Done(None))
        _serve(channel)
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _end_with(parent: int) -> None:
    """Ends this process soon after the other one, which may not come to do it itself; blocks of a
    kernel can take any time."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def _serve(channel: Channel) -> None:
    work: Work | None = None
    while True:
        message = channel.receive()
        try:
            if isinstance(message, Job):
                work = Work(message)
                channel.send(Done(None))
            else:
                assert isinstance(message, Chunk) and work is not None
                if message.blocks is None:
                    channel.send(Done(work.end()))
                    work = None
                else:
                    channel.send(Done(work.run(message.blocks), work.findings))
        except Exception as error:
            channel.send(failed(error, work))


def failed(error: Exception, work: Work | None) -> Failed:
    """What is said of an exception, where it is handled."""
    if isinstance(error, PallasiteError):
        return Failed(error, findings=work.findings if work is not None else None)
    text = f"a process that runs blocks failed: {type(error).__name__}: {error}"
    return Failed(SimulationError(text), traceback.format_exc())


class Work:
    """A job, prepared.

    Attributes:
      findings: what the sanitizer found in the last blocks that ran; None without one.
    """

    def __init__(self, job: Job):
        with config.scoped(disabled_plugins=job.disabled_plugins):
            program = load(job.ptx, job.name, job.multiprocessors)
        self._program: Program = program
        contents = np.asarray(np.memmap(job.file, np.uint8, "r+"))
        self._memory = GlobalMemory()
        for one in job.allocations:
            self._memory.allocate(one.name, one.size, 1, one.writable, offset=one.offset)
        self._memory.seal(contents[: job.memory_bytes])
        self._parameters: Array = np.frombuffer(bytearray(job.parameters), np.uint8)
        self._traffic: Traffic | None = None
        if job.sectors_at is not None:
            kind = Traffic if job.statistics else Touches
            self._traffic = kind(job.memory_bytes)
            self._traffic.share(contents[job.sectors_at :].view(np.bool_))
        self._sanitizer: LaunchState | None = None
        self.findings: Findings | None = None
        self._watchdog = job.watchdog
        if job.checks is not None:
            self._sanitizer = LaunchState(job.checks, job.requests)
        self._launch = Launch(
            program,
            job.geometry,
            (),
            dynamic_shared_bytes=job.dynamic_shared_bytes,
            # The other process adds the findings to errors: it knows those of earlier blocks.
            make_observer=self._sanitizer.observer if self._sanitizer is not None else None,
        )

    def run(self, blocks: Array) -> Execution:
        """Runs blocks; what was counted of accesses to memory comes at the end."""
        if self._sanitizer is not None:
            self.findings = self._sanitizer.findings = Findings(self._program.name)
        return run_blocks(
            self._launch, self._memory, self._parameters, blocks, self._traffic, self._watchdog
        )

    def end(self) -> Execution:
        """What was counted of accesses to memory."""
        execution = Execution.empty(self._program)
        if self._traffic is not None:
            execution.add_traffic(self._program, self._traffic)
            execution.sectors = None  # The other process sees them.
        return execution
