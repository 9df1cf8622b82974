"""JAX's own compiler of GPU kernels, without a GPU.

It is in the wheel ``jax-cuda13-pjrt``, whose folder of packages must be on ``sys.path`` or be named
by ``JAX_CUDA_COMPILER``; it wants a driver and a runtime, for which libraries stand in that a C
compiler makes of ``stand_ins.c``.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

_SOURCE = pathlib.Path(__file__).with_name("stand_ins.c")
_LIBRARY = pathlib.Path("jax_plugins", "xla_cuda13", "xla_cuda_plugin.so")
_BEHIND = re.compile(
    r"^(; ModuleID = |\t\.target|\s*\.headerflags|\s*Function : |//-+ )", re.MULTILINE
)
"""How what may be printed behind PTX begins: LLVM IR, and machine code."""

_BUFFER_SHIFT = 40
"""Buffer number n is told to be at ``(n + 1) << 40``."""


def missing() -> str | None:
    """What is missing to use the compiler here; None if nothing is."""
    if shutil.which("cc") is None:
        return "there is no C compiler"
    if shutil.which("ptxas") is None:
        return "there is no ptxas"
    return None if _plugin() else "the wheel jax-cuda13-pjrt is not installed"


def _plugin() -> pathlib.Path | None:
    folders = [os.environ.get("JAX_CUDA_COMPILER", ""), *sys.path]
    found = [pathlib.Path(one) / _LIBRARY for one in folders if one]
    return next((one for one in found if one.is_file()), None)


def version() -> str:
    """The version of JAX whose compiler this is."""
    return importlib.metadata.version("jax")


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor map, as the host asks for it: sizes, strides (in elements) and box from major to
    minor; ``element`` is a number of JAX's own, ``swizzle`` is in bytes."""

    buffer: int
    offset: int
    element: int
    swizzle: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A launch: in the bytes of parameters, buffers and tensor maps are named by numbers."""

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    parameters: tuple[bytes, ...]
    maps: dict[int, TensorMap]


class Compiled:
    """A kernel; ``ptx`` is what JAX's compiler made of it."""

    def __init__(self, module: bytes, capability: tuple[int, int]):
        """Compiles a module of JAX's GPU dialects, in bytecode.

        Raises:
          RuntimeError: it cannot be compiled.
        """
        library, stand_in = _libraries()
        stand_in.stand_in_capability(*capability)
        wanted = "MOSAIC_GPU_DUMP_PTX" in os.environ
        with _captured() as printed, _environment(MOSAIC_GPU_DUMP_PTX="1"):
            self._made = library.MosaicGpuCompile(module, len(module))
        if not self._made:
            raise RuntimeError("JAX cannot compile the kernel: " + printed[0][-1000:])
        before, self.ptx, behind = _split(printed[0])
        # Tests read what they asked for.
        with contextlib.suppress(OSError):
            os.write(1, (before + self.ptx * wanted + behind).encode())

    def record(self, buffers: int, sizes: list[int]) -> Recorded:
        """Has the host function launch the kernel.

        Args:
          buffers: how many there are.
          sizes: bytes of the kernel's parameters.
        """
        _, stand_in = _libraries()
        parameters: list[bytes] = []

        @ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p))
        def keep(pointers: Any) -> None:
            parameters.extend(ctypes.string_at(pointers[n], size) for n, size in enumerate(sizes))

        stand_in.stand_in_reset(keep)
        places = (ctypes.c_void_p * max(buffers, 1))(
            *[number + 1 << _BUFFER_SHIFT for number in range(buffers)]
        )
        host = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        )(self._made[1])
        host(self._made[0], None, places)
        start = ctypes.c_void_p()
        size = stand_in.stand_in_record(ctypes.byref(start))
        return _parsed(ctypes.string_at(start, size), tuple(parameters))


def buffer_of(address: int) -> tuple[int, int] | None:
    """The number of the buffer, and the offset in it, of an address; None for another number."""
    number = (address >> _BUFFER_SHIFT) - 1
    return None if number < 0 else (number, address & (1 << _BUFFER_SHIFT) - 1)


def _parsed(record: bytes, parameters: tuple[bytes, ...]) -> Recorded:
    maps: dict[int, TensorMap] = {}
    place, launch = 0, None
    while place < len(record):
        tag = record[place : place + 1]
        place += 1
        if tag == b"L":
            launch = struct.unpack_from("<10I", record, place)
            place += 40
            continue
        number, base, element, rank, swizzle = struct.unpack_from("<5q", record, place)
        place += 40
        lists = [struct.unpack_from(f"<{rank}q", record, place + 8 * rank * n) for n in range(3)]
        place += 24 * rank
        found = buffer_of(base)
        assert found is not None
        maps[number] = TensorMap(*found, element, swizzle, *lists)
    assert launch is not None
    cluster = tuple(one or 1 for one in launch[3:6])
    return Recorded(launch[:3], cluster, launch[6:9], launch[9], parameters, maps)


@functools.cache
def _libraries() -> tuple[Any, Any]:
    """JAX's library, and what stands in for the driver and the runtime."""
    folder = tempfile.mkdtemp(prefix="jax-compiler-")
    path = pathlib.Path(folder, "libcuda.so.1")
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(path), str(_SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
    stand_in = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    stand_in.stand_in_record.restype = ctypes.c_size_t
    os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(path)
    plugin = _plugin()
    assert plugin is not None
    library = ctypes.CDLL(str(plugin))
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
    return library, stand_in


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What the library prints to standard output, there when the block has ended."""
    printed: list[str] = []
    sys.stdout.flush()
    own = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield printed
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(own, 1)
            os.close(own)
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))


def _split(text: str) -> tuple[str, str, str]:
    """What is printed before PTX, the PTX, and what is printed behind it: other stages."""
    start = text.index("//\n// Generated by LLVM")
    found = _BEHIND.search(text, start)
    end = len(text) if found is None else found.start()
    return text[:start], text[start:end], text[end:]
