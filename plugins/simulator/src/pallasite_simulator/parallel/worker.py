"""The process that runs blocks for another one, which talks to it through its standard streams."""

from __future__ import annotations

import importlib
import os
import traceback

import numpy as np

from pallasite import config, plugins
from pallasite.errors import PallasiteError
from pallasite_simulator.engine.memory import GlobalMemory
from pallasite_simulator.engine.program import Program
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.launch import Execution, Launch, run_blocks
from pallasite_simulator.parallel.messages import Channel, Chunk, Done, Failed, Job, Surroundings
from pallasite_simulator.programs import load
from pallasite_simulator.statistics.traffic import SECTOR_BYTES, Traffic
from pallasite_simulator.types import Array


def main() -> None:
    """Serves until the other process ends."""
    channel = Channel(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # Whatever is printed must not get between the results.
    try:
        surroundings = channel.receive()
        assert isinstance(surroundings, Surroundings)
        for name, module in surroundings.plugins:
            plugins.register(importlib.import_module(module), name=name)
        _serve(channel)
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _serve(channel: Channel) -> None:
    work: _Work | None = None
    while True:
        message = channel.receive()
        try:
            if isinstance(message, Job):
                work = _Work(message)
                channel.send(Done(None))
            else:
                assert isinstance(message, Chunk) and work is not None
                if message.blocks is None:
                    channel.send(Done(work.end()))
                    work = None
                else:
                    channel.send(Done(work.run(message.blocks)))
        except PallasiteError as error:
            channel.send(Failed(error))
        except Exception as error:
            text = f"a process that runs blocks failed: {type(error).__name__}: {error}"
            channel.send(Failed(SimulationError(text), traceback.format_exc()))


class _Work:
    """A job, prepared."""

    def __init__(self, job: Job):
        self.options = {"disabled_plugins": job.disabled_plugins}
        with config.scoped(**self.options):
            program = load(job.ptx, job.name, job.multiprocessors)
        self.program: Program = program
        contents = np.asarray(np.memmap(job.file, np.uint8, "r+"))
        self.memory = GlobalMemory()
        for one in job.allocations:
            self.memory.allocate(one.name, one.size, 1, one.writable, offset=one.offset)
        self.memory.seal(contents[: job.memory_bytes])
        self.parameters: Array = np.frombuffer(bytearray(job.parameters), np.uint8)
        self.traffic: Traffic | None = None
        if job.statistics:
            sectors = -(-job.memory_bytes // SECTOR_BYTES)
            flags = contents[job.memory_bytes :].view(np.bool_)
            self.traffic = Traffic(job.memory_bytes)
            self.traffic.sectors_read = flags[:sectors]
            self.traffic.sectors_written = flags[sectors : 2 * sectors]
        self.launch = Launch(
            program, job.geometry, (), dynamic_shared_bytes=job.dynamic_shared_bytes
        )

    def run(self, blocks: Array) -> Execution:
        """Runs blocks; what was counted of accesses to memory comes at the end."""
        return run_blocks(self.launch, self.memory, self.parameters, blocks, self.traffic)

    def end(self) -> Execution:
        """What was counted of accesses to memory."""
        execution = Execution.empty(self.program)
        if self.traffic is not None:
            execution.add_traffic(self.program, self.traffic)
            execution.sectors = None  # The other process has the very same.
        return execution
