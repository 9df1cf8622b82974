"""Instructions that other plugins give a meaning: how rules are found, bound and refused."""

from __future__ import annotations

import types

import numpy as np
import pytest
from simulator_support import run_elementwise

import pallasite
from pallasite import plugins
from pallasite_simulator.errors import PtxError
from pallasite_simulator.instruction_set import InstructionSet
from pallasite_simulator.types import TYPES

U32 = TYPES["u32"]


@pytest.fixture
def register():
    """Registers plugins with instructions for the test."""
    names = set()

    def add(name, instructions):
        @pallasite.hookimpl
        def pallasite_instructions():
            return instructions.rules

        plugin = types.SimpleNamespace(pallasite_instructions=pallasite_instructions)
        names.add(plugins.register(plugin, name))

    yield add
    for name in names:
        plugins.unregister(name)


def numbers(count=500):
    return np.random.default_rng(0).integers(0, 2**32, count, np.uint32)


def test_an_instruction_of_a_plugin(register):
    instructions = InstructionSet()

    @instructions.register("gray")
    def bind_gray(instruction, binder):
        binder.only_modifiers()
        return binder.elementwise(lambda a: a ^ (a >> np.uint32(1)), U32, U32)

    x = numbers()
    with pytest.raises(PtxError, match="does not know this instruction, in: gray.b32"):
        run_elementwise("gray.b32 {d}, {a};", [x], np.uint32)
    register("grays", instructions)
    np.testing.assert_array_equal(
        run_elementwise("gray.b32 {d}, {a};", [x], np.uint32), x ^ (x >> 1)
    )
    with pytest.raises(PtxError, match=r"unknown modifier \.twice"):
        run_elementwise("gray.twice.b32 {d}, {a};", [x], np.uint32)
    with pytest.raises(PtxError, match="wrong number of operands"):
        run_elementwise("gray.b32 {d}, {a}, {a};", [x], np.uint32)


def test_the_longest_name_is_taken(register):
    instructions = InstructionSet()

    @instructions.register("gray")
    def bind_any(instruction, binder):
        return binder.elementwise(lambda a: a + np.uint32(1), U32, U32)

    @instructions.register("gray.inverse.fast")
    def bind_special(instruction, binder):
        return binder.elementwise(lambda a: a + np.uint32(2), U32, U32)

    register("grays", instructions)
    x = numbers()
    for name, added in (("gray", 1), ("gray.inverse", 1), ("gray.inverse.fast", 2)):
        result = run_elementwise(f"{name}.b32 {{d}}, {{a}};", [x], np.uint32)
        np.testing.assert_array_equal(result, x + np.uint32(added))


def test_two_plugins_with_one_instruction(register):
    def instructions(added, overrides=()):
        found = InstructionSet()

        @found.register("gray", overrides=overrides)
        def bind(instruction, binder):
            return binder.elementwise(lambda a: a + np.uint32(added), U32, U32)

        return found

    x = numbers()
    register("first", instructions(1))
    register("second", instructions(2))
    with pytest.raises(pallasite.PluginError) as error:
        run_elementwise("gray.b32 {d}, {a};", [x], np.uint32)
    assert "'gray'" in str(error.value)
    assert "first" in str(error.value) and "second" in str(error.value)
    plugins.unregister("second")
    register("second", instructions(2, overrides=("first",)))
    result = run_elementwise("gray.b32 {d}, {a};", [x], np.uint32)
    np.testing.assert_array_equal(result, x + np.uint32(2))


def test_replacing_an_instruction_of_the_simulator(register):
    instructions = InstructionSet()

    @instructions.register("popc", overrides=("simulator",))
    def bind(instruction, binder):
        return binder.elementwise(lambda a: a * np.uint32(0), U32, U32)

    register("zeros", instructions)
    assert not run_elementwise("popc.b32 {d}, {a};", [numbers()], np.uint32).any()


def test_lanes_that_need_their_warp(register):
    instructions = InstructionSet()

    @instructions.register("reverse.aligned", needs_warp=True)
    def bind(instruction, binder):
        number = binder.program.register(binder.operand(1))
        write = binder.destination(0, U32)

        def step(lanes):
            assert lanes.whole_warps
            write(lanes, lanes.registers[number][lanes.numbers ^ 31])

        return step

    register("reverses", instructions)
    x = numbers(512)
    code = """
        .reg .pred %p;
        setp.lt.u32 %p, {a}, 0x80000000;
        @%p bra LOW;
        add.u32 {a}, {a}, 1;
    LOW:
        reverse.aligned.b32 {d}, {a};
    """
    result = run_elementwise(code, [x], np.uint32)
    changed = np.where(x < 0x80000000, x, x + np.uint32(1))
    np.testing.assert_array_equal(result, changed.reshape(-1, 32)[:, ::-1].reshape(-1))
