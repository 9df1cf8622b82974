"""Pallasite's simulator: runs the PTX of kernels on the CPU, checks and counts what they do.

Where JAX is on the CPU, kernels run by it without further ado. What is here gives more of a run::

    simulation = pallasite_simulator.simulate(pallasite.compile(kernel, x), x)
    print(simulation.outputs, simulation.statistics, simulation.findings)

and runs PTX that came from elsewhere (:func:`run_ptx`). Everything is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Chip": "pallasite_simulator.statistics.chips",
    "DeadlockError": "pallasite_simulator.errors",
    "PtxError": "pallasite_simulator.errors",
    "SanitizerError": "pallasite_simulator.errors",
    "Simulation": "pallasite_simulator.api",
    "SimulationError": "pallasite_simulator.errors",
    "Statistics": "pallasite_simulator.statistics.summary",
    "TensorArgument": "pallasite_simulator.api",
    "TensorMap": "pallasite_simulator.engine.tensor_map",
    "add_chip": "pallasite_simulator.statistics.chips",
    "run_ptx": "pallasite_simulator.api",
    "simulate": "pallasite_simulator.api",
    "simulate_devices": "pallasite_simulator.api",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from pallasite_simulator.api import Simulation as Simulation
    from pallasite_simulator.api import TensorArgument as TensorArgument
    from pallasite_simulator.api import run_ptx as run_ptx
    from pallasite_simulator.api import simulate as simulate
    from pallasite_simulator.api import simulate_devices as simulate_devices
    from pallasite_simulator.engine.tensor_map import TensorMap as TensorMap
    from pallasite_simulator.errors import DeadlockError as DeadlockError
    from pallasite_simulator.errors import PtxError as PtxError
    from pallasite_simulator.errors import SanitizerError as SanitizerError
    from pallasite_simulator.errors import SimulationError as SimulationError
    from pallasite_simulator.statistics.chips import Chip as Chip
    from pallasite_simulator.statistics.chips import add_chip as add_chip
    from pallasite_simulator.statistics.summary import Statistics as Statistics


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'pallasite_simulator' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
