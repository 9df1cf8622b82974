"""Compiler parameters and options of the plugin."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from typing import Any

from pallasite.plugin import InvalidTypeError, config, option


@dataclasses.dataclass(frozen=True)
class MultiGpuOptions:
    """Compiler parameters of the plugin ``multigpu``, keywords of ``CompilerParams``.

    Attributes:
      exit_barrier: whether devices wait for each other when the kernel ends, so that nobody's
        memory is used again before all are done with it; None: if it reads memory of others.
    """

    exit_barrier: bool | None = option(
        None,
        "whether devices wait for each other at the kernel's end; None: where it reads peers",
        keyword=True,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.exit_barrier, bool | None):
            raise InvalidTypeError(
                "exit_barrier is neither true nor false",
                got=repr(self.exit_barrier),
                expected="True, False, or None: where the kernel reads memory of other devices",
            )


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not seconds >= 0 or math.isinf(seconds):
        raise ValueError
    return seconds


config.declare(
    config.Option(
        "peer_timeout",
        "PALLASITE_PEER_TIMEOUT",
        lambda: 120.0,
        _seconds,
        "seconds, 0 for ever",
        "how long a kernel waits for its peers on other devices before it gives up",
        affects_code=False,
    )
)


_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _bytes(value: Any) -> int:
    text = str(value).strip().upper()
    unit = text[-1:] if text[-1:] in _SIZES else ""
    count = int(text.removesuffix(unit)) * _SIZES[unit]
    if count <= 0:
        raise ValueError
    return count


config.declare(
    config.Option(
        "symmetric_heap",
        "PALLASITE_SYMMETRIC_HEAP",
        lambda: 2**30,
        _bytes,
        "bytes, also as 512M or 4G",
        "memory of a GPU that a process shares with those of other GPUs",
        affects_code=False,
    )
)


def _peer_memory(value: Any) -> str:
    if value not in PEER_MEMORY:
        raise ValueError
    return str(value)


PEER_MEMORY = ("auto", "ipc", "nvshmem")
"""How processes share memory."""

config.declare(
    config.Option(
        "peer_memory",
        "PALLASITE_PEER_MEMORY",
        lambda: "auto",
        _peer_memory,
        "auto, ipc or nvshmem",
        "how processes share memory: CUDA IPC on one machine, NVSHMEM anywhere",
        affects_code=False,
    )
)


def _peer_network(value: Any) -> str:
    text = str(value).strip().lower()
    if text in ("", "off"):
        return "off"
    if text.partition(" ")[0] != "nvshmem":
        raise ValueError
    try:
        return f"nvshmem {importlib.metadata.version('nvidia-nvshmem-cu13')}"
    except importlib.metadata.PackageNotFoundError:
        return "nvshmem"


config.declare(
    config.Option(
        "peer_network",
        "PALLASITE_PEER_NETWORK",
        lambda: "off",
        _peer_network,
        "off or nvshmem",
        "how kernels reach devices of other hosts, which no NVLink connects",
    )
)


def peer_network() -> str:
    """How kernels reach devices of other hosts: ``"off"``, or ``"nvshmem"`` and its version, which
    kernels depend on."""
    chosen: str = config.get("peer_network")
    return chosen


def symmetric_heap() -> int:
    """Bytes of memory that a process shares with others."""
    nbytes: int = config.get("symmetric_heap")
    return nbytes


def peer_memory() -> str:
    """How processes share memory; one of :data:`PEER_MEMORY`."""
    chosen: str = config.get("peer_memory")
    return chosen


def peer_timeout() -> float:
    """How long kernels wait for their peers, in seconds; 0 for ever."""
    seconds: float = config.get("peer_timeout")
    return seconds
