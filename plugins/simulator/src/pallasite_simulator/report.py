"""Runs for the command line: the executor's reports."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pallasite.plugin import PtxLaunch, RunOptions, RunReport
from pallasite.plugin.runtime import CompiledKernel
from pallasite_simulator.api import Simulation, run_ptx, simulate, simulate_devices
from pallasite_simulator.devices.execution import provided, provider_of
from pallasite_simulator.devices.meeting import Meeting
from pallasite_simulator.types import Array
from pallasite_std.api import communicates


def inspect(compiled: CompiledKernel, inputs: Sequence[Array], options: RunOptions) -> RunReport:
    """Runs a compiled kernel; one that communicates, when all devices of its mesh have called."""
    if communicates(compiled):
        return _meet(compiled, inputs, options)
    simulation = simulate(
        compiled,
        *inputs,
        blocks=options.blocks,
        sanitize=options.sanitize,
        statistics=options.statistics,
        progress=options.progress,
        processes=options.processes,
    )
    return _report(compiled.name, simulation)


_meetings: dict[int, tuple[CompiledKernel, Meeting[RunReport]]] = {}
_lock = threading.Lock()


def _meet(compiled: CompiledKernel, inputs: Sequence[Array], options: RunOptions) -> RunReport:
    """Runs a kernel on several devices, each of which calls this on a thread of its own."""
    hidden = provided(compiled)
    rank, count = provider_of(hidden[0]).identify(inputs[hidden[0].input])
    made = {one.input for one in hidden}
    own = [one for number, one in enumerate(inputs) if number not in made]
    with _lock:
        _, meeting = _meetings.setdefault(id(compiled), (compiled, Meeting(compiled.name, count)))

    def run(all_inputs: Sequence[Sequence[Array]]) -> list[RunReport]:
        simulations = simulate_devices(
            compiled,
            all_inputs,
            sanitize=options.sanitize,
            statistics=options.statistics,
            progress=options.progress,
        )
        return [
            _report(f"{compiled.name} on device {number}", one)
            for number, one in enumerate(simulations)
        ]

    return meeting.run(rank, own, run)


def inspect_ptx(launch: PtxLaunch, options: RunOptions) -> RunReport:
    """Runs PTX."""
    simulation = run_ptx(
        launch.ptx,
        launch.arguments,
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        shared_memory_bytes=launch.shared_memory_bytes,
        name=launch.name,
        target=launch.target,
        blocks=options.blocks,
        sanitize=options.sanitize,
        statistics=options.statistics,
        progress=options.progress,
        processes=options.processes,
    )
    return _report(launch.name or "kernel", simulation)


def _report(name: str, simulation: Simulation) -> RunReport:
    sections = {}
    data: dict[str, object] = {}
    if simulation.note:
        sections["note"] = simulation.note
        data["note"] = simulation.note
    if simulation.unwritten:
        sections["warning"] = "\n".join(f"warning: {one}" for one in simulation.unwritten)
        data["unwritten"] = list(simulation.unwritten)
    if simulation.statistics is not None:
        sections["statistics"] = str(simulation.statistics)
        data["statistics"] = simulation.statistics.as_json()
    return RunReport(
        name=name,
        outputs=simulation.outputs,
        printed=simulation.printed,
        findings=tuple(map(str, simulation.findings)),
        sections=sections,
        data=data,
    )
