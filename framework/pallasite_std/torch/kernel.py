"""``as_torch_kernel``: JAX functions that call kernels, as functions of PyTorch tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallasite.plugin import (
    InvalidTypeError,
    InvalidValueError,
    LaunchRequest,
    Target,
    config,
    select_target,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import KernelSpec
from pallasite.plugin.runtime import (
    check_device,
    compile_kernel,
    current,
    find_executor,
    find_tool,
    interpreter,
)
from pallasite_std.torch.launch import CudaKernel, HostKernel
from pallasite_std.torch.program import KernelStep, TensorProgram, make_program
from pallasite_std.torch.tensors import from_host, import_torch, tensor_type


def as_torch_kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of PyTorch tensors of a JAX function that calls kernels.

    ::

        add = plgpu.as_torch_kernel(add_kernel)
        z = add(x, y)  # Three torch.Tensor on one GPU, or on the CPU.

    The function is traced and compiled at the first call with new shapes and dtypes, and kept. On a
    GPU the kernels are launched on PyTorch's current stream; on the CPU an executor such as the
    simulator runs them. Nothing is differentiated: give the function a ``torch.autograd.Function``.

    Args:
      fn: a kernel, or a function that calls several, jitted or not. Between the kernels it may
        change shapes and dtypes, and use arrays that do not depend on its arguments.

    Returns:
      A function of trees of tensors, all on one device, that returns a tree of tensors on it. An
      output that is to share memory with an argument (``input_output_aliases``) overwrites that
      argument and is that very tensor, unless something uses the argument afterwards.

    Raises:
      ExecutionError: when called: PyTorch, or what launches kernels, is not installed.
      InvalidTypeError, InvalidValueError: when called: arguments that are not tensors, that lie on
        several devices, or that JAX would give another dtype.
      UnsupportedError: when called: the function does something else than calling kernels.
    """
    if not callable(fn):
        raise InvalidTypeError(
            "as_torch_kernel needs a function",
            got=repr(fn),
            location=_jax.current_user_location(),
        )
    wrapper = _TorchFunction(fn)
    functools.update_wrapper(wrapper, fn, updated=())
    return wrapper


class _TorchFunction:
    """The function that :func:`as_torch_kernel` returns."""

    def __init__(self, fn: Callable[..., Any]):
        self._fn = fn
        self._name = str(getattr(fn, "__name__", None) or type(fn).__name__)
        self._programs: dict[Any, _Loaded] = {}

    def __call__(self, *args: Any) -> Any:
        torch = import_torch()
        tensors, tree = jax.tree.flatten(args)
        types = tuple(
            (getattr(t, "shape", None), getattr(t, "dtype", None), getattr(t, "device", None))
            for t in tensors
        )
        program = self._programs.get((types, tree, _environment()))
        if program is None:
            program = self._load(torch, tensors, tree)
            # The first compilation loads plugins, which is part of the environment.
            self._programs[types, tree, _environment()] = program
        return program(tensors)

    def _load(self, torch: Any, tensors: Sequence[Any], tree: Any) -> _Loaded:
        types = [
            tensor_type(tensor, f"argument {number} of {self._name}")
            for number, tensor in enumerate(tensors)
        ]
        device = _device_of(torch, tensors, self._name)
        for number, (_, dtype) in enumerate(types):
            available = jax.dtypes.canonicalize_dtype(dtype)
            if available != dtype:
                raise InvalidTypeError(
                    f"JAX gives argument {number} of {self._name} another dtype",
                    got=dtype.name,
                    expected=available.name,
                    hint="permit 64-bit types: jax.config.update('jax_enable_x64', True)",
                    location=_jax.current_user_location(),
                )
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
        traced = jax.jit(self._fn).trace(*jax.tree.unflatten(tree, structs))
        program = make_program(traced.jaxpr, self._name)
        return _Loaded(program, traced.out_tree, torch, device)


def _environment() -> tuple[Any, ...]:
    """What a program depends on besides its operands."""
    return config.get("target"), config.get("executor"), current(), _jax.trace_context()


class _Loaded:
    """A program for one device, with its kernels compiled."""

    def __init__(self, program: TensorProgram, out_tree: Any, torch: Any, device: Any):
        self._program = program
        self._out_tree = out_tree
        self._device = device
        self._constants = {
            number: from_host(array, device) for number, array in program.constants.items()
        }
        self._kernels: dict[int, CudaKernel | HostKernel] = {
            position: _compile(step.spec, torch, device)
            for position, step in enumerate(program.steps)
            if isinstance(step, KernelStep)
        }

    def __call__(self, tensors: Sequence[Any]) -> Any:
        values: dict[int, Any] = {**self._constants, **dict(enumerate(tensors))}
        shared = _sharing_memory(tensors)
        for position, step in enumerate(self._program.steps):
            if isinstance(step, KernelStep):
                in_place = frozenset(n for n in step.in_place if step.operands[n] not in shared)
                results = self._kernels[position](
                    [values[operand] for operand in step.operands], in_place, self._device
                )
                values.update(zip(step.results, results, strict=True))
            else:
                values[step.result] = step.function(values[step.operand])
        results = [
            values[number].clone() if number in self._constants else values[number]
            for number in self._program.results
        ]
        return jax.tree.unflatten(self._out_tree, results)


def _sharing_memory(tensors: Sequence[Any]) -> frozenset[int]:
    """Positions of arguments that begin where another one does."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    return frozenset(n for n, address in enumerate(addresses) if addresses.count(address) > 1)


def _device_of(torch: Any, tensors: Sequence[Any], name: str) -> Any:
    devices = {str(tensor.device): tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise InvalidValueError(
            f"the arguments of {name} are on several devices",
            got=", ".join(sorted(devices)),
            expected="one device",
            location=_jax.current_user_location(),
        )
    if not devices:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (device,) = devices.values()
    if device.type not in ("cuda", "cpu"):
        raise InvalidValueError(
            f"the arguments of {name} are on a device that runs no kernels",
            got=str(device),
            expected="cuda or cpu",
            location=_jax.current_user_location(),
        )
    return device


def _capability(torch: Any, device: Any) -> tuple[int, int] | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return int(major), int(minor)


def _compile(spec: KernelSpec, torch: Any, device: Any) -> CudaKernel | HostKernel:
    capability = _capability(torch, device)
    override = current()
    explicit: str | Target | None = override.target or spec.params.target
    target = select_target(explicit, local=lambda: capability)
    if device.type == "cpu" or spec.interpret is not None:
        request = LaunchRequest(platform="cpu", params=spec.params)
        if spec.interpret is not None:
            run = interpreter(spec.interpret, spec.name, request)
        else:
            run = override.run or find_executor("cpu", spec.name, request)
        return HostKernel(compile_kernel(spec, target, keep=False), run)
    check_device(target, capability, spec.name)
    assembler = find_tool("ptxas").path is not None
    return CudaKernel(compile_kernel(spec, target, keep=False, assemble=assembler))
