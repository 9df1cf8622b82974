"""The hook ``pallasite_views``: what transforms of other authors mean."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu
from pallasite.cli import main
from pallasite.errors import InvalidValueError, PluginError, UnsupportedError
from pallasite.plugin import ViewRule, hookimpl, manager, nothing_changes
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import as_transformed
from pallasite.plugin.layouts import Extent
from pallasite_simulator import simulate
from pallasite_std.api import memory_region

ROWS, COLUMNS = 4, 128
BOTH = pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics), ids=str)


@dataclasses.dataclass(frozen=True)
class EveryOther(plgpu.Transform):
    """Every other row of a matrix, from the row ``first`` on."""

    first: int

    def transform_type(self, x: Any) -> Any:
        if isinstance(x, jax.core.ShapedArray):
            return x.update(shape=(x.shape[0] // 2, *x.shape[1:]))
        return x.update(inner_aval=self.transform_type(x.inner_aval))


@dataclasses.dataclass(frozen=True)
class Same(plgpu.Transform):
    """The same memory; a subclass of it is made below."""

    def transform_type(self, x: Any) -> Any:
        return x


class AlsoTheSame(Same):
    """Has no rule of its own."""


jax.tree_util.register_dataclass(EveryOther, data_fields=(), meta_fields=("first",))
for _same in (Same, AlsoTheSame):
    jax.tree_util.register_dataclass(_same, data_fields=(), meta_fields=())


def viewed(ref, transform):
    """A view of a reference, as a function of the plugin would make it."""
    base = as_transformed(ref)
    return _jax.TransformedRef(base.ref, (*base.transforms, transform))


def _every_other(layout, first):
    if len(layout.dims[0]) > 1:
        raise UnsupportedError("every other row of tiles", got=layout)
    (rows,) = layout.dims[0]
    if first + 1 >= rows.size + (rows.size % 2):
        raise InvalidValueError("there is no such row", got=first)
    halved = layout.with_dims([(Extent(rows.size // 2, 2 * rows.stride),), *layout.dims[1:]])
    return halved, first * rows.stride


def lower_every_other(ctx, reference, transform):
    layout, offset = _every_other(reference.layout, transform.first)
    moved = dataclasses.replace(reference, offset=reference.offset + offset)
    return moved.with_layout(layout)


def infer_every_other(view, transform):
    layout, offset = _every_other(view.layout, transform.first)
    view.change(layout)
    view.move(offset)


def region_of_every_other(builder, transform):
    builder.index(
        (ROWS, COLUMNS), (_jax.Slice(transform.first, ROWS // 2, 2), _jax.Slice(0, COLUMNS, 1))
    )


EVERY_OTHER = ViewRule(
    transform=EveryOther,
    lower=lower_every_other,
    infer=infer_every_other,
    region=region_of_every_other,
)
SAME = ViewRule(
    transform=Same, lower=lambda ctx, reference, transform: reference, infer=nothing_changes
)


class Plugin:
    def __init__(self, *views):
        self.views = views

    @hookimpl
    def pallasite_views(self):
        return self.views


@contextlib.contextmanager
def registered(*views, name="rows"):
    manager().register(Plugin(*views), name)
    try:
        yield
    finally:
        manager().unregister(name)


def compiled(body, semantics=plgpu.LoweringSemantics.Lane, **options):
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        **options,
    )
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    return pallasite.compile(kernel, x, target="sm_90")


def exchange(x_ref, out_ref, scratch):
    scratch[...] = x_ref[...]
    even, odd = viewed(scratch, EveryOther(0)), viewed(scratch, EveryOther(1))
    kept = even[...]
    even[...] = odd[...] * 2
    odd[...] = kept
    viewed(out_ref, EveryOther(1))[...] = viewed(scratch, AlsoTheSame())[2:4]
    viewed(out_ref, EveryOther(0)).at[:, 0:64][...] = viewed(x_ref, EveryOther(0)).at[:, 64:][...]
    viewed(out_ref, EveryOther(0)).at[:, 64:][...] = jnp.zeros((2, 64), jnp.float32)


@BOTH
def test_a_view_is_read_and_written(semantics):
    """In shared and in global memory, further indexed; a subclass has the rule of its base."""
    with registered(EVERY_OTHER, SAME):
        made = compiled(
            exchange, semantics, scratch_types=[plgpu.SMEM((ROWS, COLUMNS), jnp.float32)]
        )
    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    (out,) = simulate(made, x).outputs
    expected = np.zeros_like(x)
    expected[1] = x[3] * 2
    expected[3] = x[2]
    expected[0::2, :64] = x[0::2, 64:]
    np.testing.assert_array_equal(out, expected)


@BOTH
def test_what_a_rule_refuses_is_said_at_the_line(semantics):
    def body(x_ref, out_ref, scratch):
        scratch[...] = x_ref[...]
        out_ref[0:2] = viewed(scratch, EveryOther(ROWS))[...]

    with registered(EVERY_OTHER), pytest.raises(InvalidValueError) as caught:
        compiled(body, semantics, scratch_types=[plgpu.SMEM((ROWS, COLUMNS), jnp.float32)])
    text = str(caught.value)
    assert "there is no such row" in text and "test_hook_views.py" in text


def test_layouts_that_have_no_such_view_are_not_chosen():
    """Tiles of 8 rows have two extents for a dimension, which this rule does not know."""
    seen = []

    def infer(view, transform):
        seen.append(str(view.layout))
        infer_every_other(view, transform)

    def body(x_ref, out_ref, scratch):
        scratch[...] = x_ref[...]
        out_ref[...] = viewed(scratch, EveryOther(0))[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((8, 64), jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=[plgpu.SMEM((16, 64), jnp.float32)],
    )
    x = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    with registered(dataclasses.replace(EVERY_OTHER, infer=infer)):
        made = pallasite.compile(kernel, x, target="sm_90")
    assert len(set(seen)) > 1, "tiled layouts were tried, too"
    np.testing.assert_array_equal(simulate(made, x).outputs[0], x[0::2])


# Checks -------------------------------------------------------------------------------------------


def rows(start, size):
    indices = (_jax.Slice(start, size, 1), _jax.Slice(0, COLUMNS, 1))
    return _jax.NDIndexer(indices, (ROWS, COLUMNS), ())


def test_checks_know_what_a_view_covers():
    memory, other = object(), object()
    with registered(EVERY_OTHER, SAME):

        def region(*views, memory=memory):
            return memory_region(memory, views)

        whole, half = region(), region(EveryOther(0))
        assert whole.exact and not half.exact
        assert half.overlaps(whole) and whole.overlaps(half)
        # It is not exact, so that nothing but what covers all of its box meets it for sure.
        assert half.overlaps(region(rows(0, ROWS)))
        assert not half.overlaps(region(rows(0, 2)))
        assert not half.overlaps(region(EveryOther(1)))
        assert not half.overlaps(region(EveryOther(0), memory=other))
        # Nothing is known of a transform without a region: its form has to be the same.
        assert region(Same(), rows(0, 1)).overlaps(region(Same(), rows(0, 2)))
        assert not region(Same(), rows(0, 1)).overlaps(region(rows(0, 2)))
        assert region(rows(0, 2)).overlaps(region(rows(1, 2)))
        assert not region(rows(0, 2)).overlaps(region(rows(2, 2)))


def test_the_check_of_products_asks_the_table():
    """A write to what a product in flight reads is found through a view of another plugin."""

    def body(a_ref, out_ref, a_smem, acc):
        a_smem[...] = a_ref[...]
        plgpu.commit_smem()
        plgpu.wgmma(acc, a_smem, plgpu.transpose_ref(a_smem, (1, 0)))
        viewed(a_smem, Same())[...] = jnp.zeros((64, 64), jnp.float16)
        out_ref[...] = acc[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[
            plgpu.SMEM(
                (64, 64),
                jnp.float16,
                transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
            ),
            plgpu.ACC((64, 64)),
        ],
    )
    a = jax.ShapeDtypeStruct((64, 64), jnp.float16)
    in_place = dataclasses.replace(SAME, region=lambda builder, transform: None)
    with registered(in_place), pytest.raises(InvalidValueError, match="in flight"):
        pallasite.compile(kernel, a, target="sm_90a")


# Errors -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PeerMemRef(plgpu.Transform):
    """Has the name of a view that a known plugin provides."""

    def transform_type(self, x: Any) -> Any:
        return x


jax.tree_util.register_dataclass(PeerMemRef, data_fields=(), meta_fields=())


@pytest.mark.parametrize(
    ("transform", "hint"),
    [
        (EveryOther(0), None),
        (PeerMemRef(), "plugin 'multigpu' is to provide it"),
    ],
    ids=["unknown", "known"],
)
def test_a_view_without_a_rule(transform, hint):
    def body(x_ref, out_ref):
        out_ref[0:2] = viewed(x_ref, transform)[0:2]

    with pytest.raises(UnsupportedError) as caught:
        compiled(body)
    text = str(caught.value)
    assert f"primitive get does not understand the view {type(transform).__name__}" in text
    assert "expected: a view for which a plugin has a ViewRule" in text
    assert hint is None and "try:" not in text or hint is not None and hint in text


def test_two_rules_for_one_view():
    mine = dataclasses.replace(SAME, overrides=("standard",))
    with registered(SAME, name="one"):
        with registered(SAME, name="two"), pytest.raises(PluginError) as caught:
            manager().registry()
        assert "'one'" in str(caught.value) and "'two'" in str(caught.value)
        with registered(dataclasses.replace(mine, overrides=("one",)), name="two"):
            assert manager().registry().view_rule(AlsoTheSame).plugin == "two"


def test_views_are_listed(capsys):
    with registered(EVERY_OTHER, SAME):
        assert main(["plugins", "--json"]) == 0
    rows = {one["name"]: one for one in json.loads(capsys.readouterr().out)["plugins"]}
    assert rows["rows"]["contributes"] == {"views": 2}
    assert rows["standard"]["contributes"]["views"] == 10
