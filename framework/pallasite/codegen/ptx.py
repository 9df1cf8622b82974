"""LLVM IR to PTX, with the LLVM that llvmlite carries.

Compile time is what the choices here are about; they were measured on kernels of up to 20,000
instructions:

* The O1 pipeline gives the same machine code as O2 and O3, because the assembler optimizes once
  more, in a fifth of the time or less.
* Three of its passes, in an eighth of its time, give as good code for all but a few kernels: MLIR's
  passes and the assembler do what the others do. Over 37 kernels the machine code has 0.6 % fewer
  instructions and as many registers; 29 kernels of the library take 0.99 to 1.01 times as long on
  an H200, with a geometric mean of 1.000.
* Two passes of the back end are quadratic in the number of memory accesses of a basic block: the
  load and store vectorizer and the straight-line strength reduction. A block with 1,000 accesses
  takes over a second in either. Both are switched off: rules emit vector accesses themselves, and
  constant offsets are folded by another pass, given ``nsw`` index arithmetic.
* LLVM ends the process when it cannot select an instruction. What reaches it must therefore have
  been checked before, or it runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pallasite import interrupts
from pallasite.codegen.translation.locations import location_in_llvm
from pallasite.errors import CompilationError
from pallasite.targets import Target

TRIPLE = "nvptx64-nvidia-cuda"
_OPTIONS = (
    "-disable-nvptx-load-store-vectorizer=true",
    "-opt-disable=slsr",
    # Reading a module with debug information verifies it, and would end the process if it is
    # broken; it is verified afterwards, where an error can be raised.
    "-disable-auto-upgrade-debug-info=true",
)
_CODEGEN_LEVEL = 2
_DEFAULT_SPEED_LEVEL = 1

# The back end ends the process for a version below these.
_OLDEST_VERSION = {
    **dict.fromkeys(("sm_80",), 70),
    **dict.fromkeys(("sm_86",), 71),
    **dict.fromkeys(("sm_87",), 74),
    **dict.fromkeys(("sm_89", "sm_90"), 78),
    **dict.fromkeys(("sm_90a",), 80),
    **dict.fromkeys(("sm_100", "sm_100a", "sm_101a"), 86),
    **dict.fromkeys(("sm_120", "sm_120a"), 87),
    **dict.fromkeys(("sm_100f", "sm_103", "sm_103a", "sm_103f", "sm_120f"), 88),
    **dict.fromkeys(("sm_121", "sm_121a", "sm_121f"), 88),
    **dict.fromkeys(("sm_88", "sm_110", "sm_110a", "sm_110f"), 90),
}

# LLVM takes a chip that it does not know for the oldest one, which lacks arithmetic of 16 bits.
_PROBE = "define half @add(half %x) { %y = fadd half %x, %x ret half %y }"

_lock = threading.RLock()
_machines: dict[tuple[str, int], Any] = {}
_contexts: dict[int, Any] = {}
_initialized = False

_DEBUG_NOISE = re.compile(
    r"(?m)^(?:\$L__(?:tmp|func_begin|func_end)\d+:|\t\.section\s+\.debug_macinfo\s*\{\s*\}"
    r"|\t// begin inline asm\n\s*// end inline asm)\n"
)
_POSITION = re.compile(r":(\d+):\d+: error: (.*)")


def _binding() -> Any:
    """The llvmlite binding, initialized once per process."""
    global _initialized
    import llvmlite.binding as binding

    if not _initialized:
        for option in _OPTIONS:
            binding.set_option("pallasite", option)
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
        _initialized = True
    return binding


def settings(target: Target) -> tuple[tuple[str, ...], str, dict[str, Any]]:
    """LLVM's options, the triple, and the arguments of the target machine of a target."""
    name, features = target.architecture or target.name, f"+ptx{target.ptx_version}"
    return _OPTIONS, TRIPLE, {"cpu": name, "features": features, "opt": _CODEGEN_LEVEL}


def target_machine(target: Target) -> Any:
    """The LLVM target machine of a target; kept for the life of the process.

    Raises:
      CompilationError: LLVM does not know the chip, or not with this version of PTX.
    """
    name, version = target.architecture or target.name, target.ptx_version
    oldest = _OLDEST_VERSION.get(name, 0)
    if version < oldest:
        raise CompilationError(
            f"target {name} with PTX version {version / 10}",
            expected=f"ptx_version of {oldest} or more",
        )
    with _lock:
        machine = _machines.get((name, version))
        if machine is None:
            _, triple, arguments = settings(target)
            machine = _binding().Target.from_triple(triple).create_target_machine(**arguments)
            with parsed(_PROBE) as module:
                ptx = str(machine.emit_assembly(module))
            if f".version {version // 10}.{version % 10}\n" not in ptx or "add.rn.f16" not in ptx:
                raise CompilationError(
                    f"LLVM does not know {name!r} with PTX version {version / 10}",
                    hint="Target(architecture='sm_90'), a lower ptx_version, or a newer llvmlite",
                )
            _machines[name, version] = machine
    return machine


@contextlib.contextmanager
def parsed(llvm: str) -> Iterator[Any]:
    """A verified llvmlite module, in a context of its own, from LLVM IR text.

    Raises:
      CompilationError: the text is not valid; shows the line of LLVM IR.
    """
    with _lock:
        binding = _binding()
    with contextlib.ExitStack() as stack:
        try:
            module = stack.enter_context(llvm_module(binding.parse_assembly, llvm))
        except RuntimeError as error:
            raise _parse_error(str(error), llvm) from None
        verify(module, "", llvm)
        yield module


@contextlib.contextmanager
def llvm_module(parse: Callable[[Any, Any], Any], code: Any) -> Iterator[Any]:
    """An llvmlite module in a context of its own, by ``parse(code, context)``; both are closed in
    the end, the module first.

    LLVM crashes if a context goes before a module in it. Where something fails, another module may
    be left, in a frame that the exception holds, so the context stays for ever.
    """
    import llvmlite.binding as binding

    module = None
    try:
        with interrupts.deferred():
            context = binding.create_context()
            _contexts[id(context)] = context
            module = parse(code, context)
        yield module
    finally:
        with interrupts.deferred():
            if module is not None:
                module.close()
    with interrupts.deferred():
        del _contexts[id(context)]
        context.close()


def verify(module: Any, after: str, llvm: str = "") -> None:
    """Raises CompilationError if an llvmlite module is not valid.

    Args:
      module: the module.
      after: who left it.
      llvm: its text, if that is known.
    """
    try:
        with interrupts.deferred():
            module.verify()
    except RuntimeError as error:
        raise _verification_error(str(error), llvm or str(module), after) from None


def _parse_error(message: str, llvm: str) -> CompilationError:
    match = _POSITION.search(message)
    if match is None:
        return CompilationError(f"LLVM refused the code: {message}")
    number = int(match[1])
    lines = llvm.splitlines()
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return CompilationError(
        f"LLVM refused the code: {match[2]}",
        got=f"LLVM IR line {number}: {line}",
        hint="PALLASITE_DUMP=directory keeps the text of every stage",
        location=location_in_llvm(line, llvm),
    )


def _verification_error(message: str, llvm: str, after: str) -> CompilationError:
    """The first complaint of the verifier, at the source line of the instruction that it shows."""
    complaint, _, rest = message.strip().partition("\n")
    shown = rest.strip().splitlines()
    instruction = shown[0].strip() if shown else None
    return CompilationError(
        f"LLVM refused the code{after and f' that {after} left'}: {complaint}",
        got=instruction,
        hint="PALLASITE_DUMP=directory keeps the text of every stage",
        location=location_in_llvm(instruction or "", llvm),
    )


def sufficient_pipeline(llvm: str) -> str:
    """The shortest pipeline that does all that a kernel needs: ``"short"`` or ``"O1"``.

    Only the longer one inlines calls of the kernel's own functions, unrolls loops that ask for it,
    and moves loads of memory that does not change out of loops.
    """
    several = llvm.count("\ndefine ") > 1
    hoists = "!invariant.load" in llvm and " = phi " in llvm
    unrolls = "llvm.loop.unroll.full" in llvm or "llvm.loop.unroll.count" in llvm
    return "O1" if several or hoists or unrolls else "short"


@interrupts.deferred()
def simplify(module: Any, target: Target) -> None:
    """Promotes memory to registers, simplifies instructions and control flow."""
    with _lock:
        binding = _binding()
        options = binding.create_pipeline_tuning_options(speed_level=_DEFAULT_SPEED_LEVEL)
        passes = binding.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        with binding.create_pass_builder(target_machine(target), options) as builder:
            passes.run(module, builder)


@interrupts.deferred()
def optimize(module: Any, target: Target, *, speed_level: int = _DEFAULT_SPEED_LEVEL) -> None:
    """Runs LLVM's standard pipeline of an optimization level (0 to 3) on an llvmlite module."""
    with _lock:
        binding = _binding()
        options = binding.create_pipeline_tuning_options(speed_level=speed_level)
        # Loops are unrolled on request only: by the lowering or by the attribute ``unroll``.
        options.loop_unrolling = False
        options.slp_vectorization = False
        options.loop_vectorization = False
        with binding.create_pass_builder(target_machine(target), options) as builder:
            builder.getModulePassManager().run(module, builder)


def emit(module: Any, target: Target, machine: Any = None) -> str:
    """The PTX of an llvmlite module; by default from the target machine of this process."""
    with _lock, contextlib.nullcontext() if machine else interrupts.deferred():
        ptx = str((machine or target_machine(target)).emit_assembly(module))
    # Labels for debug sections that do not exist, an empty section, and assembly of no instruction.
    return _DEBUG_NOISE.sub("", ptx)
