"""Structured control flow: numeric results on the host, and the blocks that are emitted."""

from __future__ import annotations

import numpy as np
import pytest
from codegen_support import call_host, check, kernel, parse, to_llvm, to_ptx

from pallasite.codegen.llvm_ir import translate

SUM = """
llvm.func @f(%n: i32, %x: f32) -> f32 {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %z = arith.constant 0.0 : f32
  %one = arith.constant 1.0 : f32
  %s, %p = scf.for %i = %c0 to %n step %c1 iter_args(%a = %z, %b = %one) -> (f32, f32) : i32 {
    %k = arith.sitofp %i : i32 to f32
    %u = arith.mulf %b, %k : f32
    %v = arith.addf %a, %u : f32
    %w = arith.mulf %b, %x : f32
    scf.yield %v, %w : f32, f32
  }
  %r = arith.addf %s, %p : f32
  llvm.return %r : f32
}"""


@pytest.mark.parametrize("count", [0, 1, 2, 9, -3])
def test_for_with_carried_values(count):
    x = np.float32(1.25)
    a, b = np.float32(0), np.float32(1)
    for i in range(count):
        a, b = a + b * np.float32(i), b * x
    assert call_host(SUM, "f32", ("i32", count), ("f32", x)) == a + b


def test_swapped_carried_values():
    source = """
    llvm.func @f(%n: i32) -> i32 {
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %a, %b = scf.for %i = %c0 to %n step %c1 iter_args(%x = %c0, %y = %c1) -> (i32, i32) : i32 {
        %s = arith.addi %x, %y : i32
        scf.yield %y, %s : i32, i32
      }
      llvm.return %a : i32
    }"""
    assert [call_host(source, "i32", ("i32", n)) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]


def test_for_with_steps_and_unsigned_bounds():
    source = """
    llvm.func @f(%lo: i32, %hi: i32, %step: i32) -> i32 {
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %r = scf.for KIND %i = %lo to %hi step %step iter_args(%x = %c0) -> (i32) : i32 {
        %s = arith.addi %x, %c1 : i32
        scf.yield %s : i32
      }
      llvm.return %r : i32
    }"""
    bounds = [("i32", -7), ("i32", 8), ("i32", 4)]
    assert call_host(source.replace("KIND", ""), "i32", *bounds) == 4
    assert call_host(source.replace("KIND", "unsigned"), "i32", *bounds) == 0


def test_while():
    source = """
    llvm.func @f(%n: i64) -> i64 {
      %c0 = arith.constant 0 : i64
      %c1 = arith.constant 1 : i64
      %c2 = arith.constant 2 : i64
      %c3 = arith.constant 3 : i64
      %r:2 = scf.while (%x = %n, %k = %c0) : (i64, i64) -> (i64, i64) {
        %more = arith.cmpi ne, %x, %c1 : i64
        scf.condition(%more) %x, %k : i64, i64
      } do {
      ^bb0(%x: i64, %k: i64):
        %odd = arith.remui %x, %c2 : i64
        %is = arith.trunci %odd : i64 to i1
        %next = scf.if %is -> i64 {
          %u = arith.muli %x, %c3 : i64
          %v = arith.addi %u, %c1 : i64
          scf.yield %v : i64
        } else {
          %h = arith.divui %x, %c2 : i64
          scf.yield %h : i64
        }
        %k1 = arith.addi %k, %c1 : i64
        scf.yield %next, %k1 : i64, i64
      }
      llvm.return %r#1 : i64
    }"""

    def collatz(x):
        steps = 0
        while x != 1:
            x = 3 * x + 1 if x % 2 else x // 2
            steps += 1
        return steps

    for n in (1, 2, 7, 27):
        assert call_host(source, "i64", ("i64", n)) == collatz(n)


def test_while_forwards_other_values_than_it_carries():
    source = """
    llvm.func @f(%n: i32) -> f32 {
      %r = scf.while (%x = %n) : (i32) -> f32 {
        %c10 = arith.constant 10 : i32
        %more = arith.cmpi slt, %x, %c10 : i32
        %f = arith.sitofp %x : i32 to f32
        scf.condition(%more) %f : f32
      } do {
      ^bb0(%f: f32):
        %g = arith.addf %f, %f : f32
        %i = arith.fptosi %g : f32 to i32
        scf.yield %i : i32
      }
      llvm.return %r : f32
    }"""
    assert call_host(source, "f32", ("i32", 3)) == 12.0


def test_if_without_results_and_without_else():
    source = """
    llvm.func @f(%n: i32) -> i32 {
      %c1 = arith.constant 1 : i64
      %c5 = arith.constant 5 : i32
      %p = llvm.alloca %c1 x i32 : (i64) -> !llvm.ptr
      llvm.store %n, %p : i32, !llvm.ptr
      %c = arith.cmpi sgt, %n, %c5 : i32
      scf.if %c {
        llvm.store %c5, %p : i32, !llvm.ptr
      }
      %r = llvm.load %p : !llvm.ptr -> i32
      llvm.return %r : i32
    }"""
    assert [call_host(source, "i32", ("i32", n)) for n in (3, 9)] == [3, 5]


def test_index_switch():
    source = """
    llvm.func @f(%n: i32) -> i32 {
      %i = arith.index_cast %n : i32 to index
      %r = scf.index_switch %i -> i32
      case 2 { %a = arith.constant 20 : i32
               scf.yield %a : i32 }
      case 5 { %b = arith.muli %n, %n : i32
               scf.yield %b : i32 }
      default { %c = arith.constant -1 : i32
                scf.yield %c : i32 }
      llvm.return %r : i32
    }"""
    assert [call_host(source, "i32", ("i32", n)) for n in (2, 5, 0, -2)] == [20, 25, -1, -1]


def test_execute_region_with_blocks():
    source = """
    llvm.func @f(%n: i32) -> i32 {
      %c0 = arith.constant 0 : i32
      %c = arith.cmpi slt, %n, %c0 : i32
      %r = scf.execute_region -> i32 {
        llvm.cond_br %c, ^bb1, ^bb2(%n : i32)
      ^bb1:
        %m = arith.subi %c0, %n : i32
        llvm.br ^bb2(%m : i32)
      ^bb2(%x: i32):
        scf.yield %x : i32
      }
      llvm.return %r : i32
    }"""
    assert [call_host(source, "i32", ("i32", n)) for n in (4, -4)] == [4, 4]


def test_function_with_several_returns():
    source = """
    llvm.func @f(%n: i32) -> i32 {
      %c0 = arith.constant 0 : i32
      %c = arith.cmpi slt, %n, %c0 : i32
      llvm.cond_br %c, ^bb1, ^bb2
    ^bb1:
      llvm.return %c0 : i32
    ^bb2:
      llvm.return %n : i32
    }"""
    assert [call_host(source, "i32", ("i32", n)) for n in (4, -4)] == [4, 0]


def test_nested_loops_and_branches():
    source = """
    llvm.func @f(%n: i32) -> i32 {
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %c2 = arith.constant 2 : i32
      %r = scf.for %i = %c0 to %n step %c1 iter_args(%x = %c0) -> (i32) : i32 {
        %y = scf.for %j = %c0 to %i step %c1 iter_args(%z = %x) -> (i32) : i32 {
          %m = arith.remsi %j, %c2 : i32
          %e = arith.cmpi eq, %m, %c0 : i32
          %q = scf.if %e -> i32 {
            %s = arith.addi %z, %i : i32
            scf.yield %s : i32
          } else {
            %t = scf.if %e -> i32 { scf.yield %c1 : i32 } else { scf.yield %j : i32 }
            %s = arith.subi %z, %t : i32
            scf.yield %s : i32
          }
          scf.yield %q : i32
        }
        scf.yield %y : i32
      }
      llvm.return %r : i32
    }"""
    expected = 0
    for i in range(9):
        for j in range(i):
            expected += i if j % 2 == 0 else -j
    assert call_host(source, "i32", ("i32", 9)) == expected


def test_blocks_of_a_loop():
    check(
        to_llvm(SUM),
        """CHECK: entry:
        CHECK-NEXT: br label %[[HEAD:b[0-9]+]]
        CHECK-NEXT: [[HEAD]]:
        CHECK-NEXT: %0 = phi i32 [ 0, %entry ], [ %[[NEXT:[0-9]+]], %[[BODY:b[0-9]+]] ]
        CHECK-NEXT: %1 = phi float [ 0.000000e+00, %entry ]
        CHECK-NEXT: %2 = phi float
        CHECK-NEXT: %3 = icmp slt i32 %0, %a0
        CHECK-NEXT: br i1 %3, label %[[BODY]], label %[[EXIT:b[0-9]+]]
        CHECK: %[[NEXT]] = add nsw i32 %0, 1
        CHECK-NEXT: br label %[[HEAD]]
        CHECK-NEXT: [[EXIT]]:""",
    )


def test_unroll_attribute():
    source = kernel(
        """%c0 = arith.constant 0 : i32
        %c1 = arith.constant 1 : i32
        scf.for %i = %c0 to %n step %c1 : i32 {
          %v = llvm.load volatile %p : !llvm.ptr<1> -> f32
        } {unroll = FACTOR : i32}""",
        "%n: i32, %p: !llvm.ptr<1>",
    )
    for factor, metadata in (("0", "unroll.full"), ("1", "unroll.disable"), ("4", "unroll.count")):
        text = source.replace("FACTOR", factor)
        assert f"llvm.loop.{metadata}" in to_llvm(text)
        to_ptx(text)


def test_loops_that_contain_barriers_are_kept():
    source = kernel(
        """%c0 = arith.constant 0 : i32
        %c1 = arith.constant 1 : i32
        scf.for %i = %c0 to %n step %c1 : i32 {
          %odd = arith.trunci %i : i32 to i1
          scf.if %odd { llvm.inline_asm has_side_effects "nanosleep.u32 1;", "" : () -> () }
          llvm.inline_asm has_side_effects "bar.sync 0;", "~{memory}" : () -> ()
        }""",
        "%n: i32",
    )
    text = to_ptx(source)
    assert text.count("bar.sync 0;") == 1
    assert "convergent" in to_llvm(source)


def test_translation_is_deterministic():
    module = parse(SUM)
    assert translate(module) == translate(module) == translate(parse(SUM))
