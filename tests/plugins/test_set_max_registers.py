"""``set_max_registers``, on the targets that can reallocate registers."""

from __future__ import annotations

import jax
import pytest
from core_support import FakeEntryPoint
from jaxlib.mlir import ir

import pallasite_blackwell.plugin
import pallasite_hopper.plugin
import pallasite_std.plugin
from pallasite import gpu
from pallasite.errors import InvalidTypeError, InvalidValueError, MissingRuleError
from pallasite.extensions import Semantics
from pallasite.ir.context import make_context
from pallasite.plugins import PluginManager
from pallasite.target_selection import find_target
from pallasite_std.rules.registers import set_max_registers_p

POINTS = (
    FakeEntryPoint("blackwell", lambda: pallasite_blackwell.plugin),
    FakeEntryPoint("hopper", lambda: pallasite_hopper.plugin),
    FakeEntryPoint("standard", lambda: pallasite_std.plugin),
)
PLUGINS = PluginManager({}, entry_points=lambda: POINTS)


def refused(kind, *args, **kwargs) -> list[str]:
    with pytest.raises(kind) as error:
        gpu.set_max_registers(*args, **kwargs)
    return str(error.value).splitlines()


def test_equation_survives_and_keeps_its_parameters():
    def body():
        gpu.set_max_registers(40, action="decrease")

    jaxpr = jax.make_jaxpr(body)()
    (equation,) = jaxpr.eqns
    assert equation.primitive is set_max_registers_p
    assert equation.params == {"n": 40, "action": "decrease"}
    assert [str(effect) for effect in jaxpr.effects] == ["Memory"]


@pytest.mark.parametrize(("n", "hint"), [(23, "24"), (300, "256"), (41, "40 or 48"), (-8, "24")])
def test_number_that_the_hardware_refuses(n, hint):
    assert refused(InvalidValueError, n, action="increase")[1:] == [
        f"  got: {n}",
        "  expected: a multiple of 8 from 24 to 256",
        f"  try: {hint}",
    ]


@pytest.mark.parametrize("n", [40.0, True, "40", None])
def test_number_that_is_no_integer(n):
    message = refused(InvalidTypeError, n, action="increase")
    assert "must be an integer that is known while tracing" in message[0]
    assert f"{n!r} of type {type(n).__name__}" in message[1]


def test_unknown_action():
    assert refused(InvalidValueError, 40, action="grow")[1:] == [
        "  got: 'grow'",
        "  expected: 'increase' or 'decrease'",
    ]


@pytest.mark.parametrize("semantics", [Semantics.LANE, Semantics.WARPGROUP])
@pytest.mark.parametrize(("action", "code"), [("increase", "inc"), ("decrease", "dec")])
def test_rule_emits_the_instruction(semantics, action, code):
    rule = PLUGINS.registry().lowering_rule(set_max_registers_p, semantics, find_target("sm_90a"))
    with make_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            assert rule.function(None, n=232, action=action) == ()
        text = str(module)
    assert f'llvm.inline_asm has_side_effects "setmaxnreg.{code}.sync.aligned.u32 232;"' in text


def test_portable_target_has_no_rule():
    with pytest.raises(MissingRuleError) as error:
        PLUGINS.registry().lowering_rule(set_max_registers_p, Semantics.LANE, find_target("sm_90"))
    assert "LANE on targets with setmaxnreg (plugin 'standard')" in str(error.value)
    assert "compile for sm_100a or sm_103a or sm_110a or sm_120a or sm_90a" in str(error.value)
