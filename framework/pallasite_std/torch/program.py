"""JAX functions that call kernels, as programs on tensors: which steps there are, in which order.

Nothing here needs PyTorch. A function is traced, calls within it are inlined, what depends on no
argument is computed while the program is made, and what is left are kernels and changes of shape
and dtype. All else is an error at the line of the function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin import UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import KernelSpec
from pallasite.plugin.runtime import kernel_in_equation
from pallasite_std.torch.tensors import torch_dtype

#: ``function(tensor)``, with what a tensor of PyTorch can do.
TensorFunction = Callable[[Any], Any]

#: Primitives that call a function -> the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "matmul": "jaxpr",
}


@dataclasses.dataclass(frozen=True, eq=False)
class KernelStep:
    """A kernel, with the numbers of the values that it takes and makes.

    ``in_place`` has the positions of operands that nothing uses afterwards, so that an output that
    is to share memory with one may overwrite it.
    """

    spec: KernelSpec
    operands: tuple[int, ...]
    results: tuple[int, ...]
    in_place: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class TensorStep:
    """A change of one tensor's shape or dtype; ``is_view`` if the result may share its memory."""

    function: TensorFunction
    operand: int
    result: int
    is_view: bool


@dataclasses.dataclass(frozen=True, eq=False)
class TensorProgram:
    """What a function does to tensors; values have numbers, those of the arguments come first.

    Attributes:
      arguments: types of the arguments.
      constants: values that are known, by number.
      steps: in their order.
      results: numbers of the values that are returned.
    """

    arguments: tuple[Any, ...]
    constants: dict[int, np.ndarray]
    steps: tuple[KernelStep | TensorStep, ...]
    results: tuple[int, ...]

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        """The kernels, in the order of their calls."""
        return tuple(step.spec for step in self.steps if isinstance(step, KernelStep))


def make_program(jaxpr: Any, name: str) -> TensorProgram:
    """The program of a traced function.

    Args:
      jaxpr: the trace, with its constants.
      name: the function's, for messages.

    Raises:
      UnsupportedError: something in it is neither a kernel nor a change of shape or dtype.
    """
    builder = _Builder(name)
    arguments = [builder.new() for _ in jaxpr.invars]
    results = builder.inline(jaxpr, arguments)
    return TensorProgram(
        tuple(variable.aval for variable in jaxpr.invars),
        builder.constants,
        _with_places(builder.steps, results, builder.constants),
        tuple(results),
    )


class _Builder:
    def __init__(self, name: str):
        self.name = name
        self.count = 0
        self.constants: dict[int, np.ndarray] = {}
        self.steps: list[KernelStep | TensorStep] = []

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def constant(self, value: Any) -> int:
        number = self.new()
        self.constants[number] = np.asarray(value)
        return number

    def inline(self, jaxpr: Any, arguments: Sequence[int]) -> list[int]:
        """Adds the steps of a jaxpr; returns the numbers of its results."""
        values: dict[Any, int] = {}
        consts = [self.constant(value) for value in getattr(jaxpr, "consts", ())]
        values.update(zip(jaxpr.all_invars, [*consts, *arguments], strict=True))

        def number(atom: Any) -> int:
            if isinstance(atom, _jax.Literal):
                return self.constant(np.asarray(atom.val, atom.aval.dtype))
            return values[atom]

        for equation in jaxpr.eqns:
            operands = [number(atom) for atom in equation.invars]
            results = self.equation(equation, operands)
            values.update(zip(equation.outvars, results, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[int]) -> list[int]:
        spec = kernel_in_equation(equation)
        if spec is not None:
            results = [self.new() for _ in equation.outvars]
            self.steps.append(KernelStep(spec, tuple(operands), tuple(results)))
            return results
        if equation.primitive.name in _CALLS:
            return self.inline(equation.params[_CALLS[equation.primitive.name]], operands)
        if not equation.effects and all(operand in self.constants for operand in operands):
            return [self.constant(value) for value in self.evaluate(equation, operands)]
        function = _tensor_function(equation)
        if function is None or len(operands) != 1:
            raise UnsupportedError(
                f"{self.name} cannot be a kernel for PyTorch: it calls {equation.primitive.name!r}",
                expected="kernels, changes of shape or dtype, and what depends on no argument",
                hint="do the rest with PyTorch, outside of the function",
                location=_jax.user_location(equation.source_info),
            )
        result = self.new()
        is_view = equation.primitive.name not in ("convert_element_type", "copy")
        self.steps.append(TensorStep(function, operands[0], result, is_view))
        return [result]

    def evaluate(self, equation: Any, operands: list[int]) -> list[Any]:
        values = [self.constants[operand] for operand in operands]
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            results = equation.primitive.bind(*values, **equation.params)
        return list(results) if equation.primitive.multiple_results else [results]


def _tensor_function(equation: Any) -> TensorFunction | None:
    """What an equation with one operand does, in terms of PyTorch; None if it is not known."""
    params = equation.params
    shape = tuple(equation.outvars[0].aval.shape)
    match equation.primitive.name:
        case "reshape" if params.get("dimensions") is None:
            return lambda tensor: tensor.reshape(shape)
        case "squeeze" | "expand_dims":
            return lambda tensor: tensor.reshape(shape)
        case "transpose":
            permutation = tuple(params["permutation"])
            return lambda tensor: tensor.permute(permutation)
        case "broadcast_in_dim":
            dims = dict(enumerate(params["broadcast_dimensions"]))
            source = [1] * len(shape)
            for position, dim in dims.items():
                source[dim] = equation.invars[0].aval.shape[position]
            return lambda tensor: tensor.reshape(tuple(source)).expand(shape)
        case "convert_element_type":
            dtype = np.dtype(params["new_dtype"])
            return lambda tensor: tensor.to(torch_dtype(dtype))
        case "copy":
            return lambda tensor: tensor.clone()
    return None


def _with_places(
    steps: Sequence[KernelStep | TensorStep], results: Sequence[int], constants: dict[int, Any]
) -> tuple[KernelStep | TensorStep, ...]:
    """The steps, with the operands that kernels may overwrite."""
    memory: dict[int, int] = {}
    last_use: dict[int, int] = {}

    def use(value: int, position: int) -> None:
        group = memory.setdefault(value, value)
        last_use[group] = position

    for position, step in enumerate(steps):
        if isinstance(step, TensorStep):
            use(step.operand, position)
            if step.is_view:
                memory[step.result] = memory[step.operand]
        else:
            for operand in step.operands:
                use(operand, position)
    for result in results:
        use(result, len(steps))
    placed: list[KernelStep | TensorStep] = []
    for position, step in enumerate(steps):
        if isinstance(step, KernelStep):
            groups = [memory[operand] for operand in step.operands]
            in_place = frozenset(
                number
                for number, group in enumerate(groups)
                if last_use[group] == position
                and groups.count(group) == 1
                and group not in constants
            )
            step = dataclasses.replace(step, in_place=in_place)
        placed.append(step)
    return tuple(placed)
