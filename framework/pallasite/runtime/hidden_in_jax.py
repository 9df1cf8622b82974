"""Hidden operands and results in JAX programs: constants, and calls of the host.

A program is lowered once for all of its devices. What differs between devices is a table of
constants, from which each device takes its own entry; steps before a kernel's first launch are
taken when a program that calls it is lowered, for each device of this process that it will run on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallasite import _jax
from pallasite.codegen.compiled import CompiledKernel
from pallasite.errors import UnsupportedError
from pallasite.extensions import LaunchRequest
from pallasite.launch import HiddenOperand
from pallasite.runtime.hidden import (
    LaunchDevice,
    consumer,
    operand_value,
    provider_of,
    run_steps,
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the program that is being lowered will run.

    Attributes:
      platform: of the program, such as ``"cuda"`` or ``"cpu"``.
      devices: in the order of the program's partitions; None if JAX does not say.
      axes: names of the axes of the device mesh, of which the last counts fastest, if the program
        runs on each device by itself (``jax.shard_map`` over all axes); else None.
    """

    platform: str
    devices: tuple[Any, ...] | None
    axes: tuple[Hashable, ...] | None = None


def placement_of(ctx: Any, platform: str, compiled: CompiledKernel) -> Placement | None:
    """Where the program will run, from the context in which a kernel's call is lowered; None if
    nothing of the kernel depends on it."""
    launch = compiled.launch
    if not launch.before_first_launch and not any(one.per_device for one in launch.hidden_operands):
        return None
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        manual = frozenset(mesh.axis_names) <= frozenset(context.manual_axes)
        axes = tuple(mesh.axis_names) if manual else None
        return Placement(platform, tuple(mesh.devices.flat), axes)
    devices = getattr(context, "device_assignment", None)
    if devices is None and getattr(context, "num_devices", 1) == 1:
        try:
            local = jax.local_devices(backend=platform)
        except RuntimeError:
            local = []
        devices = tuple(local) if len(local) == 1 else None
    return Placement(platform, devices)


def run_with_hidden(
    run: Callable[..., Sequence[Any]],
    compiled: CompiledKernel,
    placement: Placement | None,
    request: LaunchRequest,
    *operands: Any,
) -> list[Any]:
    """Runs a kernel by an executor, with its hidden operands; returns the caller's outputs.

    It is traced by JAX. The hidden results are passed to the host when the program runs.

    Raises:
      UnsupportedError: something depends on the device, and the devices are not known or not here.
    """
    launch = compiled.launch
    if placement is not None:
        for device in _devices(compiled, placement):
            if device is not None:
                run_steps(compiled, device)
    hidden = [_operand(compiled, one, placement, request) for one in launch.hidden_operands]
    results = list(run(compiled, *operands, *hidden))
    taken = {one.output for one in launch.hidden_results}
    for number in sorted(taken):
        consume_result_p.bind(results[number], consume=_Consume(compiled, number))
    return [value for number, value in enumerate(results) if number not in taken]


def _operand(
    compiled: CompiledKernel,
    operand: HiddenOperand,
    placement: Placement | None,
    request: LaunchRequest,
) -> Any:
    if operand.provider:
        provider = provider_of(compiled, operand)
        return provider.in_jax(compiled, request, **json.loads(operand.arguments))
    if placement is None or not operand.per_device:
        return _constant(operand_value(compiled, operand, None))
    devices = _devices(compiled, placement)
    buffer = compiled.launch.inputs[operand.input]
    # The value on a device of another process is known only there.
    values = [
        np.zeros(buffer.shape, buffer.dtype)
        if device is None
        else operand_value(compiled, operand, device)
        for device in devices
    ]
    if len(values) == 1:
        return _constant(values[0])
    if placement.axes is None:
        raise UnsupportedError(
            f"hidden operand {operand.name!r} of kernel {compiled.name!r} has a value for each"
            f" device, in a program for {len(values)} devices",
            expected="a call on one device's part of the arrays",
            hint="call the kernel inside jax.shard_map, over all axes of the mesh",
        )
    position: Any = 0
    for axis in placement.axes:
        position = position * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
    return jax.lax.dynamic_index_in_dim(_constant(np.stack(values)), position, keepdims=False)


def _constant(value: np.ndarray) -> Any:
    with jax.enable_x64(True):  # Elements of 64 bits keep them.
        return jnp.asarray(value)


def _devices(compiled: CompiledKernel, placement: Placement) -> list[LaunchDevice | None]:
    """The program's devices; None for those of other processes."""
    if placement.devices is None:
        raise UnsupportedError(
            f"kernel {compiled.name!r} has to know its device, which JAX does not say while it"
            " lowers this program",
            expected="a call through plgpu.kernel, and a plugin whose kernel lifecycle has"
            " per_device=True; or a single device",
            hint="call the kernel inside jax.shard_map",
        )
    found: list[LaunchDevice | None] = []
    for device in placement.devices:
        here = {"cuda": ("gpu", "cuda")}.get(placement.platform, (placement.platform,))
        if device.platform not in here:
            raise another_machine(
                f"kernel {compiled.name!r} has to know its device",
                f"{device.platform} devices, and a program for {placement.platform}",
            )
        local = device.process_index == jax.process_index()
        number = device.local_hardware_id
        ordinal = device.id if number is None else number
        found.append(LaunchDevice(placement.platform, ordinal, device.id) if local else None)
    return found


def another_machine(what: str, got: str) -> UnsupportedError:
    """The error for a program that is lowered for another machine, and needs this process."""
    return UnsupportedError(
        f"{what}, in a program for another machine",
        got=got,
        expected="the platform of this process: the program calls back into it",
        hint="to look at the kernel without running it, use pallasite.compile",
    )


# Results ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Consume:
    """Hands a hidden result to the host."""

    compiled: CompiledKernel
    output: int

    @property
    def name(self) -> str:
        """Of the hidden result."""
        records = self.compiled.launch.hidden_results
        return next(one.name for one in records if one.output == self.output)

    def __call__(self, array: Any) -> tuple[()]:
        consumer(self.compiled, self.output)(np.asarray(array), self.compiled)
        return ()


consume_result_p = Primitive("pallasite_consume_result")
consume_result_p.multiple_results = True


@_jax.abstract_eval(consume_result_p)
def _abstract_eval(array: Any, *, consume: _Consume) -> tuple[list[Any], set[Any]]:
    del array, consume
    return [], {_jax.debug_effect}


def _lower(ctx: Any, array: Any, *, consume: _Consume) -> Any:
    try:
        ctx.module_context.get_backend()
    except ValueError as error:
        raise another_machine(
            f"kernel {consume.compiled.name!r} passes its hidden result {consume.name!r} to the"
            " host",
            str(error),
        ) from error
    results, _, _ = mlir.emit_python_callback(
        ctx,
        consume,
        None,
        [array],
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=False,
        sharding=_jax.callback_sharding(ctx.module_context.axis_context, None, ctx.avals_out),
    )
    return results


consume_result_p.def_impl(lambda array, *, consume: list(consume(array)))
mlir.register_lowering(consume_result_p, _lower)
