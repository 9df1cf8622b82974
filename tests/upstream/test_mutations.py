"""Each rule of tensor memory's semantics matters: broken on purpose, a program of JAX's compiler
gives wrong numbers or an error."""

from __future__ import annotations

import dataclasses

import jax_programs
import numpy as np
import pytest
from replay import replay

from pallasite_blackwell.simulation import (
    completion,
    copies,
    factors,
    formats,
    launch_control,
    matrix_descriptors,
    moves,
    multiplication,
    sparsity,
    tensor_memory,
)
from pallasite_simulator.errors import SimulationError


def placed(**changes):
    """Another placement of D."""

    def change(original):
        def function(*arguments):
            found = original(*arguments)
            return dataclasses.replace(found, **{n: f(found) for n, f in changes.items()})

        return function

    return change


def descriptor(function):
    """Another reading of matrix descriptors."""

    def change(original):
        return lambda held, tile: original(function(held), tile)

    return change


def shaped(**changes):
    """Another reading of instruction descriptors."""

    def change(original):
        def function(*arguments):
            found = original(*arguments)
            return dataclasses.replace(found, **{n: f(found) for n, f in changes.items()})

        return function

    return change


def given(**changes):
    """Other operands."""

    def change(original):
        def run(self, lanes, arguments):
            original(self, lanes, [dataclasses.replace(one, **changes) for one in arguments])

        return run

    return change


def fields_swapped(held):
    """The leading and the stride offset."""
    low, high = held >> 16 & 0x3FFF, held >> 32 & 0x3FFF
    return held & ~(0x3FFF << 16 | 0x3FFF << 32) | high << 16 | low << 32


def result(function):
    """Another result."""
    return lambda original: lambda *arguments: function(original(*arguments))


def argument(number, function):
    """Another argument."""

    def change(original):
        def call(*arguments):
            changed = list(arguments)
            changed[number] = function(changed[number])
            return original(*changed)

        return call

    return change


def always(value):
    return lambda original: lambda *arguments, **options: value


def always_property(value):
    return lambda original: property(lambda self: value)


def without_multicast(original):
    def blocks(lanes, masks, instruction):
        return [one[:1] for one in original(lanes, masks, instruction)]

    return blocks


def transposed_pairs(original):
    def places(form):
        lanes, columns = original(form)
        return lanes, columns ^ 1

    return places


def neighbour(original):
    def places(form):
        lanes, columns = original(form)
        return lanes ^ 1, columns

    return places


def unpacked(original):
    return lambda memory, cells, half: original(memory, cells, False)


MUTATIONS = {
    # Placement of D, and of the operands of pairs.
    "D upside down": ("f16", multiplication, "placement", placed(lanes=lambda p: p.lanes[:, ::-1])),
    "64 rows side by side": (
        "f16 of 64 rows", multiplication, "placement",
        placed(lanes=lambda p: np.arange(64)[None]),
    ),
    "blocks of a pair exchanged": (
        "a pair, 256 rows", tensor_memory.TensorMemory, "blocks", result(lambda one: one[::-1]),
    ),
    "columns of a pair not folded": (
        "a pair, 128 rows", multiplication, "placement", placed(lanes=lambda p: p.lanes[:1]),
    ),
    "halves of the columns exchanged": (
        "a pair, 128 rows", multiplication, "placement", placed(lanes=lambda p: p.lanes[::-1]),
    ),
    "the wrong peer": (
        "a pair, 256 rows", tensor_memory.TensorMemory, "peer", result(lambda one: one ^ 1),
    ),
    # Matrix descriptors.
    "leading and stride offset exchanged": (
        "f16", matrix_descriptors, "chunks", descriptor(fields_swapped),
    ),
    "no swizzle": (
        "f16", matrix_descriptors, "chunks", descriptor(lambda d: d & ~(7 << 61)),
    ),
    "a smaller swizzle": (
        "f16", matrix_descriptors, "chunks", descriptor(lambda d: d & ~(7 << 61) | 4 << 61),
    ),
    "a base offset": ("f16", matrix_descriptors, "chunks", descriptor(lambda d: d | 1 << 49)),
    "a later start": ("f16", matrix_descriptors, "chunks", descriptor(lambda d: d + 2)),
    "a longer stride": (
        "f16", matrix_descriptors, "chunks", descriptor(lambda d: d + (1 << 33)),
    ),
    # Instruction descriptors.
    "B across": ("f16", multiplication, "decode", shaped(k_major=lambda s: (True, False))),
    "A across": ("f16", multiplication, "decode", shaped(k_major=lambda s: (False, True))),
    "half of N": ("f16", multiplication, "decode", shaped(n=lambda s: s.n // 2)),
    "half of K": ("f16", multiplication, "decode", shaped(k=lambda s: s.k // 2)),
    "negated": ("f16", multiplication, "decode", shaped(negate=lambda s: True)),
    "another type of A": ("f16", multiplication, "decode", shaped(a=lambda s: "bf16")),
    "another type of B": ("e4m3", multiplication, "decode", shaped(b=lambda s: "e5m2")),
    "another type of D": ("f16 in f16", multiplication, "decode", shaped(d=lambda s: "f32")),
    "unsigned A": ("i8", multiplication, "decode", shaped(a=lambda s: "u8")),
    "the other type of scale factors": (
        "nvf4", multiplication, "decode", shaped(scale=lambda s: "ue8m0"),
    ),
    "the first scale factor of A": (
        "mxf8", multiplication, "decode", shaped(scale_ids=lambda s: (0, s.scale_ids[1])),
    ),
    "the first scale factor of B": (
        "mxf4", multiplication, "decode", shaped(scale_ids=lambda s: (s.scale_ids[0], 0)),
    ),
    "the first selector": ("sparse f16", multiplication, "decode", shaped(selector=lambda s: 0)),
    # Operands.
    "D is never added to": ("f16", multiplication.Multiplier, "run", given(keep=False)),
    "D is always added to": ("f16", multiplication.Multiplier, "run", given(keep=True)),
    "a lane is off": (
        "f16", multiplication.Multiplier, "run", given(disabled=(1 << 7, 0, 0, 0)),
    ),
    "D is scaled": ("f16", multiplication.Multiplier, "run", given(shift=1)),
    "a column counts as zeros": (
        "f16", multiplication.Multiplier, "run", given(mask=1 << 39),
    ),
    # Scale factors.
    "scale factors of other rows": (
        "mxf8", factors, "locate", argument(1, lambda rows: rows ^ 1),
    ),
    "scale factors of the first rows": (
        "nvf4", factors, "locate", argument(1, lambda rows: rows % 32),
    ),
    "one quarter of scale factors": (
        "mxf4", copies, "_write",
        argument(3, lambda form: dataclasses.replace(form, lanes=form.lanes[:, :1])),
    ),
    "scale factors later": ("mxf8", factors, "locate", argument(0, lambda one: one ^ 4)),
    # Sparse matrices.
    "metadata of the row above": (
        "sparse f16", sparsity, "locate", argument(2, lambda lanes: lanes ^ 8),
    ),
    "metadata of another row": (
        "sparse e5m2", sparsity, "locate", argument(2, lambda lanes: lanes ^ 1),
    ),
    "elements of a group exchanged": (
        "sparse pair", sparsity, "indices", result(lambda found: (found[0] ^ 1, found[1])),
    ),
    # Moves and copies.
    "columns of loads exchanged": ("f16", moves, "places", transposed_pairs),
    "lanes of loads exchanged": ("f16", moves, "places", neighbour),
    "halves of columns not packed": ("f16 in f16", moves, "_load", unpacked),
    "rows of copies elsewhere": (
        "sparse f16", copies, "_write",
        argument(3, lambda form: dataclasses.replace(form, lanes=form.lanes ^ 1)),
    ),
    "the next column of A": (
        "a from registers", multiplication._Product, "_cells", argument(3, lambda one: one ^ 1),
    ),
    "the smallest of a row": ("reducing", moves, "_reduce", argument(1, lambda one: "min")),
    "scale factors for half as many elements": (
        "sparse mxf8", multiplication.Multiplier, "block", always_property(16),
    ),
    "no signs": ("mxf4", formats, "table", result(np.abs)),
    # Synchronization and launch control.
    "commits reach one block only": (
        "a pair, 256 rows", completion, "multicast_blocks", without_multicast,
    ),
    "nothing is cancelled": (
        "cancelling", launch_control, "_response", always(np.zeros(16, np.uint8)),
    ),
    "another cluster is cancelled": (
        "cancelling", launch_control, "_response", argument(0, lambda one: one and one - 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation(name, monkeypatch):
    program, place, attribute, change = MUTATIONS[name]
    monkeypatch.setattr(place, attribute, change(getattr(place, attribute)))
    try:
        found, expected, _ = replay(program, mark=name)
    except SimulationError:
        return
    with pytest.raises(AssertionError):
        jax_programs.assert_right(jax_programs.PROGRAMS[program], found, expected)
