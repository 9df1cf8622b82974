"""A compiled kernel's launch, resources and timings, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.cli import output
from pallasite.codegen.compiled import CompiledKernel
from pallasite.launch import (
    TENSOR_MAP_TYPES,
    ArrayParameter,
    Buffer,
    LaunchParameters,
    Parameter,
    TensorMapParameter,
)


def as_json(kernel: CompiledKernel) -> dict[str, Any]:
    """Everything but the code; sizes in bytes, times in seconds."""
    launch, resources = kernel.launch, kernel.resources
    return {
        "name": kernel.name,
        "target": kernel.target.name,
        "launch": {
            "grid": launch.grid,
            "block": launch.block,
            "cluster": launch.cluster,
            "dynamic_shared_memory_bytes": launch.shared_memory_bytes,
            "parameters": [_parameter_json(one) for one in launch.parameters],
            "aliases": launch.aliases,
            "hidden_operands": [
                {
                    "name": one.name,
                    "input": one.input,
                    "initialiser": one.initialiser or None,
                    "provider": one.provider or None,
                    "arguments": json.loads(one.arguments),
                    "per_device": one.per_device,
                }
                for one in launch.hidden_operands
            ],
            "hidden_results": [
                {
                    "name": one.name,
                    "output": one.output,
                    "consumer": one.consumer,
                    "arguments": json.loads(one.arguments),
                }
                for one in launch.hidden_results
            ],
            "before_first_launch": [
                {"function": one.function, "arguments": json.loads(one.arguments)}
                for one in launch.before_first_launch
            ],
        },
        "resources": {
            "shared_memory_bytes": resources.shared_memory_bytes,
            "shared_memory_limit": resources.shared_memory_limit,
            "barriers": resources.barriers,
            "reserved": {
                one.name: {"amount": one.amount, "limit": one.limit, "unit": one.unit}
                for one in resources.reserved
            },
            "registers": resources.registers,
            "spill_store_bytes": resources.spill_store_bytes,
            "spill_load_bytes": resources.spill_load_bytes,
            "stack_bytes": resources.stack_bytes,
            "constant_bytes": resources.constant_bytes,
            "allocations": [
                {
                    "space": one.space,
                    "what": one.what,
                    "amount": one.amount,
                    "unit": one.unit,
                    "offset": one.offset,
                    "location": output.location_json(one.location),
                }
                for one in resources.allocations
            ],
        },
        "plugin_options": _options_json(kernel),
        "timings": dict(kernel.timings),
    }


def as_text(kernel: CompiledKernel, no_assembler: str) -> str:
    """A report for people.

    Args:
      kernel: the kernel.
      no_assembler: why there are no figures of the assembler, if there are none.
    """
    sections = [
        ("launch", _launch(kernel)),
        ("parameters", _parameters(kernel.launch.parameters)),
        ("hidden from callers", _hidden(kernel.launch)),
        ("TMA descriptors", _tensor_maps(kernel.launch.parameters)),
        ("plugin options", _options(kernel)),
        ("resources", _resources(kernel, no_assembler)),
        ("allocations", _allocations(kernel)),
        ("timings", _timings(kernel.timings)),
    ]
    lines = [f"kernel {kernel.name} for {kernel.target.name}"]
    for title, text in sections:
        if text:
            lines += ["", title, output.indented(text)]
    return "\n".join(lines)


def _launch(kernel: CompiledKernel) -> str:
    launch = kernel.launch
    rows = [
        ("grid", _dimensions(launch.grid), "blocks"),
        ("cluster", _dimensions(launch.cluster), "blocks"),
        ("block", _dimensions(launch.block), "threads"),
        ("shared memory", str(launch.shared_memory_bytes), "bytes, dynamic"),
    ]
    return "\n".join(f"{name:<15}{value}  {unit}" for name, value, unit in rows)


def _options(kernel: CompiledKernel) -> str:
    rows = kernel.plugin_options
    return output.table(("plugin", "option", "value"), rows) if rows else ""


def _options_json(kernel: CompiledKernel) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for plugin, name, value in kernel.plugin_options:
        found.setdefault(plugin, {})[name] = value
    return found


def _parameters(parameters: Sequence[Parameter]) -> str:
    rows = [
        (
            number,
            _buffer(one.buffer)
            + (f", access {one.slot}" if isinstance(one, ArrayParameter) and one.slot else ""),
            _array(one.buffer),
            "pointer" if isinstance(one, ArrayParameter) else "TMA descriptor",
            "zeroed" if one.buffer.zeroed else "",
        )
        for number, one in enumerate(parameters)
    ]
    return output.table(("#", "buffer", "type", "passed as", ""), rows) if rows else "none"


def _hidden(launch: LaunchParameters) -> str:
    rows = [
        (
            _buffer(launch.inputs[one.input]),
            one.name,
            _array(launch.inputs[one.input]),
            f"made by {one.initialiser}"
            if one.initialiser
            else f"provided by {one.provider}"
            if one.provider
            else "a constant",
            "for each device" if one.per_device else "",
        )
        for one in launch.hidden_operands
    ]
    rows += [
        (
            _buffer(launch.outputs[one.output]),
            one.name,
            _array(launch.outputs[one.output]),
            f"goes to {one.consumer}",
            "",
        )
        for one in launch.hidden_results
    ]
    rows += [
        ("before the first launch", "", "", one.function, "on each device")
        for one in launch.before_first_launch
    ]
    return output.table(("buffer", "name", "type", "host", ""), rows) if rows else ""


def _tensor_maps(parameters: Sequence[Parameter]) -> str:
    rows = [
        (
            number,
            TENSOR_MAP_TYPES.get(one.element_type, one.element_type),
            list(one.shape),
            list(one.strides),
            list(one.box),
            "none" if one.swizzle == 16 else f"{one.swizzle} bytes",
            output.location_text(one.location),
        )
        for number, one in enumerate(parameters)
        if isinstance(one, TensorMapParameter)
    ]
    headers = ("#", "element type", "shape", "strides", "box", "swizzle", "line")
    return output.table(headers, rows) if rows else ""


def _resources(kernel: CompiledKernel, no_assembler: str) -> str:
    resources, target = kernel.resources, kernel.target
    limit = resources.shared_memory_limit or target.max_shared_memory
    lines = [
        f"{'shared memory':<15}{resources.shared_memory_bytes} of {limit} bytes"
        f" ({100 * resources.shared_memory_bytes / limit:.0f}%)",
        f"{'barriers':<15}{resources.barriers}",
    ]
    lines += [
        f"{one.title:<14} {one.amount} of {one.limit} {one.unit}" for one in resources.reserved
    ]
    if resources.registers is None:
        lines.append(f"{'registers':<15}not known: {no_assembler}")
        return "\n".join(lines)
    spills = f"{resources.spill_store_bytes} stored, {resources.spill_load_bytes} loaded"
    return "\n".join(
        [
            *lines,
            f"{'registers':<15}{resources.registers} of {target.max_registers} per thread",
            f"{'spills':<15}{spills} (bytes per thread)",
            f"{'stack':<15}{resources.stack_bytes} bytes per thread",
            f"{'constants':<15}{resources.constant_bytes} bytes",
        ]
    )


def _allocations(kernel: CompiledKernel) -> str:
    rows = [
        (
            one.space.upper() if one.space.endswith("mem") else one.space,
            one.what,
            one.amount,
            one.unit,
            one.offset,
            output.location_text(one.location),
        )
        for one in sorted(kernel.resources.allocations, key=lambda one: (one.space, one.offset))
    ]
    return output.table(("space", "what", "size", "", "offset", "line"), rows) if rows else ""


def _timings(timings: Sequence[tuple[str, float]]) -> str:
    total = sum(seconds for _, seconds in timings)
    rows = [(name, f"{1e3 * seconds:.1f}") for name, seconds in (*timings, ("total", total))]
    return output.table(("step", "ms"), rows) if timings else ""


def _parameter_json(parameter: Parameter) -> dict[str, Any]:
    buffer = parameter.buffer
    common = {
        "kind": "pointer" if isinstance(parameter, ArrayParameter) else "tensor_map",
        "buffer": {
            "kind": buffer.kind.value,
            "index": buffer.index,
            "shape": buffer.shape,
            "dtype": np.dtype(buffer.dtype).name,
            "zeroed": buffer.zeroed,
        },
    }
    if isinstance(parameter, ArrayParameter):
        return {**common, "alignment": parameter.alignment, "slot": parameter.slot}
    return {
        **common,
        "element_type": TENSOR_MAP_TYPES.get(parameter.element_type),
        "shape": parameter.shape,
        "strides": parameter.strides,
        "box": parameter.box,
        "swizzle": parameter.swizzle,
        "location": output.location_json(parameter.location),
    }


def _buffer(buffer: Buffer) -> str:
    return f"{buffer.kind.value} {buffer.index}"


def _array(buffer: Buffer) -> str:
    return f"{np.dtype(buffer.dtype).name}[{', '.join(map(str, buffer.shape))}]"


def _dimensions(extents: tuple[int, int, int]) -> str:
    return " x ".join(map(str, extents))
