"""Helpers of the code generation tests: text checks, PTX for every target, and host execution."""

from __future__ import annotations

import ctypes
import functools
import io
import re
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts
from jaxlib.mlir import ir

from pallasite.codegen import assembler, ptx
from pallasite.codegen.llvm_ir import translate
from pallasite.codegen.tools import find_tool
from pallasite.ir.context import make_context
from pallasite.targets import Target

HOPPER = Target(name="sm_90a", ptx_version=86, compute_capability=(9, 0))
BLACKWELL = Target(name="sm_100a", ptx_version=86, compute_capability=(10, 0))
TARGETS = (HOPPER, BLACKWELL)

TYPES = {
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "f32": np.float32,
    "f64": np.float64,
}


def parse(source: str) -> ir.Module:
    """A verified module, in a context of its own."""
    module = ir.Module.parse(source, make_context())
    module.operation.verify()
    return module


def to_llvm(source: str, **options: Any) -> str:
    """LLVM IR of MLIR text, checked by LLVM."""
    module = parse(source)
    options.setdefault("debug_info", False)
    text = translate(module, **options)
    with ptx.parsed(text) as llvm_module:
        llvm_module.verify()
    return text


def llvm_to_ptx(text: str, target: Target) -> str:
    """PTX of LLVM IR text, by the steps that compilation takes."""
    with ptx.parsed(text) as module:
        ptx.optimize(module, target)
        return ptx.emit(module, target)


def to_ptx(source: str, target: Target = HOPPER, **options: Any) -> str:
    """PTX of MLIR text for one target; assembled for all of them."""
    text = to_llvm(source, **options)
    for one in TARGETS:
        assemble(llvm_to_ptx(text, one))
    return llvm_to_ptx(text, target)


def assemble(text: str) -> assembler.Assembly:
    """Assembles PTX, or skips the test where there is no assembler."""
    if find_tool("ptxas").path is None:
        pytest.skip("ptxas is not installed")
    return assembler.assemble(text, "kernel")


def kernel(body: str, parameters: str = "", attributes: str = "", head: str = "") -> str:
    """A module with one kernel ``k`` whose body is given without its return."""
    return (
        f"{head}\nllvm.func @k({parameters}) attributes {{nvvm.kernel{attributes}}} {{\n"
        f"{body}\nllvm.return\n}}"
    )


def check(text: str, checks: str) -> None:
    """Fails unless the text matches FileCheck directives, given one per line."""
    lines = "\n".join(line.strip() for line in checks.strip().splitlines())
    options = Options(match_filename="checks", dump_input="never")
    pattern = pattern_for_opts(options)
    parser = Parser(options, io.StringIO(lines + "\n"), *pattern)
    code = Matcher(options, FInput("text", text), parser).run()
    assert code == 0, f"{checks}\ndoes not match\n{text}"


@functools.cache
def _host() -> tuple[str, str, Any]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_default_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=1)
    return triple, str(machine.target_data), machine


_kept: list[Any] = []


def compile_host(source: str, name: str = "f") -> int:
    """Address of a function, after translation for this machine."""
    triple, layout, _ = _host()
    module = parse(source)
    text = translate(module, triple=triple, data_layout=layout, debug_info=False)
    compiled = llvm.parse_assembly(text)
    compiled.verify()
    engine = llvm.create_mcjit_compiler(
        compiled, llvm.Target.from_triple(triple).create_target_machine(opt=1)
    )
    engine.finalize_object()
    _kept.append(engine)
    return int(engine.get_function_address(name))


def elementwise(body: str, out: str, *inputs: tuple[str, np.ndarray]) -> np.ndarray:
    """Runs scalar code for each element on this machine.

    ``body`` computes ``%r`` of type ``out`` from ``%x0``, ``%x1``, ... for the arrays given with
    their MLIR types.
    """
    parameters = ["%out: !llvm.ptr"] + [f"%p{i}: !llvm.ptr" for i in range(len(inputs))]
    loads = "\n".join(
        f"%q{i} = llvm.getelementptr %p{i}[%i] : (!llvm.ptr, i64) -> !llvm.ptr, {type_}\n"
        f"%x{i} = llvm.load %q{i} : !llvm.ptr -> {type_}"
        for i, (type_, _) in enumerate(inputs)
    )
    length = max(array.size for _, array in inputs)
    source = f"""
      llvm.func @f({", ".join(parameters)}) {{
        %zero = arith.constant 0 : i64
        %one = arith.constant 1 : i64
        %end = arith.constant {length} : i64
        scf.for %i = %zero to %end step %one : i64 {{
          {loads}
          {body}
          %o = llvm.getelementptr %out[%i] : (!llvm.ptr, i64) -> !llvm.ptr, {out}
          llvm.store %r, %o : {out}, !llvm.ptr
        }}
        llvm.return
      }}"""
    arrays = [np.ascontiguousarray(array, TYPES[type_]) for type_, array in inputs]
    result = np.full(length, 77, TYPES[out])
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(arrays) + 1))(compile_host(source))
    function(result.ctypes.data, *[array.ctypes.data for array in arrays])
    return result


def call_host(source: str, result: str, *arguments: tuple[str, Any]) -> Any:
    """Calls a scalar function ``@f`` on this machine."""
    kinds = {
        "i32": ctypes.c_int32,
        "i64": ctypes.c_int64,
        "f32": ctypes.c_float,
        "f64": ctypes.c_double,
    }
    types = [kinds[type_] for type_, _ in arguments]
    function = ctypes.CFUNCTYPE(kinds[result], *types)(compile_host(source))
    return function(*[value for _, value in arguments])


def instructions(text: str) -> list[str]:
    """The instructions of PTX text, without directives, labels and comments."""
    found = re.findall(r"^\t(?!\.|//)(.*);$", text, re.MULTILINE)
    return [one.replace("\t", " ") for one in found]
