"""Kernels of JAX's GPU backend, compiled by JAX's own compiler, run on the simulator.

    jax_on_simulator.install("sm_100a")

From then on, where JAX runs on the CPU, ``jax.experimental.pallas.mosaic_gpu`` kernels run there.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax_compiler
import numpy as np

from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.engine.program import Program
from pallasite_simulator.engine.tensor_map import TensorMap
from pallasite_simulator.launch import Composed, Execution, Launch, Pointer, run
from pallasite_simulator.packing import memory_bytes, pack, unpack
from pallasite_simulator.programs import load
from pallasite_simulator.sanitizer import LaunchState

MULTIPROCESSORS = 148
POISON = 0xCD

_ELEMENTS = {
    8: (2, 0),
    0: (4, 0),
    1: (8, 0),
    2: (16, 1),
    3: (32, 2),
    4: (64, 4),
    5: (16, 6),
    6: (32, 7),
    7: (16, 9),
    9: (32, 3),
    10: (64, 5),
}
"""JAX's numbers of element types: bits, and the driver's number of the type."""

_SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}

findings: list[str] = []
"""What the sanitizer found, if it is on."""

last: tuple[Any, list[int]] = (None, [])
"""The kernel that ran last, and the number of the array that each of its buffers is."""


def install(target: str, *, sanitize: frozenset[str] = frozenset()) -> None:
    """Replaces the lowering of JAX's kernels for the CPU: they run on the simulator.

    Args:
      target: such as ``"sm_100a"``.
      sanitize: groups of checks.

    Raises:
      RuntimeError: JAX's compiler cannot be used here.
    """
    capability = capability_of(target)

    def make(code: bytes) -> Callable[..., list[np.ndarray]]:
        # As on a GPU, what never runs is not compiled.
        kernel = functools.cache(lambda: _Kernel(code, capability, sanitize))
        return lambda *arguments: kernel().run(*arguments)

    replace_lowering(capability, make)


def capability_of(target: str) -> tuple[int, int]:
    """The compute capability of a target."""
    digits = target.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def replace_lowering(
    capability: tuple[int, int], make: Callable[[bytes], Callable[..., list[np.ndarray]]]
) -> None:
    """Replaces the lowering of JAX's kernels for the CPU.

    Args:
      capability: of the GPU for which JAX makes modules.
      make: given the bytecode of a kernel's module, returns what runs it on (arrays, shapes and
        types of results, which output is the memory of which input). It is called while JAX lowers
        a program, once for each module.

    Raises:
      RuntimeError: JAX's compiler cannot be used here.
    """
    missing = jax_compiler.missing()
    if missing is not None:
        raise RuntimeError(f"JAX's kernels cannot be compiled: {missing}")
    import jax.experimental.mosaic.gpu as mgpu
    from jax._src.interpreters import mlir
    from jax._src.pallas import mpmd
    from jax.experimental.mosaic.gpu import utils

    utils._infer_arch = lambda: capability
    cache: dict[bytes, Callable[..., list[np.ndarray]]] = {}

    def lower(ctx: Any, *arguments: Any, module: Any, input_output_aliases: Any, **_: Any) -> Any:
        module = mgpu.core._run_serde_pass(module, serialize=True, ir_version=None)
        text = io.BytesIO()
        module.operation.write_bytecode(text, desired_version=0)
        code = text.getvalue()
        if code not in cache:
            cache[code] = make(code)
        results = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in ctx.avals_out]
        aliases = {output: number for number, output in input_output_aliases}

        def call(*values: Any) -> list[Any]:
            return cache[code]([np.asarray(one) for one in values], results, aliases)

        def function(*values: Any) -> Any:
            return jax.pure_callback(call, results, *values)

        return mlir.lower_fun(function, multiple_results=True)(ctx, *arguments)

    mgpu.core._mosaic_gpu_lowering_rule = lower
    original: Callable[..., Any] = mpmd._mpmd_map_lowering

    def lower_map(ctx: Any, *arguments: Any, **parameters: Any) -> Any:
        (platform,) = ctx.module_context.platforms
        if platform == "cpu" and not parameters.get("interpret"):
            return mpmd._mpmd_map_mgpu_lowering(ctx, *arguments, **parameters)
        return original(ctx, *arguments, **parameters)

    mlir.register_lowering(mpmd.mpmd_map_p, lower_map)


class _Kernel:
    """A kernel, compiled and ready to run."""

    def __init__(self, module: bytes, capability: tuple[int, int], sanitize: frozenset[str]):
        self._compiled = jax_compiler.Compiled(module, capability)
        self._program = load(self._compiled.ptx, None, MULTIPROCESSORS)
        self._sanitize = sanitize

    def run(
        self, values: list[Any], results: Sequence[Any], aliases: dict[int, int]
    ) -> list[np.ndarray]:
        """Runs it on arrays; ``aliases`` says which output is the memory of which input."""
        memory = [pack(one).copy() for one in values]
        numbers = list(range(len(memory)))
        for output, one in enumerate(results):
            if output in aliases:
                numbers.append(aliases[output])
                continue
            numbers.append(len(memory))
            memory.append(np.full(memory_bytes(one.shape, one.dtype), POISON, np.uint8))
        sizes = [variable.bytes for variable, _ in self._program.parameters]
        recorded = self._compiled.record(len(numbers), sizes)
        state = LaunchState(self._sanitize) if self._sanitize else None
        execution = launch(self._program, recorded, memory, numbers, state)
        global last
        last = (self, numbers)
        if state is not None and state.findings:
            findings.extend(map(str, state.findings.found.values()))
        print("".join(execution.output), end="")
        outputs = [memory[number] for number in numbers[len(values) :]]
        return [
            unpack(one, result.shape, np.dtype(result.dtype)).astype(result.dtype)
            for one, result in zip(outputs, results, strict=True)
        ]


def launch(
    program: Program,
    recorded: jax_compiler.Recorded,
    memory: list[np.ndarray],
    numbers: list[int],
    state: LaunchState | None = None,
) -> Execution:
    """Runs a kernel as the host launched it.

    Args:
      program: the kernel.
      recorded: the launch.
      memory: the arrays, as bytes, which are changed in place.
      numbers: which array each buffer is.
      state: of the sanitizer, whose findings are not raised.
    """
    arguments = [_argument(one, recorded, numbers) for one in recorded.parameters]
    explicit = recorded.cluster != (1, 1, 1)
    geometry = Geometry(recorded.grid, recorded.block, recorded.cluster, explicit)
    arrays = [Pointer(one, f"buffer {number}") for number, one in enumerate(memory)]
    return run(
        Launch(
            program,
            geometry,
            arguments,
            arrays,
            dynamic_shared_bytes=recorded.shared,
            sanitizer=state,
        ),
        raise_findings=False,
    )


def _argument(contents: bytes, recorded: jax_compiler.Recorded, numbers: list[int]) -> Composed:
    """A parameter: an address, a number, or a struct of tensor maps."""

    def encode(addresses: Sequence[int]) -> bytes:
        if len(contents) == 8:
            found = jax_compiler.buffer_of(struct.unpack("<q", contents)[0])
            if found is None:
                return contents
            return struct.pack("<q", addresses[numbers[found[0]]] + found[1])
        made = bytearray(contents)
        for place in range(0, len(made), 128):
            if made[place : place + 4] == b"TMAP":
                (number,) = struct.unpack_from("<q", made, place + 8)
                one = recorded.maps[number]
                address = addresses[numbers[one.buffer]] + one.offset
                made[place : place + 128] = _encoded(one, address)
        return bytes(made)

    return Composed(encode)


def _encoded(one: jax_compiler.TensorMap, address: int) -> bytes:
    bits, code = _ELEMENTS[one.element]
    sizes, strides, box = list(one.sizes), list(one.strides), list(one.box)
    if bits < 8:
        # Elements of less than a byte are described by bytes.
        each = 8 // bits
        sizes[-1] //= each
        box[-1] //= each
        strides = [stride // each for stride in strides[:-1]] + [1]
        bits = 8
    steps = tuple(stride * bits // 8 for stride in strides[-2::-1])
    swizzle = _SWIZZLES[one.swizzle]
    return TensorMap(
        address, code, tuple(sizes[::-1]), steps, tuple(box[::-1]), swizzle=swizzle
    ).encode()
