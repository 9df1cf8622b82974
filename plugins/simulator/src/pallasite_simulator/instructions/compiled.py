"""Loops over arrays of bit patterns, compiled by LLVM for the processor that the simulator runs on.

Floating-point instructions round exactly once, flush, saturate and choose their NaNs; written with
NumPy that is a dozen passes over the arrays, here it is one. An instruction's arithmetic is given
as a function that emits LLVM IR for one element, with llvmlite's ``IRBuilder``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llvmlite
import numpy as np
from llvmlite import ir

from pallasite.plugin import config
from pallasite.plugin.codegen import deferred
from pallasite.plugin.runtime import SealedStore
from pallasite_simulator.loop_store import LOOPS
from pallasite_simulator.types import STORAGE, Array, Values

type Emit = Callable[..., Any]
"""``emit(builder, *elements)``: from integers, which hold the bits of the inputs' elements, the
integer with the bits of the result's."""

F32, F64 = ir.FloatType(), ir.DoubleType()

_POINTER = ir.IntType(8).as_pointer()
_INDEX = ir.IntType(64)

# Where an array object of NumPy holds the pointer to its data: first after the object's head.
_DATA = object.__basicsize__

_TO_NEAREST = 1

_SOURCE = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()
"""Of this file when it was loaded: how loops are optimized decides about their machine code."""

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
    """A function of arrays that computes each element on its own; compiled at its first call.

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
    dtype = STORAGE[result * units]
    invoke: Callable[..., None] | None = None

    def run(*values: Values) -> Values:
        nonlocal invoke
        if invoke is None:
            invoke = _loop(emit, inputs, result, direction)
        count, scalar = 1, True
        for value in values:
            if value.ndim:
                count, scalar = len(value), False
                break
        arrays = []
        for value in values:
            if not value.ndim:
                value = np.full(count, value)
            elif len(value) != count:
                raise ValueError(f"arrays of {count} and {len(value)} elements")
            elif not value.flags.c_contiguous:
                value = np.ascontiguousarray(value)
            arrays.append(value)
        output = np.empty(count, dtype)
        # `arrays` keeps the objects alive whose addresses are given away.
        invoke(id(output), *map(id, arrays), count * units)
        return output[0] if scalar else output

    return run


def _loop(
    emit: Emit, inputs: Sequence[int], result: int, direction: int | None
) -> Callable[..., None]:
    """The compiled loop, which takes the addresses of array objects and the number of elements."""
    module = ir.Module("loop")
    arguments = [_POINTER] * (1 + len(inputs)) + [_INDEX]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "loop")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    if direction is not None:
        # llvmlite's own `add` does not know this attribute.
        set.add(function.attributes, "strictfp")
        _set_rounding(builder, direction)
    pointers = [
        _data(builder, array, bits)
        for array, bits in zip(function.args, (result, *inputs), strict=False)
    ]
    _emit_loop(builder, function, pointers, emit)
    if direction is not None:
        _set_rounding(builder, _TO_NEAREST)
    builder.ret_void()
    signature = [ctypes.c_size_t] * (1 + len(inputs)) + [ctypes.c_int64]
    return ctypes.CFUNCTYPE(None, *signature)(compile_loop(str(module)))


def _set_rounding(builder: Any, direction: int) -> None:
    code = ir.Constant(integer(32), direction)
    intrinsic(builder, "llvm.set.rounding", ir.VoidType(), code)


def _data(builder: Any, array: Any, bits: int) -> Any:
    """The pointer to the data of an array object."""
    field = builder.gep(array, [ir.Constant(_INDEX, _DATA)])
    field = builder.bitcast(field, _POINTER.as_pointer())
    return builder.bitcast(builder.load(field), integer(bits).as_pointer())


def _emit_loop(builder: Any, function: Any, pointers: Sequence[Any], emit: Emit) -> None:
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
def _host() -> tuple[Any, Any, Any, Mapping[str, str]]:
    """llvmlite's binding, the context of all loops, the target and what names this processor."""
    import llvmlite.binding as binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    probe: Array = np.zeros(1)
    if ctypes.c_void_p.from_address(id(probe) + _DATA).value != probe.ctypes.data:
        raise ImportError("this NumPy keeps the data of arrays where the simulator cannot find it")
    context = binding.create_context()
    _kept.append(context)
    processor = {
        "cpu": binding.get_host_cpu_name(),
        "features": binding.get_host_cpu_features().flatten(),
    }
    return binding, context, binding.Target.from_default_triple(), processor


def compile_loop(text: str, effort: int = 0) -> int:
    """Compiles a module, or finds its machine code in the cache folder; returns the address of its
    function ``loop``.

    Args:
      text: LLVM IR.
      effort: how hard the code generator tries, 0 to 3; loops are unrolled above 0.
    """
    with _lock, deferred():
        binding, context, target, processor = _host()
        # Without effort in choosing instructions: the passes below have vectorised the loop.
        machine = target.create_target_machine(opt=effort, **processor)
        module = binding.parse_assembly(text, context)
        store = _store(config.get("cache_dir")) if config.get("cache") else None
        key = _key(text, effort)
        known = None if store is None else store.get(key)
        made: list[bytes] = []
        if known is None:
            module.verify()
            _optimize(module, machine, effort)
        engine = binding.create_mcjit_compiler(module, machine)
        engine.set_object_cache(lambda module, code: made.append(code), lambda module: known)
        engine.finalize_object()
        if store is not None and made:
            store.put(key, made[0])
        # The code lives as long as the process: nothing of it may be freed.
        _kept.append((engine, module, machine))
        return int(engine.get_function_address("loop"))


def _optimize(module: Any, machine: Any, effort: int) -> None:
    binding, *_ = _host()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = True
    # Both make compiling take longer and hardly any loop faster.
    options.loop_unrolling = options.loop_interleaving = effort > 0
    with binding.create_pass_builder(machine, options) as passes:
        passes.getModulePassManager().run(module, passes)


@functools.lru_cache(maxsize=8)
def _store(folder: pathlib.Path) -> SealedStore:
    return SealedStore(folder, LOOPS)


def _key(text: str, effort: int) -> str:
    """SHA-256, in hexadecimal, of all that the machine code of a loop depends on."""
    binding, _, target, processor = _host()
    version = (llvmlite.__version__, *binding.llvm_version_info)
    parts = [_SOURCE, text, str(effort), *processor.values(), target.triple, str(version)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
