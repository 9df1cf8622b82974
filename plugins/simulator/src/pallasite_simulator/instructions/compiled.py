"""Loops over arrays of bit patterns, compiled by LLVM for the processor that the simulator runs on.

Floating-point instructions round exactly once, flush, saturate and choose their NaNs; written with
NumPy that is a dozen passes over the arrays, here it is one. An instruction's arithmetic is given
as a function that emits LLVM IR for one element, with llvmlite's ``IRBuilder``.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from pallasite_simulator.types import STORAGE, Array, Values

type Emit = Callable[..., Any]
"""``emit(builder, *elements)``: from integers, which hold the bits of the inputs' elements, the
integer with the bits of the result's."""

F32, F64 = ir.FloatType(), ir.DoubleType()

_POINTER = ir.IntType(8).as_pointer()
_INDEX = ir.IntType(64)

# Where an array object of NumPy holds the pointer to its data: first after the object's head.
_DATA = object.__basicsize__

_lock = threading.Lock()
_kept: list[Any] = []


def integer(bits: int) -> Any:
    """The IR type of an integer."""
    return ir.IntType(bits)


def intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Calls an intrinsic function of LLVM, given its full name."""
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [one.type for one in arguments])
        function = ir.Function(module, kind, name)
    return builder.call(function, arguments)


def elementwise(
    emit: Emit,
    inputs: Sequence[int],
    result: int,
    *,
    units: int = 1,
    direction: int | None = None,
) -> Callable[..., Values]:
    """Compiles a function of arrays that computes each element on its own.

    Args:
      emit: makes the code of one element.
      inputs: bits of the elements of each input.
      result: bits of the result's elements.
      units: how many elements a lane has, for packed types.
      direction: code of the processor's rounding mode while the loop runs, as LLVM's
        ``llvm.set.rounding`` numbers them; None to leave it (to the nearest, ties to even). The
        code must use LLVM's constrained operations for it.

    Returns:
      A function of arrays or scalars, of any dtype of the right size (``bits * units`` each), that
      returns a new array of unsigned integers; or a scalar, if all arguments are scalars.
    """
    function = _Compiled(emit, tuple(inputs), result, direction)
    dtype = STORAGE[result * units]
    invoke = function.invoke

    def run(*values: Values) -> Values:
        count = 1
        scalar = True
        for value in values:
            if value.ndim:
                count, scalar = len(value), False
                break
        arrays = [
            value
            if value.ndim and value.flags.c_contiguous
            else np.full(count, value)
            if not value.ndim
            else np.ascontiguousarray(value)
            for value in values
        ]
        output = np.empty(count, dtype)
        # `arrays` keeps the objects alive whose addresses are given away.
        invoke(id(output), *map(id, arrays), count * units)
        return output[0] if scalar else output

    return run


class _Compiled:
    """One loop; compiled when it is made."""

    def __init__(self, emit: Emit, inputs: tuple[int, ...], result: int, direction: int | None):
        module = ir.Module("loop")
        arguments = [_POINTER] * (1 + len(inputs)) + [_INDEX]
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "loop")
        if direction is not None:
            # llvmlite's own `add` does not know this attribute.
            set.add(function.attributes, "strictfp")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        if direction is not None:
            self._set_rounding(builder, direction)
        pointers = [
            self._data(builder, function.args[number], bits)
            for number, bits in enumerate((result, *inputs))
        ]
        self._loop(builder, function, pointers, emit)
        if direction is not None:
            self._set_rounding(builder, 1)
        builder.ret_void()
        signature = [ctypes.c_size_t] * (1 + len(inputs)) + [ctypes.c_int64]
        self.invoke = ctypes.CFUNCTYPE(None, *signature)(compile_loop(str(module)))

    @staticmethod
    def _set_rounding(builder: Any, direction: int) -> None:
        code = ir.Constant(integer(32), direction)
        intrinsic(builder, "llvm.set.rounding", ir.VoidType(), code)

    @staticmethod
    def _data(builder: Any, array: Any, bits: int) -> Any:
        """The pointer to the data of an array object."""
        field = builder.gep(array, [ir.Constant(_INDEX, _DATA)])
        field = builder.bitcast(field, _POINTER.as_pointer())
        return builder.bitcast(builder.load(field), integer(bits).as_pointer())

    @staticmethod
    def _loop(builder: Any, function: Any, pointers: Sequence[Any], emit: Emit) -> None:
        entry = builder.block
        body, end = function.append_basic_block("body"), function.append_basic_block("end")
        count = function.args[-1]
        zero, one = ir.Constant(_INDEX, 0), ir.Constant(_INDEX, 1)
        builder.cbranch(builder.icmp_signed(">", count, zero), body, end)
        builder.position_at_end(body)
        index = builder.phi(_INDEX)
        index.add_incoming(zero, entry)
        elements = [builder.load(builder.gep(one, [index])) for one in pointers[1:]]
        builder.store(emit(builder, *elements), builder.gep(pointers[0], [index]))
        following = builder.add(index, one, flags=("nuw", "nsw"))
        index.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), body, end)
        builder.position_at_end(end)


@functools.cache
def _host() -> tuple[Any, Any, Any]:
    """llvmlite's binding, the context of all loops and the target of this processor."""
    import llvmlite.binding as binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    probe: Array = np.zeros(1)
    if ctypes.c_void_p.from_address(id(probe) + _DATA).value != probe.ctypes.data:
        raise ImportError("this NumPy keeps the data of arrays where the simulator cannot find it")
    context = binding.create_context()
    _kept.append(context)
    return binding, context, binding.Target.from_default_triple()


def compile_loop(text: str, effort: int = 0) -> int:
    """Compiles a module; returns the address of its function ``loop``.

    Args:
      text: LLVM IR.
      effort: how hard the code generator tries, 0 to 3; loops are unrolled above 0.
    """
    with _lock:
        binding, context, target = _host()
        cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
        # Without effort in choosing instructions: the passes below have vectorised the loop.
        machine = target.create_target_machine(cpu=cpu, features=features, opt=effort)
        module = binding.parse_assembly(text, context)
        module.verify()
        options = binding.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = True
        # Both make compiling take longer and hardly any loop faster.
        options.loop_unrolling = options.loop_interleaving = effort > 0
        with binding.create_pass_builder(machine, options) as passes:
            passes.getModulePassManager().run(module, passes)
        engine = binding.create_mcjit_compiler(module, machine)
        engine.finalize_object()
        # The code lives as long as the process: nothing of it may be freed.
        _kept.append((engine, module, machine))
        return int(engine.get_function_address("loop"))
