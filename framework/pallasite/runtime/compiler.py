"""From a traced kernel to a :class:`CompiledKernel`, through two caches.

A kernel that this process has compiled is found in memory, first by the identity of its trace, then
by its content; one that any process has compiled is found on disk (options ``cache`` and
``cache_dir``). What the content is, and when a kernel is not kept on disk, is in
``pallasite_std.caching``.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import threading
import time
from collections.abc import Hashable
from typing import Any

from pallasite import _jax, config, forks, garbage, plugins
from pallasite.codegen.compiled import CompiledKernel
from pallasite.errors import MissingNameError, PluginError
from pallasite.language.spec import KernelSpec
from pallasite.launch import DeviceMesh
from pallasite.lowering import recording
from pallasite.plugin_values import NOTED
from pallasite.runtime import serialization
from pallasite.runtime.store import SealedStore
from pallasite.stores import KERNELS
from pallasite.target_selection import select_target
from pallasite.targets import Target

_MEMORY_ENTRIES = 1024


class Unkeyable(Exception):
    """A kernel holds something that cannot be compared between processes; says what."""


@dataclasses.dataclass(frozen=True)
class CacheInfo:
    """What happened to the kernels that were asked for in this process.

    Attributes:
      memory_hits: found in memory.
      disk_hits: found on disk.
      compiles: compiled, with or without a cache.
      unkeyable: compiled, and not kept on disk because they cannot be compared between processes.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    compiles: int = 0
    unkeyable: int = 0


@dataclasses.dataclass(frozen=True)
class _Request:
    """One kernel under everything that affects the result; compared by identity of the trace."""

    spec: KernelSpec
    target: Target
    assemble: bool
    disassemble: bool
    keep: bool
    device_mesh: DeviceMesh
    environment: tuple[Hashable, ...]


class _Memory:
    """A bounded dictionary that forgets what was not used for the longest time."""

    def __init__(self) -> None:
        self._entries: collections.OrderedDict[Hashable, CompiledKernel] = collections.OrderedDict()

    def get(self, key: Hashable) -> CompiledKernel | None:
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: Hashable, kernel: CompiledKernel) -> None:
        self._entries[key] = kernel
        self._entries.move_to_end(key)
        while len(self._entries) > _MEMORY_ENTRIES:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        self._entries.clear()


_lock = threading.RLock()
_by_request = _Memory()
_by_content = _Memory()
_counts: collections.Counter[str] = collections.Counter()
_stores: dict[Any, SealedStore] = {}
_code = 0
"""The state of plugins' code in memory that the kernels in memory are from."""


def compile_kernel(
    spec: KernelSpec,
    target: str | Target | None = None,
    *,
    assemble: bool = False,
    disassemble: bool = False,
    keep: bool = True,
    device_mesh: DeviceMesh | None = None,
) -> CompiledKernel:
    """Compiles a traced kernel, or finds it in a cache.

    With the option ``dump``, for kernels with ``debug=True``, and where layouts are recorded
    (:mod:`pallasite.lowering.recording`), the kernel is compiled even if it is in a cache.

    Args:
      spec: the kernel.
      target: what to compile for; by default what the kernel's ``CompilerParams`` or else the
        configuration says.
      assemble: whether to make machine code and count registers.
      disassemble: whether to show machine code as text; implies ``assemble``.
      keep: whether the result holds the text of the jaxpr, the MLIR, the LLVM IR and the layouts.
      device_mesh: the JAX device mesh around the call.

    Raises:
      PallasiteError: anything in the kernel that cannot work; it names the user's line.
    """
    with forks.unforked(), garbage.uncollected():
        request = _Request(
            spec,
            select_target(target if target is not None else spec.params.target),
            assemble or disassemble,
            disassemble,
            keep or spec.debug,
            device_mesh or DeviceMesh(),
            _environment(),
        )
        return _compile_kernel(request)


def _compile_kernel(request: _Request) -> CompiledKernel:
    spec = request.spec
    with _lock:
        found = _by_request.get(request)
        if found is None and not request.keep:
            found = _by_request.get(dataclasses.replace(request, keep=True))
    if found is not None:
        _count("memory_hits")
        return found
    recorded = recording.active() is not None
    fresh = spec.debug or recorded or config.get("dump") is not None
    kernel = _compile(request) if fresh else _find_or_compile(request)
    with _lock:
        _by_request.put(request, kernel)
    if spec.debug:
        print(f"{kernel.name}:\n{kernel.mlir}\n{kernel.ptx}")
    return kernel


def cache_info() -> CacheInfo:
    """Counts since the process started or :func:`clear_memory` was called."""
    with _lock:
        return CacheInfo(**_counts)


def clear_memory() -> None:
    """Forgets the kernels in memory and sets the counts to zero; the disk cache stays."""
    forget_kernels()
    with _lock:
        _counts.clear()


def _count(what: str) -> None:
    with _lock:
        _counts[what] += 1


def forget_kernels() -> None:
    """Forgets the kernels in memory, since plugins have changed, or their code, or options."""
    with _lock:
        _by_request.clear()
        _by_content.clear()


def _find_or_compile(request: _Request) -> CompiledKernel:
    code = _watch_code()
    try:
        keys = _content_keys(request, code)
    except Unkeyable:
        _count("unkeyable")
        return _compile(request)
    with _lock:
        found = next((one for one in map(_by_content.get, keys) if one is not None), None)
    if found is not None:
        _count("memory_hits")
        return found
    store = _store()
    kernel = None
    if store is not None:
        kernel = next((one for key in keys if (one := _read(store, key)) is not None), None)
    if kernel is None:
        used = plugins.manager().generation()
        kernel = _compile(request)
        if store is not None and plugins.manager().generation() == used:  # None failed meanwhile.
            _write(store, keys[0], kernel)
    else:
        _count("disk_hits")
    with _lock:
        _by_content.put(keys[0], kernel)
    return kernel


def _content_keys(request: _Request, code: int | None = None) -> list[str]:
    """A key of all that the result of a compilation depends on, then that of a result which has
    texts in addition, if this one has none: SHA-256 in hexadecimal.

    Args:
      request: what is compiled.
      code: the number of the present state of the code of plugins, if that is known.

    Raises:
      Unkeyable: something that cannot be compared between processes.
    """
    source = _keys()
    if source is None:
        raise Unkeyable("no plugin says what kernels are")
    parts = [
        *source.canonical_parts((request.spec, request.target, request.device_mesh)),
        source.environment_text(assemble=request.assemble, code=code),
    ]
    whole = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass"))
    keys = []
    for keep in (False, True):
        if keep or not request.keep:
            one = whole.copy()
            one.update(f"\0{(request.assemble, request.disassemble, keep)}".encode())
            keys.append(one.hexdigest())
    return keys


def _keys() -> Any:
    """What says what a kernel is, and the code that compiles it; None if no plugin has it."""
    try:
        return plugins.manager().implementation("cache_keys")
    except (MissingNameError, PluginError):
        return None


def _watch_code() -> int:
    """Forgets what was compiled by code of plugins that was changed in this process since; returns
    the number of its present state."""
    global _code
    keys = _keys()
    found = 0 if keys is None else keys.loaded_code()
    with _lock:
        changed, _code = found != _code, found
    if changed:
        config.changed()
    return found


def _environment() -> tuple[Hashable, ...]:
    """What can change within a process: options, plugins, and whether layouts are recorded."""
    options = tuple(
        config.get(name)
        for name, option in sorted(config.OPTIONS.items())
        if option.affects_code and name not in ("cache", "cache_dir")
    )
    in_process = any(
        plugin.in_process and plugin.state != "disabled" for plugin in plugins.manager().plugins()
    )
    registry = plugins.registry() if in_process else None
    return (*options, _jax.debug_checks_enabled(), registry, recording.active())


def _compile(request: _Request) -> CompiledKernel:
    with plugins.one_registry(), config.bound(NOTED, {}):
        return _compile_anew(request)


def _compile_anew(request: _Request) -> CompiledKernel:
    # These are heavy, and not needed for a kernel that is on disk.
    from pallasite.codegen.assembler import find_assembler
    from pallasite.codegen.changes import attributed_errors
    from pallasite.codegen.compile import compile_lowered
    from pallasite.ir.context import lent_context
    from pallasite.lowering.entry import lower_kernel
    from pallasite.passes.pipeline import PassContext, run_stage

    if request.assemble:
        find_assembler()  # If it is missing, no line of the kernel is to blame.
    _count("compiles")
    spec = request.spec
    context = PassContext(spec.name, request.target, spec.params, spec.mesh, spec)
    errors = attributed_errors(context.changes, spec.name, spec.location)
    with errors, lent_context() as mlir:
        jaxpr = run_stage("jaxpr", spec.jaxpr, context)
        if jaxpr is not spec.jaxpr:
            spec = spec.replace(jaxpr=jaxpr)
        start = time.perf_counter()
        lowered = lower_kernel(spec, request.target, device_mesh=request.device_mesh, context=mlir)
        seconds = time.perf_counter() - start
        if lowered.inference is not None:
            context.timings.append(("infer layouts", lowered.inference.seconds))
            seconds -= lowered.inference.seconds
        context.timings.append(("lower", seconds))
        return compile_lowered(
            lowered,
            assemble=request.assemble,
            disassemble=request.disassemble,
            keep=request.keep,
            context=context,
        )


def _store() -> SealedStore | None:
    if not config.get("cache"):
        return None
    directory = config.get("cache_dir")
    with _lock:
        if directory not in _stores:
            _stores[directory] = SealedStore(directory, KERNELS)
        return _stores[directory]


def _read(store: SealedStore, key: str) -> CompiledKernel | None:
    data = store.get(key)
    if data is None:
        return None
    try:
        return serialization.loads(data)
    except serialization.CorruptError:
        store.discard(key)
        return None


def _write(store: SealedStore, key: str, kernel: CompiledKernel) -> None:
    """Keeps a kernel, unless it may be from other code than the key says."""
    try:
        if _keys().loaded_code() != 0 or not _keys().files_unchanged():
            return
        data = serialization.dumps(kernel)
    except TypeError:
        _count("unkeyable")
        return
    store.put(key, data)
