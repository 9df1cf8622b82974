"""Statements and operands of PTX become the right syntax trees."""

from __future__ import annotations

import pytest
from cubin import assemble
from ptx_texts import HEADER, kernel_text

from pallasite.errors import SourceLocation
from pallasite_simulator.ptx.parser import parse
from pallasite_simulator.ptx.syntax import (
    Address,
    Arguments,
    BranchTargets,
    Function,
    Immediate,
    ImplicitDefinition,
    Instruction,
    Label,
    Negated,
    Pair,
    Position,
    Register,
    Sink,
    Special,
    Statement,
    Symbol,
    Vector,
)


def kernel(body: str) -> Function:
    return parse(kernel_text(body)).functions[-1]


def statements(body: str) -> tuple[Statement, ...]:
    parsed = kernel(body).body
    assert parsed is not None
    return parsed[:-1]


def instruction(text: str) -> Instruction:
    (parsed,) = statements(text)
    assert isinstance(parsed, Instruction)
    return parsed


def p(number: int) -> Register:
    return Register(f"%p{number}", "pred")


def h(number: int) -> Register:
    return Register(f"%h{number}", "b16")


def r(number: int) -> Register:
    return Register(f"%r{number}", "b32")


def rd(number: int) -> Register:
    return Register(f"%rd{number}", "b64")


def f(number: int) -> Register:
    return Register(f"%f{number}", "f32")


def fd(number: int) -> Register:
    return Register(f"%fd{number}", "f64")


def i(value: int) -> Immediate:
    return Immediate(value)


# Instructions that ptxas accepts, with their operands.
OPERANDS: dict[str, tuple] = {
    # Registers and special registers.
    "add.s32 %r1, %r2, %r3": (r(1), r(2), r(3)),
    "mov.u32 %r1, %tid.x": (r(1), Special("%tid", "x")),
    "mov.u32 %r1, %ctaid.w": (r(1), Special("%ctaid", "w")),
    "mov.u32 %r1, %cluster_nctaid.y": (r(1), Special("%cluster_nctaid", "y")),
    "mov.u32 %r1, %laneid": (r(1), Special("%laneid")),
    "mov.u64 %rd1, %clock64": (rd(1), Special("%clock64")),
    "mov.u32 %r1, %cluster_ctarank": (r(1), Special("%cluster_ctarank")),
    "mov.u32 %r1, %dynamic_smem_size": (r(1), Special("%dynamic_smem_size")),
    "mov.u32 %r1, %lanemask_lt": (r(1), Special("%lanemask_lt")),
    "mov.u32 %r1, %envreg31": (r(1), Special("%envreg31")),
    "mov.u64 %rd1, %pm7_64": (rd(1), Special("%pm7_64")),
    "mov.u32 %r1, %reserved_smem_offset_cap": (r(1), Special("%reserved_smem_offset_cap")),
    "mov.pred %p1, %is_explicit_cluster": (p(1), Special("%is_explicit_cluster")),
    # Constants.
    "mov.u32 %r1, 17": (r(1), i(17)),
    "mov.u32 %r1, 17U": (r(1), i(17)),
    "mov.u32 %r1, 0x1Ff": (r(1), i(0x1FF)),
    "mov.u32 %r1, 0X3340U": (r(1), i(0x3340)),
    "mov.u32 %r1, 0b101": (r(1), i(5)),
    "mov.u32 %r1, 0B11U": (r(1), i(3)),
    "mov.u32 %r1, 017": (r(1), i(15)),
    "mov.u32 %r1, 0": (r(1), i(0)),
    "mov.u32 %r1, -1": (r(1), i(-1)),
    "mov.u32 %r1, - 1": (r(1), i(-1)),
    "mov.u32 %r1, --1": (r(1), i(1)),
    "mov.u64 %rd1, 0xffffffffffffffff": (rd(1), i(2**64 - 1)),
    "mov.u64 %rd1, -9223372036854775808": (rd(1), i(-(2**63) % 2**64)),
    "mov.u64 %rd1, -1U": (rd(1), i(2**64 - 1)),
    "mov.u32 %r1, WARP_SZ": (r(1), i(32)),
    "mov.u32 %r1, -WARP_SZ": (r(1), i(-32)),
    "mov.f32 %f1, 0f3F800000": (f(1), Immediate(0x3F800000, "f32")),
    "mov.f32 %f1, 0Fbf800000": (f(1), Immediate(0xBF800000, "f32")),
    "mov.b32 %r1, 0f7FC00000": (r(1), Immediate(0x7FC00000, "f32")),
    "mov.f64 %fd1, 0d3FF0000000000000": (fd(1), Immediate(0x3FF0000000000000, "f64")),
    "mov.f64 %fd1, -0D3FF0000000000000": (fd(1), Immediate(0xBFF0000000000000, "f64")),
    "mov.f32 %f1, 1.5": (f(1), Immediate(0x3FF8000000000000, "f64")),
    "mov.f32 %f1, 1.": (f(1), Immediate(0x3FF0000000000000, "f64")),
    "mov.f32 %f1, .5": (f(1), Immediate(0x3FE0000000000000, "f64")),
    "mov.f32 %f1, 5e-1": (f(1), Immediate(0x3FE0000000000000, "f64")),
    "mov.f32 %f1, .5E+1": (f(1), Immediate(0x4014000000000000, "f64")),
    "mov.f32 %f1, -1.5": (f(1), Immediate(0xBFF8000000000000, "f64")),
    "mov.f32 %f1, -(1.5+0.5)*2.0/4.0": (f(1), Immediate(0xBFF0000000000000, "f64")),
    # Constant expressions.
    "mov.u32 %r1, 4+8*2": (r(1), i(20)),
    "mov.u32 %r1, (4+8)*2": (r(1), i(24)),
    "mov.u32 %r1, 4|8^1&3": (r(1), i(13)),
    "mov.u32 %r1, 1<<4-1": (r(1), i(8)),
    "mov.u32 %r1, -7/2": (r(1), i(-3)),
    "mov.u32 %r1, -7 % 2": (r(1), i(1)),
    "mov.u32 %r1, 7/-2": (r(1), i(-3)),
    "mov.u32 %r1, ~5": (r(1), i(2**64 - 6)),
    "mov.u32 %r1, !5+!0": (r(1), i(1)),
    "mov.u32 %r1, (1 < 2) + (2 <= 1) + (3 == 3) + (3 != 3)": (r(1), i(2)),
    "mov.u32 %r1, -1 < 1U": (r(1), i(0)),
    "mov.u32 %r1, -1 >> 1": (r(1), i(-1)),
    "mov.u64 %rd1, -1U >> 1": (rd(1), i(2**63 - 1)),
    "mov.u64 %rd1, (.u64)-1 / 2": (rd(1), i(2**63 - 1)),
    "mov.u64 %rd1, (.s64)0xffffffffffffffff / 2": (rd(1), i(0)),
    "mov.u32 %r1, 0 ? 2 : 1 ? WARP_SZ : 4": (r(1), i(32)),
    "mov.u32 %r1, 1 && 0 || 2 > 1": (r(1), i(1)),
    # Symbols.
    "mov.u64 %rd1, counter": (rd(1), Symbol("counter")),
    "mov.u64 %rd1, bytes+16": (rd(1), Symbol("bytes", 16)),
    "mov.u64 %rd1, bytes + 2*4 + -4": (rd(1), Symbol("bytes", 4)),
    "mov.u64 %rd1, map": (rd(1), Symbol("map")),
    "mov.u64 %rd1, nothing": (rd(1), Symbol("nothing")),
    # Addresses.
    "ld.global.b32 %r1, [%rd1]": (r(1), Address(rd(1))),
    "ld.global.b32 %r1, [ %rd1 + 8 ]": (r(1), Address(rd(1), 8)),
    "ld.global.b32 %r1, [%rd1+-8]": (r(1), Address(rd(1), -8)),
    "ld.global.b32 %r1, [%rd1+4+4*2]": (r(1), Address(rd(1), 12)),
    "ld.global.b32 %r1, [%rd1+0x10]": (r(1), Address(rd(1), 16)),
    "ld.global.b32 %r1, [counter]": (r(1), Address(Symbol("counter"))),
    "ld.global.b32 %r1, [bytes+4]": (r(1), Address(Symbol("bytes"), 4)),
    "ld.param.b64 %rd1, [pointer]": (rd(1), Address(Symbol("pointer"))),
    "ld.local.b32 %r1, [1024]": (r(1), Address(None, 1024)),
    "ld.local.b32 %r1, [1024+8]": (r(1), Address(None, 1032)),
    # Vectors, pairs, sinks, negation.
    "ld.global.v2.b32 {%r1, %r2}, [%rd1]": (Vector((r(1), r(2))), Address(rd(1))),
    "st.global.v4.b32 [%rd1], {1, %r2, -3, %r4}": (
        Address(rd(1)),
        Vector((i(1), r(2), i(-3), r(4))),
    ),
    "mov.b64 {%r1, _}, %rd1": (Vector((r(1), Sink())), rd(1)),
    "mov.b64 %rd1, {%r1, 1+4}": (rd(1), Vector((r(1), i(5)))),
    "setp.lt.and.f32 %p1|%p2, %f1, %f2, !%p3": (
        Pair(p(1), p(2)),
        f(1),
        f(2),
        Negated(p(3)),
    ),
    "setp.eq.u32 %p1|_, %r1, %r2": (Pair(p(1), Sink()), r(1), r(2)),
    "shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, -1": (
        Pair(r(1), p(1)),
        r(2),
        i(16),
        i(31),
        i(-1),
    ),
    "elect.sync _|%p1, 0xffffffff": (Pair(Sink(), p(1)), i(0xFFFFFFFF)),
    "mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1], 128": (
        Sink(),
        Address(r(1)),
        i(128),
    ),
    # Tensor copies.
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster [%r1], [%rd1, {%r2, %r3}], [%r4], %h1": (
        Address(r(1)),
        Address(rd(1), 0, (r(2), r(3))),
        Address(r(4)),
        h(1),
    ),
    "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
    " [%r1], [%rd1, {%r2, 0, %r3}], [%r4], {%h1}": (
        Address(r(1)),
        Address(rd(1), 0, (r(2), i(0), r(3))),
        Address(r(4)),
        Vector((h(1),)),
    ),
    "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%rd1, {%r2}], [dynamic+16]": (
        Address(rd(1), 0, (r(2),)),
        Address(Symbol("dynamic"), 16),
    ),
    # No operands.
    "bar.warp.sync -1": (i(-1),),
    "membar.gl": (),
}


@pytest.mark.parametrize("text", OPERANDS)
def test_operands(text: str):
    parsed = instruction(text + ";")
    assert parsed.operands == OPERANDS[text]
    assert parsed.text == " ".join(text.split())
    name = text.split()[0]
    assert parsed.name == name
    assert (parsed.opcode, *parsed.modifiers) == tuple(name.split("."))


def test_ptxas_accepts_the_operands(tmp_path):
    assemble(kernel_text("\n".join(f"{text};" for text in OPERANDS)), tmp_path)


def test_coordinates_may_be_followed_by_more_operands():
    parsed = instruction("tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f1, %f2}, %r1];")
    assert parsed.operands[1] == Address(rd(1), 0, (f(1), f(2)), (r(1),))


@pytest.mark.parametrize(
    "name, modifiers",
    [
        ("max.NaN.f32", ("NaN", "f32")),
        (
            "ld.global.L1::evict_last.L2::cache_hint.b32",
            ("global", "L1::evict_last", "L2::cache_hint", "b32"),
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
            ("sync", "aligned", "m16n8k16", "row", "col", "f32", "f16", "f16", "f32"),
        ),
        ("tcgen05.ld.sync.aligned.16x64b.x1.b32", ("ld", "sync", "aligned", "16x64b", "x1", "b32")),
        ("mov .u32", ("u32",)),
    ],
)
def test_names_of_instructions(name: str, modifiers: tuple[str, ...]):
    parsed = instruction(f"{name} %r1, %r2;")
    assert parsed.modifiers == modifiers
    assert (parsed.opcode, parsed.operands) == (name.split(".")[0].strip(), (r(1), r(2)))


@pytest.mark.parametrize(
    "guard, predicate, negated",
    [("", None, False), ("@%p1 ", p(1), False), ("@!%p1 ", p(1), True), ("@ ! %p1\n", p(1), True)],
)
def test_guards(guard: str, predicate: Register | None, negated: bool):
    parsed = instruction(f"{guard}mov.u32 %r1, 5;")
    assert (parsed.predicate, parsed.predicate_negated) == (predicate, negated)
    assert parsed.text == "mov.u32 %r1, 5"


def test_positions_and_text_of_instructions():
    text = HEADER + (
        ".visible .entry k() {\n"
        "\t.reg .b32 a; mov.u32 a, 1; @%p bra\tL;\n"
        "  .reg .pred q;\n"
        "L: add.u32 a, // sum\n"
        "     /* two\n lines */ a,   2;\n"
        "}"
    ).replace("@%p bra\tL;", "bra\tL;")
    body = parse(text).functions[0].body
    assert body is not None
    assert [one.position for one in body] == [
        Position(5, 15),
        Position(5, 29),
        Position(7, 1),
        Position(7, 4),
    ]
    assert [one.text for one in body if isinstance(one, Instruction)] == [
        "mov.u32 a, 1",
        "bra L",
        "add.u32 a, a, 2",
    ]


# Branches and calls -------------------------------------------------------------------------------


def test_branches_forward_and_backward():
    first, label, second, last = statements("bra.uni $L__1; $L__1: @%p1 bra done; done:")
    assert isinstance(first, Instruction) and isinstance(second, Instruction)
    assert first.operands == (Symbol("$L__1"),) and first.modifiers == ("uni",)
    assert isinstance(label, Label) and label.name == "$L__1"
    assert second.operands == (Symbol("done"),)
    assert isinstance(last, Label) and last.name == "done"


def test_indexed_branch(tmp_path):
    text = "table: .branchtargets\n\tA,\n\tB;\nbrx.idx.uni %r1, table; A: B:"
    targets, branch, *_ = statements(text)
    assert isinstance(targets, BranchTargets) and isinstance(branch, Instruction)
    assert (targets.name, targets.labels) == ("table", ("A", "B"))
    assert branch.operands == (r(1), Symbol("table"))
    assemble(kernel_text(text), tmp_path)


CALLS: dict[str, tuple] = {
    "call nothing": (Symbol("nothing"),),
    "call nothing, ()": (Symbol("nothing"), Arguments(())),
    "call.uni (%r1), add_two, (%r2, 5)": (
        Arguments((r(1),)),
        Symbol("add_two"),
        Arguments((r(2), i(5))),
    ),
    "call (_), add_two, (%r2, %r3)": (
        Arguments((Sink(),)),
        Symbol("add_two"),
        Arguments((r(2), r(3))),
    ),
    "call (result), vprintf, (format, values)": (
        Arguments((Symbol("result"),)),
        Symbol("vprintf"),
        Arguments((Symbol("format"), Symbol("values"))),
    ),
    "call (%r1), %rd1, (%r2, %r3), prototype": (
        Arguments((r(1),)),
        rd(1),
        Arguments((r(2), r(3))),
        Symbol("prototype"),
    ),
    "call (%r1), %rd1, (%r2, %r3), targets": (
        Arguments((r(1),)),
        rd(1),
        Arguments((r(2), r(3))),
        Symbol("targets"),
    ),
    "call (%r1), %rd1, (%r2, %r3), callees": (
        Arguments((r(1),)),
        rd(1),
        Arguments((r(2), r(3))),
        Symbol("callees"),
    ),
    "call %rd1, nullary": (rd(1), Symbol("nullary")),
}
CALL_DECLARATIONS = """
.param .b32 result; .param .b64 format; .param .b64 values;
prototype: .callprototype (.reg .b32 _) _ (.reg .b32 _, .reg .b32 y);
nullary: .callprototype _ () .noreturn;
blocks: .callprototype (.param .align 8 .b8 _[16]) _ (.param .b64 _, .param .align 4 .b8 _[12]);
targets: .calltargets add_two;
"""


@pytest.mark.parametrize("text", CALLS)
def test_calls(text: str):
    assert instruction(f"{CALL_DECLARATIONS}{text};").operands == CALLS[text]


def test_ptxas_accepts_the_calls(tmp_path):
    calls = "\n".join(f"{text};" for text in CALLS)
    assemble(kernel_text(CALL_DECLARATIONS + calls), tmp_path, "sm_90a", "-c")


# Scopes -------------------------------------------------------------------------------------------


def test_scopes_of_inline_assembly():
    wait = """
    { .reg .pred complete;
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], %r2;
    @!complete bra WAIT; }
    """
    parsed = kernel(wait + "WAIT: bra WAIT;" + wait)
    assert parsed.body is not None
    names = [one.name for one in parsed.registers if not one.name.startswith("%")]
    assert names == ["complete", "complete#1"]
    branches = [
        (one.operands[0], one.predicate and one.predicate.name)
        for one in parsed.body
        if isinstance(one, Instruction) and one.opcode == "bra"
    ]
    labels = [one.name for one in parsed.body if isinstance(one, Label)]
    # Labels of the outer scope are declared first, as they can be seen from everywhere in it.
    assert labels == ["WAIT#1", "WAIT", "WAIT#2"]
    assert branches == [
        (Symbol("WAIT#1"), "complete"),
        (Symbol("WAIT"), None),
        (Symbol("WAIT#2"), "complete#1"),
    ]


def test_names_hide_outer_ones_until_the_scope_ends():
    parsed = kernel("""
    .reg .b32 x; mov.u32 x, 0;
    { .reg .f32 x; mov.f32 x, 1.0; { mov.f32 x, 2.0; .reg .b64 x; mov.u64 x, 3; } mov.f32 x, 4.0; }
    mov.u32 x, 5;
    """)
    assert parsed.body is not None
    used = [one.operands[0] for one in parsed.body[:-1] if isinstance(one, Instruction)]
    x, x1, x2 = Register("x", "b32"), Register("x#1", "f32"), Register("x#2", "b64")
    assert used == [x, x1, x1, x2, x1, x]


def test_a_branch_can_leave_a_scope():
    first, last = statements("{ bra out; } out:")
    assert isinstance(first, Instruction) and first.operands == (Symbol("out"),)


def test_parameters_of_calls_are_unique_in_the_function():
    call = """
    { // callseq 0, 0
    .param .b64 param0; .param .align 4 .b8 retval0[4];
    st.param.b64 [param0], %rd1;
    call.uni (retval0), vprintf, (param0, param0);
    ld.param.b32 %r1, [retval0+0];
    } // callseq 0
    """
    parsed = kernel(call + call)
    assert [(one.name, one.space, one.type, one.bytes) for one in parsed.variables] == [
        ("param0", "param", "b64", 8),
        ("retval0", "param", "b8", 4),
        ("param0#1", "param", "b64", 8),
        ("retval0#1", "param", "b8", 4),
    ]
    assert parsed.body is not None
    last = parsed.body[-2]
    assert isinstance(last, Instruction)
    assert last.operands == (r(1), Address(Symbol("retval0#1")))


def test_variables_of_functions_are_unique_in_the_module():
    module = parse(
        HEADER
        + """.global .b32 x; .global .b32 y;
        .func f(.param .b32 y) { .shared .b32 x; .local .b32 d; .reg .b64 a; mov.u64 a, x; ret; }
        .func g() {
        .shared .b32 x; .local .b32 d; .reg .b64 a; mov.u64 a, x; mov.u64 a, y; ret; }
        .func h(.param .b32 z) { { .shared .b32 z; .reg .b64 a; mov.u64 a, z; } ret; }
        .func i() { .param .b32 y; .reg .b64 a; mov.u64 a, y; ret; }
        """
    )
    variables = [[(one.name, one.space) for one in each.variables] for each in module.functions]
    assert variables == [
        [("x#1", "shared"), ("d", "local")],
        [("x#2", "shared"), ("d#1", "local")],
        [("z#1", "shared")],
        [("y#1", "param")],
    ]
    used = [
        [
            one.operands[1]
            for one in each.body or ()
            if isinstance(one, Instruction) and one.opcode == "mov"
        ]
        for each in module.functions
    ]
    assert used == [
        [Symbol("x#1")],
        [Symbol("x#2"), Symbol("y")],
        [Symbol("z#1")],
        [Symbol("y#1")],
    ]


def test_registers_hide_functions_and_variables():
    (parsed,) = statements(".reg .b32 counter, nothing; mov.u32 counter, nothing;")
    assert isinstance(parsed, Instruction)
    assert parsed.operands == (Register("counter", "b32"), Register("nothing", "b32"))


# Registers ----------------------------------------------------------------------------------------


def test_declarations_of_registers():
    parsed = parse(
        HEADER + ".entry k() { .reg .b32 a, b<2>, %r<0>; .reg .f16x2 %h; .reg .pred p, q; ret; }"
    ).functions[0]
    assert parsed.registers == (
        Register("a", "b32"),
        Register("b0", "b32"),
        Register("b1", "b32"),
        Register("%h", "f16x2"),
        Register("p", "pred"),
        Register("q", "pred"),
    )


def test_declared_registers_come_before_special_ones():
    (parsed,) = statements(".reg .b32 %laneid; mov.u32 %r1, %laneid;")
    assert isinstance(parsed, Instruction)
    assert parsed.operands == (r(1), Register("%laneid", "b32"))


def test_vector_registers_are_taken_apart(tmp_path):
    text = ".reg .v4 .b32 v, w<2>; ld.global.v4.b32 v, [%rd1]; add.u32 w1.x, v.y, v.a;"
    load, add = statements(text)
    assert isinstance(load, Instruction) and isinstance(add, Instruction)
    elements = tuple(Register(f"v.{part}", "b32") for part in "xyzw")
    assert load.operands == (Vector(elements), Address(rd(1)))
    assert add.operands == (Register("w1.x", "b32"), elements[1], elements[3])
    assemble(kernel_text(text), tmp_path)


# Comments and locations ---------------------------------------------------------------------------


def test_implicit_definitions():
    parsed = statements("""
    // implicit-def: %r5
    mov.u32 %r1, 1;  // implicit-def: %rd2
    // implicit-def: %nosuch
    mov.u32 %r2, // implicit-def: %r7
       2;
    /* implicit-def: %r8 */
    .loc 1 2 3
    // implicit-def: %p1
    """)
    assert [
        one.register if isinstance(one, ImplicitDefinition) else "instruction" for one in parsed
    ] == [r(5), "instruction", rd(2), "instruction", p(1)]
    assert isinstance(parsed[0], ImplicitDefinition) and parsed[0].position.column == 5


def test_locations():
    text = """
    .visible .entry first() {
    ret;
    .loc 1 10 5
    ret;
    .loc 2 20 0
    ret;
    .loc 1 0 0
    ret;
    .loc 1 30 7, function_name $name1, inlined_at 2 50 3
    ret;
    .loc 1 31 7, function_name $name0+4, inlined_at 2 50 3
    ret;
    .loc 7 1 1
    ret;
    }
    .visible .entry second() { ret; }
    .file 1 "/path/one.py"
    .file 2 "/path" "with \\"quotes\\" \\303\\251.py"
    .file 3 "three.py", 1600000000, 12345
    .section .debug_str {
    $name0: .b8 95,90,0
    $name1:
    .b8 102 // f
    .b8 111
    .b8 0x6f
    .b8 0
    }
    .section .debug_info { .b32 5 { } $L: .b64 .debug_str+4 }
    .section .debug_macinfo\t{\t}
    """
    module = parse(HEADER + text)
    first, second = (one.body or () for one in module.functions)
    inner = '/path/with "quotes" é.py'
    assert [one.location for one in first if isinstance(one, Instruction)] == [
        None,
        SourceLocation("/path/one.py", 10, 5),
        SourceLocation(inner, 20, 0),
        SourceLocation(inner, 20, 0),
        SourceLocation("/path/one.py", 30, 7, "foo"),
        SourceLocation("/path/one.py", 31, 7),
        None,
    ]
    assert [one.location for one in second if isinstance(one, Instruction)] == [None]
    assert module.files == {1: "/path/one.py", 2: inner, 3: "three.py"}


def test_the_same_text_gives_the_same_module():
    assert parse(kernel_text("")) is parse(kernel_text(""))
