"""The hooks ``pallasite_layouts`` and ``pallasite_layout_proposals``: layouts of other authors."""

from __future__ import annotations

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu
from pallasite.cli import main
from pallasite.plugin import (
    InvalidValueError,
    LayoutProposal,
    MissingNameError,
    NamedLayout,
    PluginError,
    TargetPredicate,
    config,
    hookimpl,
    manager,
)
from pallasite.plugin.layouts import tiled_specification
from pallasite_simulator import simulate

SHAPE = (64, 64)
ARRAY = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
SEMANTICS = list(plgpu.LoweringSemantics)


def columns(bits, vector):
    """Each warp has 16 of 64 columns, with ``vector`` neighbours in a register."""
    if vector not in (1, 2, 4):
        raise InvalidValueError(f"vectors of {vector}", expected="1, 2 or 4")
    tiles = ((2 * vector, 64), (2 * vector, 16), (vector,))
    return tiled_specification(tiles, (-4,), (-3, -2))


PAIRS = NamedLayout(name="COLUMN_PAIRS", specification=columns(32, 2))
COLUMNS = NamedLayout(
    name="COLUMNS", specification=columns, arguments=lambda shape: (4,), public=False
)


def propose(shape, vector=2):
    try:
        return [columns(32, vector).layout(shape)] if len(shape) == 2 else []
    except InvalidValueError:
        return []


PROPOSAL = LayoutProposal(name="columns", propose=propose)


class Plugin:
    def __init__(self, *layouts, proposals=()):
        self.layouts, self.proposals = layouts, proposals

    @hookimpl
    def pallasite_layouts(self):
        return self.layouts

    @hookimpl
    def pallasite_layout_proposals(self):
        return self.proposals


@contextlib.contextmanager
def registered(*layouts, proposals=(), name="columns"):
    manager().register(Plugin(*layouts, proposals=proposals), name)
    try:
        yield
    finally:
        manager().unregister(name)


def compiled(body, target="sm_90", **params):
    kernel = plgpu.kernel(body, out_type=ARRAY, compiler_params=plgpu.CompilerParams(**params))
    return pallasite.compile(kernel, ARRAY, target=target)


def casts(layout):
    def body(x_ref, out_ref):
        out_ref[...] = plgpu.layout_cast(x_ref[...], layout()) + 1

    return body


def center(x_ref, out_ref):
    """It takes sums along columns, so warps that have columns of their own exchange nothing."""
    x = x_ref[...]
    out_ref[...] = x - jnp.max(x, axis=0)[None, :]


def layouts_of(kernel):
    return {array.layout for array in kernel.layouts.arrays if array.shape == SHAPE}


# Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
@pytest.mark.parametrize(
    ("layout", "name", "vector"),
    [
        (lambda: plgpu.Layout.COLUMN_PAIRS, "COLUMN_PAIRS", 2),
        (lambda: plgpu.Layout["COLUMNS"](vector=4), "COLUMNS", 4),
    ],
    ids=["fixed", "with an argument"],
)
def test_programs_and_reports_name_it(layout, name, vector, semantics):
    with registered(PAIRS, COLUMNS):
        made = compiled(casts(layout), lowering_semantics=semantics)
        np.testing.assert_array_equal(simulate(made, X).outputs[0], X + 1)
        assert f"ld.global.v{vector}.b32" in made.ptx
        if semantics is plgpu.LoweringSemantics.Warpgroup:
            assert layouts_of(made) == {name}


def test_only_public_ones_are_listed(capsys):
    with registered(PAIRS, COLUMNS, proposals=[PROPOSAL]):
        names = [layout.name for layout in plgpu.Layout]
        assert main(["plugins", "--json"]) == 0
    assert "COLUMN_PAIRS" in names and "COLUMNS" not in names
    assert "COLUMN_PAIRS" not in plgpu.Layout.__members__  # The plugin is gone.
    rows = {one["name"]: one for one in json.loads(capsys.readouterr().out)["plugins"]}
    assert rows["columns"]["contributes"] == {
        "layouts": ["COLUMN_PAIRS", "COLUMNS"],
        "layout proposals": ["columns"],
    }
    assert "MMA_LHS" in rows["standard"]["contributes"]["layouts"]


def test_names_that_no_plugin_has():
    with pytest.raises(MissingNameError, match="there is no register layout COLUMN_PAIRS") as error:
        plgpu.Layout.COLUMN_PAIRS  # noqa: B018
    assert "expected: one of " in str(error.value) and "MMA_LHS" in str(error.value)
    hopper = {"disabled_plugins": "hopper"}
    with config.scoped(**hopper), pytest.raises(MissingNameError, match="layout WGMMA") as error:
        plgpu.Layout.WGMMA  # noqa: B018
    assert "try: " in str(error.value) and "hopper" in str(error.value)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (lambda: plgpu.Layout.COLUMN_PAIRS(2), "COLUMN_PAIRS: COLUMN_PAIRS takes no arguments"),
        (lambda: plgpu.Layout["COLUMNS"](), "wrong arguments for the layout COLUMNS: .*'vector'"),
        (lambda: plgpu.Layout["COLUMNS"](3), "vectors of 3\n(.*\n)*  expected: 1, 2 or 4"),
    ],
    ids=["none", "too few", "wrong"],
)
def test_arguments_that_it_does_not_take(layout, text):
    with registered(PAIRS, COLUMNS), pytest.raises(InvalidValueError, match=text) as error:
        compiled(casts(layout))
    assert error.value.location.function == "body"


def test_two_plugins_with_one_name():
    same = NamedLayout(name="COLUMN_PAIRS", specification=columns(32, 4))
    with registered(PAIRS), registered(same, name="other"), pytest.raises(PluginError) as error:
        plgpu.Layout.COLUMN_PAIRS  # noqa: B018
    assert "plugins 'columns' and 'other' both register register layouts named" in str(error.value)
    same = NamedLayout(name="COLUMN_PAIRS", specification=columns(32, 4), overrides=("columns",))
    with registered(PAIRS), registered(same, name="other"):
        assert "ld.global.v4.b32" in compiled(casts(lambda: plgpu.Layout.COLUMN_PAIRS)).ptx


def test_another_plugin_of_the_same_name_is_asked():
    for vector in (2, 4):
        layout = NamedLayout(name="COLUMN_PAIRS", specification=columns(32, vector))
        with registered(layout):
            ptx = compiled(casts(lambda: plgpu.Layout.COLUMN_PAIRS)).ptx
        assert f"ld.global.v{vector}.b32" in ptx


# Proposals ----------------------------------------------------------------------------------------


def test_inference_takes_a_proposal_that_is_the_cheapest():
    without = compiled(center)
    assert "st.shared" in without.ptx  # Warps exchange what each has found.
    with registered(PAIRS, proposals=[PROPOSAL]):
        made = compiled(center)
        assert layouts_of(made) == {"COLUMN_PAIRS"}
    assert "st.shared" not in made.ptx
    np.testing.assert_array_equal(simulate(made, X).outputs[0], X - X.max(axis=0))


def test_what_the_program_says_goes_before_a_proposal():
    def strided(x_ref, out_ref):
        layout = plgpu.Layout.WG_STRIDED(SHAPE, vec_size=2)
        x = plgpu.layout_cast(x_ref[...], layout)
        out_ref[...] = plgpu.layout_cast(x - jnp.max(x, axis=0)[None, :], layout)

    with registered(PAIRS, proposals=[PROPOSAL]):
        assert layouts_of(compiled(strided)) == {"strided(vector 2)"}


def test_proposals_are_for_targets_and_uses():
    elsewhere = TargetPredicate(names=frozenset({"sm_90a"}))
    for options in ({"target": elsewhere}, {"uses": ("transpose",)}):
        proposal = LayoutProposal(name="columns", propose=propose, **options)
        with registered(PAIRS, proposals=[proposal]):
            assert "COLUMN_PAIRS" not in layouts_of(compiled(center))
    with registered(
        PAIRS, proposals=[LayoutProposal(name="columns", propose=propose, target=elsewhere)]
    ):
        assert layouts_of(compiled(center, "sm_90a")) == {"COLUMN_PAIRS"}


def test_order_of_proposals():
    late = LayoutProposal(name="late", propose=propose, order=100)
    early = LayoutProposal(name="early", propose=propose, order=-1)
    with registered(proposals=[late, PROPOSAL, early]):
        names = [one.name for one in manager().registry().layout_proposals()]
    assert names[0] == "early" and names[-1] == "late"
    assert names.index("matrix-fragments") < names.index("columns")


def test_two_proposals_with_one_name():
    with (
        registered(proposals=[PROPOSAL]),
        registered(proposals=[PROPOSAL], name="other"),
        pytest.raises(PluginError) as error,
    ):
        manager().registry()
    assert "plugins 'columns' and 'other' both register layout proposals named 'columns'" in str(
        error.value
    )
