"""Runs PTX snippets on the simulator and gives NumPy arrays back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.launch import Argument, Execution, Launch, Pointer, run
from pallasite_simulator.programs import load

HEADER = ".version 8.8\n.target {target}\n.address_size 64\n"
POISON = 0xCD


def module(
    body: str,
    parameters: Sequence[str] = (),
    *,
    name: str = "kernel",
    target: str = "sm_90a",
    variables: str = "",
    directives: str = "",
) -> str:
    """A module with one kernel.

    Args:
      body: declarations and instructions; ``ret`` is added.
      parameters: as ``".u64 x"``, without ``.param``.
      variables: declarations and functions before the kernel.
      directives: such as ``.reqntid 128``.
    """
    listed = ", ".join(f".param {one}" for one in parameters)
    return (
        HEADER.format(target=target)
        + variables
        + f"\n.visible .entry {name}({listed})\n{directives}\n{{\n{body}\nret;\n}}\n"
    )


def run_ptx(
    ptx: str,
    *arguments: Argument | np.ndarray,
    grid: int | tuple[int, int, int] = 1,
    block: int | tuple[int, int, int] = 128,
    cluster: int | tuple[int, int, int] = 1,
    shared: int = 0,
    name: str | None = None,
    multiprocessors: int = 132,
    **options: Any,
) -> Execution:
    """Runs a kernel; arrays among the arguments are changed in place."""
    values = [Pointer(one) if isinstance(one, np.ndarray) else one for one in arguments]
    geometry = Geometry(_extent(grid), _extent(block), _extent(cluster), cluster != 1)
    program = load(ptx, name, multiprocessors)
    return run(Launch(program, geometry, values, dynamic_shared_bytes=shared, **options))


def body_ptx(
    body: str,
    arrays: int,
    *,
    shared: int = 0,
    variables: str = "",
    target: str = "sm_90a",
    directives: str = "",
) -> str:
    """The PTX that :func:`run_body` runs, for this number of arrays."""
    names = [f".u64 .ptr .global .align 16 p{number}" for number in range(arrays)]
    prologue = [
        ".reg .b32 %thread, %prologue<4>;",
        ".reg .b64 %offset4, %offset8;",
        f".reg .b64 %array<{max(1, arrays)}>;",
        *[f"ld.param.u64 %array{n}, [p{n}];" for n in range(arrays)],
        "mov.u32 %prologue0, %ctaid.x;",
        "mov.u32 %prologue1, %ntid.x;",
        "mov.u32 %prologue2, %tid.x;",
        "mad.lo.u32 %thread, %prologue0, %prologue1, %prologue2;",
        "mul.wide.u32 %offset4, %thread, 4;",
        "mul.wide.u32 %offset8, %thread, 8;",
    ]
    if shared:
        variables = ".extern .shared .align 1024 .b8 dynamic[];\n" + variables
    return module(
        "\n".join(prologue) + "\n" + body,
        names,
        variables=variables,
        target=target,
        directives=directives,
    )


def run_body(
    body: str,
    *arrays: np.ndarray,
    grid: int | tuple[int, int, int] = 1,
    block: int | tuple[int, int, int] = 128,
    cluster: int | tuple[int, int, int] = 1,
    shared: int = 0,
    variables: str = "",
    target: str = "sm_90a",
    **options: Any,
) -> Execution:
    """Runs a kernel body. Array number n is changed in place; its address is in ``%array<n>``.

    Also declared and set: ``%thread`` (linear thread in the grid, b32), ``%offset4`` and
    ``%offset8`` (4 and 8 times that, b64). With ``shared``, ``dynamic`` is the shared array.
    """
    ptx = body_ptx(body, len(arrays), shared=shared, variables=variables, target=target)
    return run_ptx(ptx, *arrays, grid=grid, block=block, cluster=cluster, shared=shared, **options)


def elementwise_ptx(
    code: str,
    inputs: Sequence[np.dtype],
    result: np.dtype,
    *,
    target: str = "sm_90a",
    registers: str = "",
) -> str:
    """The PTX that :func:`run_elementwise` runs: arrays of the inputs, then of the result."""
    body = [registers]
    names = {}
    for number, (letter, dtype) in enumerate(zip("abce", inputs, strict=False)):
        names[letter] = f"%{letter}"
        body += _declare(names[letter], dtype)
        body += _address(number, dtype.itemsize)
        if dtype.kind == "b":
            body += [
                f".reg .b16 %{letter}byte;",
                f"ld.global.u8 %{letter}byte, [%place{number}];",
                f"setp.ne.b16 %{letter}, %{letter}byte, 0;",
            ]
        else:
            kind = {1: "u8"}.get(dtype.itemsize, f"b{8 * dtype.itemsize}")
            body.append(f"ld.global.{kind} {names[letter]}, [%place{number}];")
    last = len(inputs)
    names["d"] = "%d"
    body += _declare("%d", result)
    body.append(code.format(**names))
    body += _address(last, result.itemsize)
    if result.kind == "b":
        body += [".reg .b16 %dbyte;", "selp.b16 %dbyte, 1, 0, %d;"]
        body.append(f"st.global.u8 [%place{last}], %dbyte;")
    else:
        body.append(f"st.global.b{8 * result.itemsize} [%place{last}], %d;")
    return body_ptx("\n".join(body), last + 1, target=target)


def padded(array: np.ndarray) -> np.ndarray:
    """A copy with zeros behind, to a multiple of 128 elements; bools become bytes."""
    memory = np.zeros(-(-len(array) // 128) * 128, array.dtype)
    memory[: len(array)] = array
    return memory.view(np.uint8) if array.dtype.kind == "b" else memory


def poisoned(count: int, dtype: np.dtype) -> np.ndarray:
    """An array of bytes that no result has by chance; bools become bytes."""
    kind = np.uint8 if dtype.kind == "b" else dtype
    return np.full(count * dtype.itemsize, POISON, np.uint8).view(kind)


def run_elementwise(
    code: str,
    inputs: Sequence[np.ndarray],
    result: Any,
    *,
    target: str = "sm_90a",
    registers: str = "",
    **options: Any,
) -> np.ndarray:
    """Runs code on each element of arrays, which have the same length.

    Args:
      code: with ``{d}`` for the result's register and ``{a}``, ``{b}``, ``{c}``, ``{e}`` for those
        of the inputs. Registers are untyped and as wide as the elements, but 8-bit elements are in
        16-bit registers (zero-extended), and bools are predicates.
      inputs: one-dimensional arrays.
      result: dtype of the result.
      registers: further declarations.

    Returns:
      The result, as long as the inputs.
    """
    count, result = len(inputs[0]), np.dtype(result)
    ptx = elementwise_ptx(
        code, [one.dtype for one in inputs], result, target=target, registers=registers
    )
    arrays = [padded(one) for one in inputs]
    output = poisoned(len(arrays[0]), result)
    run_ptx(ptx, *arrays, output, grid=len(output) // 128, **options)
    return output.view(result)[:count]


def _declare(name: str, dtype: np.dtype) -> list[str]:
    kind = "pred" if dtype.kind == "b" else f"b{8 * max(2, dtype.itemsize)}"
    return [f".reg .{kind} {name};"]


def _address(number: int, size: int) -> list[str]:
    return [
        f".reg .b64 %place{number};",
        f"mul.wide.u32 %place{number}, %thread, {size};",
        f"add.s64 %place{number}, %place{number}, %array{number};",
    ]


def _extent(value: int | tuple[int, int, int]) -> tuple[int, int, int]:
    return (value, 1, 1) if isinstance(value, int) else value
