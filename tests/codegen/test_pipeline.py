"""The pass pipeline, the whole of code generation, and its external tools."""

# ruff: noqa: E501

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pathlib
import pickle
import threading
import warnings

import llvmlite.binding
import pytest
from codegen_support import BLACKWELL, HOPPER, assemble, kernel, llvm_to_ptx, parse, to_llvm

from pallasite import config
from pallasite.codegen import assembler, ptx, tools
from pallasite.codegen.compile import compile_lowered
from pallasite.codegen.compiled import LoweredKernel
from pallasite.codegen.translation.types import TypeTable, name_wide_structures
from pallasite.errors import CompilationError, ConfigError, PallasiteError
from pallasite.extensions import Contribution, Pass
from pallasite.launch import LaunchParameters, ResourceReport
from pallasite.passes import pipeline
from pallasite.passes.builtin import pallasite_passes
from pallasite.passes.pipeline import PassContext, run_stage
from pallasite.registry import Registry
from pallasite.targets import Target

SOURCE = kernel(
    """%c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %z = arith.constant 0.0 : f32
    %s = scf.for %i = %c0 to %n step %c1 iter_args(%x = %z) -> (f32) : i32 {
      %k = arith.addi %n, %c1 : i32
      %f = arith.sitofp %k : i32 to f32
      %y = arith.addf %x, %f : f32
      scf.yield %y : f32
    }
    llvm.store %s, %p : f32, !llvm.ptr<1>""",
    "%p: !llvm.ptr<1>, %n: i32",
)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A registry with the built-in passes and those that a test adds."""
    extra: list[Pass] = []

    def build():
        return Registry(
            [
                Contribution("pallasite", passes=tuple(pallasite_passes())),
                Contribution("plugin", passes=tuple(extra)),
            ]
        )

    monkeypatch.setattr("pallasite.plugins.registry", build)
    return extra


def _lowered(source: str = SOURCE, target: Target = HOPPER) -> LoweredKernel:
    launch = LaunchParameters(
        grid=(1, 1, 1),
        block=(128, 1, 1),
        cluster=(1, 1, 1),
        shared_memory_bytes=0,
        parameters=(),
        inputs=(),
        outputs=(),
    )
    return LoweredKernel(
        name="k",
        module=parse(source),
        target=target,
        launch=launch,
        resources=ResourceReport(barriers=3),
        jaxpr="the jaxpr",
    )


def test_compile_to_ptx():
    compiled = compile_lowered(_lowered())
    assert ".version 8.6\n.target sm_90a\n" in compiled.ptx
    assert compiled.jaxpr == "the jaxpr"
    assert compiled.mlir is not None
    assert compiled.mlir.index("arith.sitofp") < compiled.mlir.index("scf.for")
    assert compiled.llvm is not None
    assert "define ptx_kernel void @k" in compiled.llvm
    assert compiled.cubin is None
    assert compiled.resources == ResourceReport(barriers=3)
    names = [name for name, _ in compiled.timings]
    assert names == [
        "mlir-canonicalize",
        "mlir-hoist",
        "translate",
        "llvm-parse",
        "llvm-optimize",
        "ptx-emit",
    ]


def test_compile_to_machine_code():
    if tools.find_tool("ptxas").path is None or tools.find_tool("nvdisasm").path is None:
        pytest.skip("the CUDA toolkit is not installed")
    compiled = compile_lowered(_lowered(target=BLACKWELL), disassemble=True, keep=False)
    assert compiled.cubin is not None
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.sass is not None
    assert "EXIT" in compiled.sass
    assert compiled.resources.registers is not None
    assert compiled.resources.registers > 0
    assert compiled.resources.barriers == 3
    assert compiled.resources.spill_store_bytes == 0
    assert compiled.jaxpr is compiled.mlir is compiled.llvm is None
    assert [name for name, _ in compiled.timings][-2:] == ["ptxas", "disassemble"]


def test_compiling_is_deterministic():
    assert compile_lowered(_lowered()).ptx == compile_lowered(_lowered()).ptx


def test_threads_compile_at_the_same_time():
    expected = compile_lowered(_lowered()).ptx
    found: list[str] = []

    def work():
        for _ in range(3):
            found.append(compile_lowered(_lowered()).ptx)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 12


def test_passes_of_every_stage_run_in_order(registry):
    seen: list[str] = []

    def note(name):
        return lambda value, context: seen.append(f"{name} {type(value).__name__}")

    registry += [
        Pass(name="last", stage="mlir", run=note("last"), after=("mlir-hoist",)),
        Pass(name="first", stage="mlir", run=note("first"), before=("mlir-canonicalize",)),
        Pass(name="ir", stage="llvm", run=note("ir")),
        Pass(name="text", stage="ptx", run=lambda value, context: value + "// end\n"),
    ]
    compiled = compile_lowered(_lowered())
    assert seen == ["first Module", "last Module", "ir ModuleRef"]
    assert compiled.ptx.endswith("// end\n")


@pytest.mark.parametrize("fails", [False, True])
def test_llvm_module_is_closed_before_its_context(registry, fails):
    """Not by the garbage collector, which may take the context first: LLVM crashes then."""
    closed: list[str] = []
    modules = []

    def record(name, dispose):
        closed.append(name)
        dispose()

    def watch(module, context):
        module.cycle = [module]
        modules.append(module)
        for what in (module, module._context):
            what._dispose = functools.partial(record, type(what).__name__, what._dispose)
        if fails:
            raise RuntimeError("no")

    registry.append(Pass(name="watch", stage="llvm", run=watch))
    if fails:
        with pytest.raises(PallasiteError):
            compile_lowered(_lowered())
    else:
        compile_lowered(_lowered())
    # What an exception holds may be in the context, which then stays.
    assert closed == ["ModuleRef"] + ["ContextRef"] * (not fails)
    assert modules[0].closed


def test_what_an_exception_holds_may_be_in_the_context(registry):
    """LLVM crashes if that goes before a module in it."""

    def keep(module, context):
        other = llvmlite.binding.parse_assembly("@a = global i32 1", module._context)
        raise RuntimeError(f"with {other.name!r}")

    registry.append(Pass(name="keep", stage="llvm", run=keep))
    with pytest.raises(PallasiteError) as caught:
        compile_lowered(_lowered())
    assert "RuntimeError: with" in caught.value.message
    del caught
    gc.collect()


def test_disabled_passes():
    with config.scoped(disabled_passes="mlir-hoist,llvm-optimize"):
        compiled = compile_lowered(_lowered())
    names = [name for name, _ in compiled.timings]
    assert "mlir-hoist" not in names
    assert "llvm-optimize" not in names
    with (
        config.scoped(disabled_passes="mlir-hoist,nonsense"),
        pytest.raises(ConfigError, match="passes that do not exist") as caught,
    ):
        compile_lowered(_lowered())
    assert "nonsense" in str(caught.value)


def test_failing_pass_is_named(registry):
    def fail(value, context):
        raise ValueError("something")

    registry.append(Pass(name="broken", stage="mlir", run=fail))
    with pytest.raises(CompilationError, match="pass 'broken' of plugin 'plugin' failed") as caught:
        compile_lowered(_lowered())
    assert "PALLASITE_DISABLE_PASSES=broken" in str(caught.value)


def test_pass_that_breaks_the_module_is_named(registry):
    def spoil(module, context):
        function = module.body.operations[0]
        list(function.regions[0].blocks[0].operations)[-1].operation.erase()

    registry.append(Pass(name="spoiler", stage="mlir", run=spoil))
    with pytest.raises(CompilationError, match="mlir pass 'spoiler' of plugin 'plugin' left"):
        compile_lowered(_lowered())


def test_invalid_lowering_shows_the_operation_and_its_line():
    lowered = _lowered(SOURCE)
    function = lowered.module.body.operations[0]
    function.attributes["nvvm.reqntid"] = function.attributes["sym_name"]
    with pytest.raises(CompilationError, match="the lowering left invalid MLIR") as caught:
        compile_lowered(lowered)
    assert caught.value.location is not None


def test_dump(tmp_path):
    with config.scoped(dump=tmp_path / "out"):
        run_stage("jaxpr", "the jaxpr", PassContext("k", HOPPER), passes=())
        compile_lowered(_lowered())
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "k.00.jaxpr.txt",
        "k.20.mlir.mlir",
        "k.21.mlir-canonicalize.mlir",
        "k.22.mlir-hoist.mlir",
        "k.40.llvm.ll",
        "k.41.llvm-optimize.ll",
        "k.60.ptx.ptx",
    ]
    assert "loc(" in (tmp_path / "out" / "k.20.mlir.mlir").read_text()


def test_invalid_llvm_shows_the_line():
    text = to_llvm(SOURCE).replace("fadd", "fadx")
    with pytest.raises(CompilationError, match="LLVM refused the code") as caught:
        llvm_to_ptx(text, HOPPER)
    assert "fadx" in str(caught.value.got)


def test_invalid_intrinsic_points_at_the_kernel():
    body = '%t = llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.tid.x"(%i) : (i32) -> i32'
    located = f'{body} loc("/home/user/kernel.py":31:7)'
    lowered = _lowered(kernel(located, "%i: i32"))
    with pytest.raises(CompilationError, match="invalid intrinsic signature") as caught:
        compile_lowered(lowered)
    assert str(caught.value.location) == "/home/user/kernel.py:31"


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("sm_90a", 990, "does not know 'sm_90a' with PTX version 99"),
        ("sm_90_small", 86, "does not know 'sm_90_small'"),
        ("sm_90a", 60, "target sm_90a with PTX version 6.0"),
    ],
)
def test_unknown_targets(name, version, message):
    target = Target(name=name, ptx_version=version, compute_capability=(9, 0))
    with pytest.raises(CompilationError, match=message):
        llvm_to_ptx(to_llvm(SOURCE), target)


def test_targets_with_names_of_their_own():
    target = Target(
        name="sm_90_small", architecture="sm_90", ptx_version=86, compute_capability=(9, 0)
    )
    assert ".target sm_90\n" in llvm_to_ptx(to_llvm(SOURCE), target)


def _fake_tool(folder: pathlib.Path, name: str) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_tools_are_looked_for_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "_wheel_folders", lambda: [tmp_path / "wheel"])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert tools.find_tool("ptxas").path is None
    for place in ("path", "home/bin", "wheel"):
        path = _fake_tool(tmp_path / place, "ptxas")
        assert tools.find_tool("ptxas").path == path
    own = _fake_tool(tmp_path / "own", "ptxas")
    with config.scoped(ptxas=str(own)):
        assert tools.find_tool("ptxas").path == own
    with config.scoped(ptxas=str(tmp_path / "nothing")):
        missing = tools.find_tool("ptxas")
    assert missing.path is None
    assert "which is not a program" in missing.reason


def test_missing_tools_say_what_to_install():
    with (
        config.scoped(ptxas="off"),
        pytest.raises(CompilationError, match="switched off by the option"),
    ):
        compile_lowered(_lowered(), assemble=True)


def test_missing_disassembler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tools, "_folders", list)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilationError, match="pip install nvidia-cuda-nvdisasm"):
        assembler.disassemble(b"")


def test_figures_and_spills_are_read():
    messages = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size, 1024 bytes smem, 560 bytes cmem[0]
"""
    result = assembler.read_figures(messages)
    assert result.registers == 168
    assert result.stack_bytes == 16
    assert (result.spill_store_bytes, result.spill_load_bytes) == (24, 40)
    assert (result.shared_memory_bytes, result.constant_bytes) == (1024, 560)
    report = result.add_to(ResourceReport(shared_memory_bytes=5))
    assert (report.registers, report.shared_memory_bytes) == (168, 5)


def test_spills_warn():
    loads = "\n".join(
        f"%q{i} = llvm.getelementptr %p[{i}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, f32\n"
        f"%v{i} = llvm.load volatile %q{i} : !llvm.ptr<1> -> f32"
        for i in range(80)
    )
    stores = "\n".join(f"llvm.store volatile %v{i}, %q{i} : f32, !llvm.ptr<1>" for i in range(80))
    attributes = ", nvvm.maxnreg = 24 : i32"
    text = llvm_to_ptx(
        to_llvm(kernel(loads + "\n" + stores, "%p: !llvm.ptr<1>", attributes)), HOPPER
    )
    with pytest.warns(assembler.PallasiteSpillWarning, match="kernel 'kernel' spills registers"):
        assert assemble(text).spill_store_bytes > 0


def test_no_warning_without_spills():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assemble(llvm_to_ptx(to_llvm(SOURCE), HOPPER))


def test_serialization_warning_names_the_line():
    text = '.loc\t1 7 3\n.file\t1 "/home/user/kernel.py"\nfoo;\n'
    message = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are"
        " serialized due to insufficient register resources in function 'k'"
    )
    result = assembler.read_figures(message)
    assert result.messages == (message,)
    with pytest.warns(assembler.PallasiteSerializationWarning, match="serialized"):
        assembler._warn(result, text, "k")


def test_pipelines_of_llvm():
    """Kernels that need more than the short pipeline, by their text; and each pipeline by name."""
    for text in (
        "x\ndefine void @a() {\n}\ndefine void @b() {\n}",
        'br label %b, !llvm.loop !3\n!3 = !{!4}\n!4 = !{!"llvm.loop.unroll.full"}',
        "  %1 = phi i32 [ 0, %a ]\n  %2 = load i32, ptr %p, !invariant.load !1",
        'br label %b, !llvm.loop !3\n!3 = !{!4}\n!4 = !{!"llvm.loop.unroll.count", i32 4}',
    ):
        assert ptx.sufficient_pipeline(text) == "O1"
    assert ptx.sufficient_pipeline("\ndefine void @a() {\n  %1 = phi i32 [ 0, %a ]\n}") == "short"
    found = {}
    for name in ("auto", "short", "O1", "O2", "O3"):
        with config.scoped(llvm_pipeline=name):
            found[name] = compile_lowered(_lowered(SOURCE)).ptx
    assert found["auto"] == found["short"] and all("ret;" in one for one in found.values())
    with pytest.raises(ConfigError, match="llvm_pipeline"):
        config.update("llvm_pipeline", "Oz")


def test_passes_that_change_nothing(registry, monkeypatch):
    """Their module is not verified again; what they were given goes on."""
    verified = []
    verify = pipeline.verify
    monkeypatch.setattr(pipeline, "verify", lambda *a: (verified.append(a[1]), verify(*a)))
    registry.append(Pass(name="looks", stage="mlir", run=lambda module, context: False))
    registry.append(Pass(name="changes", stage="mlir", run=lambda module, context: None))
    assert "ret;" in compile_lowered(_lowered()).ptx
    assert verified == ["the lowering", "mlir pass 'changes' of plugin 'plugin'"]


def test_texts_are_printed_when_they_are_read():
    """They are those of the module as it was then; a copy and a pickled kernel have them, too."""
    lowered = _lowered()
    lowered = dataclasses.replace(lowered, jaxpr=_Counted())
    compiled = compile_lowered(lowered)
    with lowered.module.context:
        expected = lowered.module.operation.get_asm(enable_debug_info=False)
        lowered.module.body.operations[0].operation.erase()
    assert _Counted.prints == 0
    assert compiled.mlir == expected and "scf.for" in expected
    assert compiled.jaxpr == compiled.jaxpr == "a jaxpr" and _Counted.prints == 1
    for other in (
        pickle.loads(pickle.dumps(compiled)),
        dataclasses.replace(compiled),
        copy.copy(compiled),
    ):
        assert other == compiled and other.mlir == expected
    kept = compile_lowered(_lowered(), keep=False)
    assert kept.mlir is None and kept.jaxpr is None


class _Counted:
    prints = 0

    def __str__(self) -> str:
        _Counted.prints += 1
        return "a jaxpr"


def test_wide_results_have_a_named_type():
    """Types of many members are spelled once, unless an intrinsic returns one."""

    def source(members: int) -> str:
        types = ", ".join(["f32"] * members)
        constraints = ",".join(["=f"] * members)
        struct = f"!llvm.struct<({types})>"
        return kernel(
            f"""%0 = llvm.inline_asm asm_dialect = att "x", "{constraints}" : () -> {struct}
            %1 = llvm.extractvalue %0[{members - 1}] : {struct}
            llvm.store %1, %p : f32, !llvm.ptr<1>""",
            "%p: !llvm.ptr<1>",
        )

    for members, named in ((8, False), (17, True), (64, True)):
        text = to_llvm(source(members))
        spelled = "{" + ", ".join(["float"] * members) + "}"
        assert text.count(spelled) == (1 if named else 2)
        assert (f"%wide0 = type {spelled}" in text) == named
    spelled = "{" + ", ".join(["float"] * 17) + "}"
    table = TypeTable({0: spelled})
    lines = [f"declare {spelled} @llvm.one()", f"  %1 = call {spelled} @llvm.one()"]
    assert name_wide_structures(lines, table) == "\n".join(lines)
