"""What provides the table of a kernel where programs run; see ``OperandProvider``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import LaunchRequest, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.runtime import CompiledKernel, LaunchDevice
from pallasite_multigpu.protocol import layout
from pallasite_multigpu.runtime import (
    copy_table,
    groups,
    process_groups,
    table_launch,
    warm_up,
    watcher,
    workspace,
)
from pallasite_multigpu.simulation.memory import SimulatedTables


class TableProvider:
    """Makes the tables of kernels.

    Methods get what lowering keeps with the operand by keyword: ``communicates`` (whether the
    kernel meets its peers, or only asks who it is), ``fingerprint``, ``location``,
    ``multicasts`` (whether it uses addresses that mean all devices), ``clears`` (whether it clears
    its semaphores itself), ``network`` (whether it can reach devices of other hosts) and
    ``reached`` (kinds and numbers of the buffers that peers reach).
    """

    def in_jax(
        self,
        compiled: CompiledKernel,
        request: LaunchRequest,
        *,
        communicates: bool,
        fingerprint: int,
        location: str,
        multicasts: bool,
        clears: bool,
        network: bool,
        reached: Sequence[Sequence[Any]],
    ) -> Any:
        """The table of the device that runs the program.

        On GPUs of one process, the kernel gets it where the group has it; of several, it is copied
        from there. Elsewhere, and for a kernel that meets
        nobody, it says who the device is and nothing more; the simulator fills in the rest.
        """
        location = location or str(_jax.users_line(None) or "")
        devices = math.prod(size for _, size in request.device_mesh.axes)
        if communicates and request.platform != "cuda":
            _check_one_process(compiled, request, location)
        if not communicates or request.platform != "cuda":
            return _who_this_is(request, devices)
        request.call["clear"] = not clears
        watcher.know(fingerprint, watcher.KernelName(compiled.name, location))
        number = groups.OTHER_MACHINE
        if request.devices is not None and _are_here(request.devices):
            if multicasts:
                raise UnsupportedError(
                    f"{_at(location)}kernel {compiled.name!r} uses multicast over NVLink, which is"
                    " not set up for these GPUs",
                    expected="remote references, to one device at a time; or the simulator, which"
                    " has multicast",
                )
            copy_table.register("cuda")
            group = groups.group_of(request.devices)
            if group.far and not network:
                raise UnsupportedError(
                    f"{_at(location)}kernel {compiled.name!r} reaches devices of other hosts, which"
                    " no NVLink connects, and was compiled without the network",
                    hint="PALLASITE_PEER_NETWORK=nvshmem before it is compiled",
                )
            number = group.number
            table = next(
                one for one in compiled.launch.hidden_operands if one.provider.endswith(":TABLES")
            )
            here = [one for one in request.devices if one.process_index == jax.process_index()]
            warm_up.warm_up(compiled, table.name, here)
            heap = process_groups.heap()
            if groups.is_of_processes(request.devices):
                if heap is not None:
                    workspace.launch_there(compiled, request, heap, reached)
            else:
                with jax.enable_x64(True):
                    stands = table_launch.launch_with(compiled, request, number, table.input)
                if stands is not None:
                    return stands
        with jax.enable_x64(True):
            return copy_table.call(number, layout.table_words(devices))

    def on_device(
        self,
        compiled: CompiledKernel,
        device: LaunchDevice,
        *,
        communicates: bool,
        fingerprint: int,
        location: str,
        multicasts: bool,
        clears: bool,
        network: bool,
        reached: Sequence[Sequence[Any]],
    ) -> np.ndarray:
        """The table of a launch by itself, as of a mesh with one device.

        Raises:
          UnsupportedError: the kernel communicates, and is launched on a GPU without JAX.
        """
        del fingerprint, multicasts, clears, network, reached
        words = next(
            compiled.launch.inputs[one.input].shape[0]
            for one in compiled.launch.hidden_operands
            if one.provider.endswith(":TABLES")
        )
        if communicates and device.platform != "cpu":
            raise UnsupportedError(
                f"{_at(location)}kernel {compiled.name!r} communicates, and is launched on"
                " one GPU alone",
                expected="a call from JAX, inside jax.shard_map",
            )
        return layout.table(0, [0] * layout.devices_of(words))

    def identify(self, table: np.ndarray) -> tuple[int, int]:
        """The device of a table: its number in the mesh, and how many there are."""
        return int(table[layout.RANK]), int(table[layout.COUNT])

    def simulated(
        self,
        compiled: CompiledKernel,
        count: int,
        *,
        communicates: bool,
        fingerprint: int,
        location: str,
        multicasts: bool,
        clears: bool,
        network: bool,
        reached: Sequence[Sequence[Any]],
    ) -> SimulatedTables:
        """What the simulator puts into the memory of ``count`` devices that run the kernel."""
        del compiled, fingerprint, location, multicasts, clears, network, reached
        return SimulatedTables(count, communicates)


def _check_one_process(compiled: CompiledKernel, request: LaunchRequest, location: str) -> None:
    if request.devices is not None and groups.is_of_processes(request.devices):
        raise UnsupportedError(
            f"{_at(location)}kernel {compiled.name!r} communicates with devices of other"
            f" processes, on {request.platform}",
            expected="GPUs; the simulator runs devices of one process",
            hint="give one process several CPU devices:"
            " XLA_FLAGS=--xla_force_host_platform_device_count=8",
        )


def _at(location: str) -> str:
    return f"{location}: " if location else ""


def _are_here(devices: tuple[Any, ...]) -> bool:
    return all(one.platform in ("gpu", "cuda") for one in devices)


def _who_this_is(request: LaunchRequest, devices: int) -> Any:
    position: Any = 0
    for name, size in request.device_mesh.axes:
        position = position * size + jax.lax.axis_index(name)
    with jax.enable_x64(True):
        words = jnp.asarray(layout.table(0, [0] * devices))
        return words.at[layout.RANK].set(jnp.asarray(position).astype(jnp.uint64))


TABLES = TableProvider()
