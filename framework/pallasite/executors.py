"""Executors, as plain records: ways to run kernels, and what they are told and give back."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pallasite.errors import InvalidValueError
from pallasite.launch import DeviceMesh
from pallasite.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a kernel is run for a report; None leaves a thing to the executor and its options.

    Attributes:
      blocks: linear numbers of the blocks of the grid to run (x fastest); None for all.
      processes: how many processes share the work.
      progress: whether a progress bar is shown on standard error.
      sanitize: whether what the kernel does is checked, or names of checks.
      statistics: whether what the kernel does is counted.
    """

    blocks: tuple[int, ...] | None = None
    processes: int | None = None
    progress: bool | None = None
    sanitize: bool | tuple[str, ...] | None = None
    statistics: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PtxLaunch:
    """A kernel that is given as PTX, and one launch of it.

    Attributes:
      ptx: the text of a module.
      arguments: one for each parameter: a NumPy array (which the kernel may change) for a pointer,
        a NumPy scalar by value, None for a null pointer.
      grid, block, cluster: extents in CUDA's order (x, y, z); ``grid`` in blocks.
      shared_memory_bytes: dynamic shared memory of each block.
      name: of the kernel; may be left out if the module has only one.
      target: what the figures of a report are for; None for that of the module.
    """

    ptx: str
    arguments: tuple[Any, ...]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_memory_bytes: int = 0
    name: str | None = None
    target: Target | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """What one run of a kernel gave.

    Attributes:
      name: of the kernel.
      outputs: NumPy arrays.
      printed: what the kernel printed.
      findings: what is wrong with what it did, one text for each.
      sections: further text by title, for people.
      data: the same and more for programs, such as can be written as JSON.
    """

    name: str
    outputs: tuple[Any, ...] = ()
    printed: str = ""
    findings: tuple[str, ...] = ()
    sections: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """How a program calls a kernel, for the executor that runs it.

    Attributes:
      platform: the JAX platform that the program is lowered for.
      side_effects: whether the kernel does more than fill its outputs (it prints, say), so that it
        must run even if its results are unused.
      params: the kernel's ``CompilerParams``; None where only the compiled kernel is known.
      device_mesh: the device mesh around the call.
      devices: JAX's devices in the order of that mesh; None where JAX does not say.
      ordered: whether the call has ``communication_effect``.
      call: for JAX's launcher, what providers of hidden operands change: ``clear``, whether it
        clears scratch; the ``target`` of the call in its stead, and attributes for that.
    """

    platform: str
    side_effects: bool = True
    params: Any = None
    device_mesh: DeviceMesh = DeviceMesh()
    devices: tuple[Any, ...] | None = None
    ordered: bool = False
    call: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executor:
    """A way to run compiled kernels.

    Attributes:
      name: unique name, as in ``pallasite doctor`` and ``PALLASITE_EXECUTOR``.
      platforms: JAX platforms on which it can serve (``"cuda"``, ``"cpu"``, ...).
      run: ``run(compiled, *operands, request)`` returns the list of outputs. It is traced by JAX,
        so it must be made of JAX operations (an FFI call, a callback); ``request`` is a
        :class:`LaunchRequest`, passed by keyword.
      available: says whether it can work in this process: True, or the reason why not as a string
        (False gives no reason). It is asked each time a kernel is lowered. None means always.
      priority: the largest that is available for a platform is chosen; JAX's own launcher on CUDA
        has priority 0.
      overrides: names of plugins whose executor of the same name this one replaces.
      description: one line for ``pallasite doctor``.
      inspect: ``inspect(compiled, inputs, options)`` runs a kernel on NumPy arrays with
        :class:`RunOptions` and returns a :class:`RunReport`; None if it has nothing to report.
      run_ptx: ``run_ptx(launch, options)`` runs a :class:`PtxLaunch` and returns a
        :class:`RunReport`; None if it runs compiled kernels only.
    """

    name: str
    platforms: tuple[str, ...]
    run: Callable[..., Any]
    available: Callable[[], bool | str] | None = None
    priority: int = 0
    overrides: tuple[str, ...] = ()
    description: str = ""
    plugin: str = ""
    inspect: Callable[[Any, Any, RunOptions], RunReport] | None = None
    run_ptx: Callable[[PtxLaunch, RunOptions], RunReport] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.platforms, str):
            raise InvalidValueError(
                f"executor {self.name!r}: platforms is a tuple of names",
                got=repr(self.platforms),
                hint=f"platforms=({self.platforms!r},)",
            )
        if callable(self.run) and not _accepts(self.run, "request"):
            raise InvalidValueError(
                f"executor {self.name!r}: its function run does not accept the keyword 'request'",
                got=f"run{inspect.signature(self.run)}",
                expected="run(compiled, *operands, request)",
            )


def _accepts(function: Callable[..., Any], keyword: str) -> bool:
    """Whether a function can be called with a keyword; a function of unknown signature can."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        one.kind is inspect.Parameter.VAR_KEYWORD or (one.name == keyword and one.kind in kinds)
        for one in parameters.values()
    )
