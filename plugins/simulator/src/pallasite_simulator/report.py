"""Runs for the command line: the executor's reports."""

from __future__ import annotations

from collections.abc import Sequence

from pallasite.plugin import PtxLaunch, RunOptions, RunReport
from pallasite.plugin.runtime import CompiledKernel
from pallasite_simulator.api import Simulation, run_ptx, simulate
from pallasite_simulator.types import Array


def inspect(compiled: CompiledKernel, inputs: Sequence[Array], options: RunOptions) -> RunReport:
    """Runs a compiled kernel."""
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
