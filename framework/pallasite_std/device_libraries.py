"""Device libraries, such as those of LLVM bitcode: cut down to what is used, and linked to kernels.

A pass at stage ``"llvm"`` links a library to a kernel that declares its functions and calls them
(``llvm.func`` without a body, ``llvm.call``).
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import re
from collections.abc import Collection
from typing import Any

from pallasite.plugin import CompilationError
from pallasite.plugin.codegen import llvm_module

_SOURCE = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()
"""Of this file when it was loaded: what it cuts out depends on it."""

_TARGET = re.compile(r'\s"(?:target-cpu|target-features|tune-cpu|frame-pointer)"="[^"]*"')
_SECTION = re.compile(r'(?<=\)) ((?:local_|)unnamed_addr )?(#\d+ )?section "[^"]*" (?=\{)')
_KEPT_GLOBALS = re.compile(r"^@llvm\.(?:compiler\.)?used = .*\n", re.MULTILINE)


def trimmed_library(bitcode: bytes, functions: Collection[str]) -> str:
    """LLVM IR of some functions of a library, and of what they use.

    They can be linked to kernels for any target that has their instructions, and all of them are
    inlined there.

    Args:
      bitcode: of the library.
      functions: names of those that are wanted.

    Raises:
      CompilationError: LLVM cannot read the bitcode, or it has no such functions.
    """
    binding = _binding()
    with contextlib.ExitStack() as stack:
        try:
            module = stack.enter_context(llvm_module(binding.parse_bitcode, bitcode))
        except RuntimeError as error:
            raise CompilationError(f"LLVM cannot read a device library: {error}") from None
        defined = {one.name: one for one in module.functions if not one.is_declaration}
        missing = sorted(set(functions) - set(defined))
        if missing:
            raise CompilationError(
                "a device library lacks functions", got=missing, hint="use another version"
            )
        for name, function in defined.items():
            if name not in functions:
                function.linkage = "internal"
        _drop_unused(binding, module)
        text = _KEPT_GLOBALS.sub("", str(module))
    # What the library wants to be kept although nobody uses it goes, too.
    with llvm_module(binding.parse_assembly, text) as module:
        _drop_unused(binding, module)
        text = str(module)
    text = _SECTION.sub(lambda found: f" {found[1] or ''}{found[2] or ''}", text)
    return re.sub(r"\bnoinline\b", "alwaysinline", _TARGET.sub("", text))


def library_key(bitcode: bytes, functions: Collection[str]) -> str:
    """A name under which the result of :func:`trimmed_library` can be kept on disk: SHA-256, in
    hexadecimal, of its arguments, of LLVM's version and of the code that makes it."""
    import llvmlite

    versions = (llvmlite.__version__, *_binding().llvm_version_info)
    rest = repr((_SOURCE, versions, sorted(functions)))
    return hashlib.sha256(rest.encode() + bitcode).hexdigest()


def link_library(module: Any, context: Any, library: str) -> None:
    """Adds functions to a kernel's module, which are inlined where they are called.

    Args:
      module: of llvmlite; it is changed.
      context: the pass's. Its ``llvm`` becomes the text of what is linked, which decides how much
        LLVM has to do.
      library: LLVM IR, such as of :func:`trimmed_library`.

    Raises:
      CompilationError: LLVM refuses the library, or the two do not fit together.
    """
    binding = _binding()
    try:
        other = binding.parse_assembly(library, module._context)
        other.triple, other.data_layout = module.triple, module.data_layout
        names = [one.name for one in other.functions if not one.is_declaration]
        module.link_in(other)
        for name in names:
            module.get_function(name).linkage = "internal"
        module.verify()
    except RuntimeError as error:
        raise CompilationError(f"LLVM cannot link a device library: {error}") from None
    context.llvm = str(module)


def _drop_unused(binding: Any, module: Any) -> None:
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    machine = binding.Target.from_triple("nvptx64-nvidia-cuda").create_target_machine(cpu="sm_90")
    options = binding.create_pipeline_tuning_options(speed_level=1)
    with binding.create_pass_builder(machine, options) as builder:
        passes.run(module, builder)


def _binding() -> Any:
    import llvmlite.binding as binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding
