"""The hook ``pallasite_memory_spaces``: spaces of plugins, their resources and limits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import pickle
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slots_plugin
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jaxlib.mlir.dialects import arith

import pallasite
from pallasite import gpu as plgpu
from pallasite.cli import main
from pallasite.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingNameError,
    PluginError,
    ResourceError,
)
from pallasite.plugin import Resource, RuleSet, Semantics, hookimpl, manager
from pallasite.plugin.language import MemorySpace, SharedMemory
from pallasite.plugin.lowering import RegisterArray
from pallasite_simulator import simulate
from pallasite_std.api import CarriedValue
from pallasite_std.caching.kernel_text import canonical_parts

BOTH = pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics), ids=str)


@contextlib.contextmanager
def registered(plugin, name):
    manager().register(plugin, name)
    try:
        yield
    finally:
        manager().unregister(name)


@pytest.fixture
def slots():
    with registered(slots_plugin, "slots"):
        yield plgpu.SLOTS


def kernel_of(body, rows=2, semantics=plgpu.LoweringSemantics.Lane, **options):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, 128), jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        **options,
    )


def compiled(body, rows=2, target="sm_121a", **options):
    return pallasite.compile(kernel_of(body, rows, **options), array(rows), target=target)


def array(rows):
    return jax.ShapeDtypeStruct((rows, 128), jnp.float32)


def run(made, rows):
    x = np.random.default_rng(rows).standard_normal((rows, 128)).astype(np.float32)
    (out,) = simulate(made, x).outputs
    return x, out


# Names --------------------------------------------------------------------------------------------


def test_a_space_is_found_by_its_name(slots, capsys):
    assert slots is plgpu.MemorySpace.SLOTS is slots_plugin.SLOTS
    assert "SLOTS" in dir(plgpu) and slots in list(plgpu.MemorySpace)
    assert pickle.loads(pickle.dumps(slots)) is slots
    assert str(slots) == "slots" and repr(slots) == "<MemorySpace.SLOTS: 'slots'>"
    assert slots.like(array(3)).get_ref_aval().memory_space is slots
    assert main(["plugins", "--json"]) == 0
    (row,) = [
        one for one in json.loads(capsys.readouterr().out)["plugins"] if one["name"] == "slots"
    ]
    assert row["contributes"] == {"targets": ["sm_121a"], "memory spaces": ["SLOTS"]}


def test_without_the_plugin_there_is_no_such_space():
    with pytest.raises(MissingNameError, match="there is no memory space 'SLOTS'"):
        plgpu.MemorySpace.SLOTS  # noqa: B018
    with pytest.raises(MissingNameError, match="'SLOTS'"):
        plgpu.SLOTS  # noqa: B018


def test_two_plugins_with_a_space_of_one_name(slots):
    class Other:
        @hookimpl
        def pallasite_memory_spaces(self):
            return [slots_plugin.Slots()]

    with registered(Other(), "other"), pytest.raises(PluginError) as caught:
        manager().registry()
    assert "memory spaces named 'SLOTS'" in str(caught.value)
    assert "'slots'" in str(caught.value) and "'other'" in str(caught.value)


def test_a_hook_that_returns_something_else():
    class Wrong:
        @hookimpl
        def pallasite_memory_spaces(self):
            return ["SLOTS"]

    with (
        pytest.warns(UserWarning, match="an iterable of MemorySpace"),
        registered(Wrong(), "wrong"),
    ):
        manager().memory_spaces()


def test_arguments_are_those_of_the_space(slots):
    assert slots((2, 128), jnp.float32, zeroed=True).shape == (2, 128)
    with pytest.raises(InvalidTypeError, match="SLOTS.* takes no argument 'transforms'") as caught:
        slots((2, 128), jnp.float32, transforms=())
    assert "zeroed=" in str(caught.value)
    with pytest.raises(InvalidValueError, match="rows of 128 numbers"):
        slots((2, 64), jnp.float32)


# Access -------------------------------------------------------------------------------------------


def exchange(x_ref, out_ref, scratch):
    scratch[...] = x_ref[...]
    upper = scratch[2:4]
    scratch[2:4] = scratch[0:2]
    scratch[0:2] = upper
    scratch[1:3] += 1.0
    out_ref[...] = scratch[...]


@BOTH
def test_slots_are_read_and_written(slots, semantics):
    made = compiled(exchange, 4, semantics=semantics, scratch_types=[slots((4, 128), jnp.float32)])
    x, out = run(made, 4)
    expected = x[[2, 3, 0, 1]]
    expected[1:3] += 1
    np.testing.assert_array_equal(out, expected)
    # What inference loads in the layout of slots needs no conversion through shared memory.
    converted = made.launch.shared_memory_bytes > 4 * slots_plugin.SLOT_BYTES
    assert converted == (semantics is plgpu.LoweringSemantics.Lane)


@BOTH
def test_members_of_a_union_share_slots(slots, semantics):
    def body(x_ref, out_ref, union):
        whole, (first, second) = union
        first[...] = x_ref[0:1]
        second[...] = (x_ref[1:3] * 10).astype(jnp.int32)
        out_ref[0:1] = first[...]
        out_ref[1:3] = second[...].astype(jnp.float32)
        whole[...] = x_ref[0:2] + 1
        out_ref[3:5] = whole[...]

    union = plgpu.RefUnion(
        slots((2, 128), jnp.float32), (slots((1, 128), jnp.float32), slots((2, 128), jnp.int32))
    )
    made = compiled(body, 5, semantics=semantics, scratch_types=[union])
    x, out = run(made, 5)
    expected = np.concatenate([x[0:1], np.trunc(x[1:3] * 10), x[0:2] + 1])
    np.testing.assert_array_equal(out, expected)
    (used,) = made.resources.reserved
    assert used.amount == 4  # Three slots, granted as four.


def test_views_that_slots_do_not_have(slots):
    def transposed(x_ref, out_ref, scratch):
        out_ref[...] = plgpu.transpose_ref(scratch, (1, 0))[...].reshape(2, 128)

    with pytest.raises(InvalidValueError, match="slots are only indexed"):
        compiled(transposed, scratch_types=[slots((2, 128), jnp.float32)])

    def computed(x_ref, out_ref, scratch):
        out_ref[...] = scratch[pl.ds(pl.program_id(0) * 2, 2)]

    with pytest.raises(InvalidValueError, match="computed in the kernel") as caught:
        compiled(
            computed,
            semantics=plgpu.LoweringSemantics.Warpgroup,
            grid=(2,),
            grid_names=("i",),
            scratch_types=[slots((4, 128), jnp.float32)],
        )
    assert "test_hook_memory_spaces.py" in str(caught.value)


def test_how_slots_lie(slots, capsys):
    def body(x_ref, out_ref, scratch):
        plgpu.print_layout("here: {}", scratch.at[1:3])
        out_ref[...] = x_ref[...]

    compiled(body, scratch_types=[slots((4, 128), jnp.float32)])
    assert capsys.readouterr().out == "here: slots 1 to 2\n"


# Resources ----------------------------------------------------------------------------------------


def scopes(*rows, then=None):
    """One scope after the other, each with slots; ``then`` runs in each."""

    def body(x_ref, out_ref):
        for count in rows:

            def scope(scratch):
                scratch[0:2] = x_ref[...]
                if then is not None:
                    then(x_ref, out_ref)
                out_ref[...] = scratch[0:2]

            pl.run_scoped(scope, plgpu.SLOTS((count, 128), jnp.float32))

    return body


@pytest.mark.parametrize(
    ("body", "granted"),
    [
        (lambda: scopes(2), 2),
        (lambda: scopes(2, 3), 4),
        (lambda: scopes(2, then=scopes(4, 3)), 8),
    ],
    ids=["one", "sequence", "nested"],
)
def test_the_peak_over_scopes_is_reserved_once(slots, body, granted):
    made = compiled(body(), semantics=plgpu.LoweringSemantics.Warpgroup)
    (used,) = made.resources.reserved
    assert (used.name, used.unit, used.amount, used.limit) == ("slots", "slots", granted, 8)
    assert made.launch.shared_memory_bytes == granted * slots_plugin.SLOT_BYTES
    x, out = run(made, 2)
    np.testing.assert_array_equal(out, x)


def test_reports_list_the_resource(slots, capsys):
    from pallasite.cli.kernel_report import as_json, as_text

    made = compiled(scopes(3))
    assert as_json(made)["resources"]["reserved"] == {
        "slots": {"amount": 4, "limit": 8, "unit": "slots"}
    }
    text = as_text(made, "no assembler")
    assert re.search(r"^ *slots +4 of 8 slots$", text, re.MULTILINE)
    assert re.search(r"^ *slots +3 rows +3 +slots +0 ", text, re.MULTILINE)
    assert main(["targets", "sm_121a"]) == 0
    assert re.search(r"^ +8 +slots per block$", capsys.readouterr().out, re.MULTILINE)


def test_more_than_the_target_has(slots):
    with pytest.raises(ResourceError) as caught:
        compiled(scopes(5, then=scopes(4)))
    lines = str(caught.value).splitlines()
    assert "exceeds available slots: slots=16" in lines[0]
    line = f"test_hook_memory_spaces.py:{line_of()}"
    for rows, text in zip((5, 4), lines[1:3], strict=True):
        assert text.split()[:2] == [str(rows), "slots"] and line in text
        assert f"scratch: float32[{rows}, 128]" in text
    assert [text.strip() for text in lines[3:]] == [
        "expected: at most 8 slots per block on sm_121a",
        "try: fewer rows at a time",
    ]


def line_of():
    source = pathlib.Path(__file__).read_text().splitlines()
    return 1 + next(n for n, line in enumerate(source) if "plgpu.SLOTS((count, 128)" in line)


def test_a_target_without_the_resource(slots):
    with pytest.raises(ResourceError) as caught:
        compiled(scopes(2), target="sm_90")
    text = str(caught.value)
    assert "exceeds available slots: slots=2" in text
    assert "expected: a target that has slots; sm_90 has none" in text
    assert "try: compile for sm_121a" in text


# A part of shared memory --------------------------------------------------------------------------

STAGES = Resource("stages", unit="stages", hint="fewer stages")


class Stages(SharedMemory):
    """Shared memory whose first dimension is a number of stages, of which there are few."""

    name = "STAGES"

    def resources(self, ctx, variable, axes):
        stages = ctx.reserve(STAGES, variable.aval.shape[0], "stages")
        return super().resources(ctx, variable, axes) + stages


class StagesPlugin:
    @hookimpl
    def pallasite_memory_spaces(self):
        return [Stages()]


@BOTH
def test_a_part_of_shared_memory_is_used_like_shared_memory(semantics):
    def body(x_ref, out_ref, stage, barrier):
        plgpu.copy_gmem_to_smem(x_ref, stage.at[1], barrier)
        plgpu.barrier_wait(barrier)
        stage[0] = stage[1] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage.at[0], out_ref)
        plgpu.wait_smem_to_gmem(0)

    target = slots_plugin.TARGET
    with registered(StagesPlugin(), "stages"), registered(slots_plugin, "slots"):
        kernel = kernel_of(
            body,
            64,
            semantics,
            scratch_types=[plgpu.STAGES((2, 64, 128), jnp.float32), plgpu.Barrier()],
        )
        with pytest.raises(ResourceError, match="exceeds available stages: stages=2"):
            pallasite.compile(kernel, array(64), target=target.name)
        with registered(TargetWithStages(), "more"):
            made = pallasite.compile(kernel, array(64), target="sm_120")
    assert [one.amount for one in made.resources.reserved] == [2]
    assert made.resources.shared_memory_bytes == 2 * 64 * 128 * 4 + 8
    x, out = run(made, 64)
    np.testing.assert_array_equal(out, x * 2)


class TargetWithStages:
    @hookimpl
    def pallasite_targets(self):
        return [
            dataclasses.replace(
                slots_plugin.TARGET, name="sm_120", ptx_version=87, limits={"stages": 4}
            )
        ]


# Values -------------------------------------------------------------------------------------------


class Locals(MemorySpace):
    """Arrays in the registers of one thread, zeros at first."""

    name = "LOCALS"
    is_value = True
    per_block = False
    reuses_memory = False

    def resources(self, ctx, variable, axes):
        return ctx.nothing()

    def enter_scope(self, ctx, aval, axes, initial=None):
        return RegisterArray.constant(0, np.dtype(aval.dtype), aval.shape)


class LocalsPlugin:
    @hookimpl
    def pallasite_memory_spaces(self):
        return [Locals()]


@BOTH
def test_references_that_are_values_are_carried_in_registers(semantics):
    def body(x_ref, out_ref):
        def scope(total):
            def step(row, carry):
                total[...] += x_ref[row]
                return carry

            jax.lax.fori_loop(0, 4, step, 0)

            @pl.when(x_ref[0, 0] > 0)
            def _():
                total[...] = total[...] * 2

            out_ref[0] = total[...]

        pl.run_scoped(scope, plgpu.LOCALS((128,), jnp.float32))

    with registered(LocalsPlugin(), "locals"):
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((1, 128), jnp.float32),
            compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        )
        made = pallasite.compile(kernel, array(4), target="sm_90")
    assert made.launch.shared_memory_bytes == 0
    x = np.arange(512, dtype=np.float32).reshape(4, 128)
    for first in (-1, 1):
        x[0, 0] = first
        expected = x.sum(axis=0, keepdims=True) * (2 if first > 0 else 1)
        np.testing.assert_array_equal(simulate(made, x).outputs[0], expected)


# Carried values -----------------------------------------------------------------------------------

split_p, joined_p = Primitive("split"), Primitive("joined")
for _primitive in (split_p, joined_p):
    _primitive.def_abstract_eval(lambda x: x)


class Halves(CarriedValue):
    """Each register of an array in two parts, such that their sum is the register."""

    def __init__(self, array, parts):
        self.array, self.parts = array, parts

    def carry_registers(self):
        return [register for pair in self.parts for register in pair]

    def with_registers(self, registers):
        return Halves(self.array, list(zip(registers[::2], registers[1::2], strict=True)))


def test_values_of_a_plugin_are_carried_by_loops_and_branches():
    rules = RuleSet()

    @rules.lowering(split_p, Semantics.LANE)
    def split(ctx, x):
        parts = x.parts if isinstance(x, Halves) else [(r, r) for r in x.registers]
        added = [(arith.addf(a, a), b) for a, b in parts]
        return Halves(x.array if isinstance(x, Halves) else x, added)

    @rules.lowering(joined_p, Semantics.LANE)
    def joined(ctx, x):
        registers = tuple(arith.addf(a, b) for a, b in x.parts)
        return RegisterArray(registers, x.array.layout, x.array.dtype)

    class Plugin:
        @hookimpl
        def pallasite_lowering_rules(self):
            return rules.lowering_rules

    def body(x_ref, out_ref):
        value = split_p.bind(x_ref[...])
        value = jax.lax.fori_loop(0, 3, lambda i, v: split_p.bind(v), value)
        more = x_ref[0, 0] > 0
        value = jax.lax.cond(more, lambda v: split_p.bind(v), lambda v: v, value)
        out_ref[...] = joined_p.bind(value)

    with registered(Plugin(), "halves"):
        made = compiled(body, target="sm_90")
    x = np.arange(256, dtype=np.float32).reshape(2, 128)
    for first in (-1, 1):
        x[0, 0] = first
        factor = (32 if first > 0 else 16) + 1
        np.testing.assert_array_equal(simulate(made, x).outputs[0], x * factor)


# Spaces with parameters ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Banks(SharedMemory):
    """Shared memory of some banks: spaces of other banks are other spaces."""

    banks: tuple[int, ...] = ()
    name: ClassVar[str] = "BANKS"


def test_spaces_with_parameters_are_compared_by_them():
    one, same, other = Banks((0, 1)), Banks((0, 1)), Banks((2,))
    assert one == same != other and hash(one) == hash(same)
    assert pickle.loads(pickle.dumps(one)) == one
    assert canonical_parts(one) == canonical_parts(same) != canonical_parts(other)
    assert canonical_parts(one((4,), jnp.float32).get_ref_aval()) != canonical_parts(
        other((4,), jnp.float32).get_ref_aval()
    )
