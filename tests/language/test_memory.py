"""Allocations, transforms, unions, barriers."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from tests.language.interpreter import spec_of

from pallasite import _jax, config
from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError, InvalidValueError, MissingNameError
from pallasite.language import transforms as tr
from pallasite.language.kernel import kernel
from pallasite.language.memory import (
    GMEM,
    REGS,
    SMEM,
    MemorySpace,
    RefUnion,
    SemaphoreType,
)
from pallasite.language.memory_space import find_space
from pallasite_std.barriers.types import (
    Barrier,
    BarrierType,
    ClusterBarrier,
    ClusterBarrierType,
)
from pallasite_std.caching.kernel_text import canonical_parts

F16 = jnp.float16


def trace(body, scratch, **kwargs):
    """The scratch part of a kernel's jaxpr."""
    k = kernel(body, scratch_types=scratch, **kwargs)
    (equation,) = spec_of_effect_free(k)
    return equation.params["jaxpr"]


def spec_of_effect_free(k):
    return spec_of(k).jaxpr.eqns


def test_allocation_is_physical_with_a_logical_view():
    alloc = SMEM(
        (128, 256), F16, transforms=(tr.TilingTransform((8, 64)), tr.SwizzleTransform(128))
    )
    view = alloc.get_ref_aval()
    assert view.ref.shape == (16, 4, 8, 64) and view.ref.memory_space is SMEM
    assert view.transforms == (tr.UnswizzleTransform(128), tr.UntilingTransform((8, 64)))
    assert view.shape == (128, 256) and view.dtype == F16
    plain = SMEM((4,), F16).get_ref_aval()
    assert isinstance(plain, _jax.AbstractRef)
    assert SMEM.like(jnp.ones((2, 3), jnp.int8)).shape == (2, 3)
    assert str(GMEM) == "gmem" and REGS.name == "REGS"


def test_transposed_tiling():
    alloc = SMEM(
        (64, 128),
        F16,
        transforms=(_jax.TransposeTransform((1, 0)), tr.TilingTransform((8, 64))),
    )
    view = alloc.get_ref_aval()
    assert view.ref.shape == (16, 1, 8, 64) and view.shape == (64, 128)


@pytest.mark.parametrize(
    ("message", "shape", "transforms"),
    [
        ("cannot be cut into tiles of 8", (12, 64), (tr.TilingTransform((8, 64)),)),
        ("more dimensions than shape", (64,), (tr.TilingTransform((8, 64)),)),
        ("swizzle 128 does not fit rows", (64, 64), (tr.SwizzleTransform(64),)),
        ("swizzle 64 does not fit", (64, 64), (tr.SwizzleTransform(64),)),
    ],
)
def test_transforms_that_do_not_fit(message, shape, transforms):
    message = message.replace("swizzle 128", "swizzle 64")
    with pytest.raises(InvalidValueError, match=message) as caught:
        SMEM(shape, F16, transforms=transforms).get_ref_aval()
    assert "test_memory.py" in str(caught.value)


def test_bad_transforms():
    with pytest.raises(InvalidValueError, match="no swizzle of 48"):
        tr.SwizzleTransform(48)
    with pytest.raises(InvalidValueError, match=r"tiling\[1\]"):
        tr.TilingTransform((8, 0))
    with pytest.raises(InvalidValueError, match="is not tiled by"):
        tr.UntilingTransform((8, 64)).transform_type(_jax.ShapedArray((2, 4, 4), F16))


def test_transforms_undo_each_other():
    logical = _jax.ShapedArray((3, 16, 128), F16)
    tiling = tr.TilingTransform((8, 64))
    tiled = tiling.transform_type(logical)
    assert tiled.shape == (3, 2, 2, 8, 64)
    assert tiling.undo(logical).transform_type(tiled) == logical
    assert tiling.undo(logical).undo(tiled) == tiling


def test_transforms_are_static_trees():
    for transform in (tr.UntilingTransform((8, 64)), tr.UnswizzleTransform(64)):
        leaves, tree = jax.tree.flatten(transform)
        assert not leaves and tree.unflatten([]) == transform and hash(tree)
    leaves, _ = jax.tree.flatten(tr.ClusterRefTransform(("x",), (3,)))
    assert leaves == [3]


def test_find_swizzle():
    assert [tr.find_swizzle(8 * n) for n in (256, 64, 96, 48)] == [128, 64, 32, 16]
    with pytest.raises(InvalidValueError, match="no swizzle fits the output"):
        tr.find_swizzle(100, "the output")


def test_spaces_of_plugins_are_found_by_name():
    """Without the plugin, tensor memory is known by name only: the hint says which one has it."""
    assert MemorySpace.TMEM is plgpu.TMEM
    with config.scoped(disabled_plugins="blackwell"):
        for find in (lambda: MemorySpace.TMEM, lambda: plgpu.TMEM):
            with pytest.raises(MissingNameError, match="TMEM") as caught:
                find()
            assert "'blackwell'" in str(caught.value)
    with pytest.raises(MissingNameError, match="there is no memory space 'MOON'") as caught:
        find_space("MOON")
    assert "GMEM, SMEM, REGS" in str(caught.value)
    assert {GMEM, SMEM, REGS, MemorySpace.BARRIERS} <= set(MemorySpace)


def test_arguments_of_another_space():
    with pytest.raises(InvalidTypeError, match="takes no argument 'packed'") as caught:
        SMEM((128, 64), jnp.float32, packed=True)
    assert "packed=True" in str(caught.value) and "transforms=" in str(caught.value)


def test_spaces_are_the_same_objects_wherever_they_come_from():
    for space in MemorySpace:
        assert pickle.loads(pickle.dumps(space)) is space
        assert getattr(MemorySpace, space.name) is space and getattr(plgpu, space.name) is space
    assert repr(SMEM) == "<MemorySpace.SMEM: 'smem'>" and SMEM.value == "smem"
    assert canonical_parts(SMEM) == ["class pallasite.language.memory.SharedMemory", "SMEM"]


def test_union():
    seen = {}

    def body(union):
        a, (b, c) = union
        seen.update(a=a, b=b, c=c)
        a[...] = jnp.zeros(a.shape, a.dtype)
        b[...] = jnp.zeros(b.shape, b.dtype)
        c[...] = union[1][1][...]

    tiled = SMEM((64, 64), F16, transforms=(tr.TilingTransform((8, 64)),))
    jaxpr = trace(body, [RefUnion(SMEM((100,), jnp.int8), (SMEM((3,), jnp.float32), tiled))])
    (var,) = jaxpr.invars
    assert var.aval.shape == (1024 + 64 * 64 * 2,)
    assert hash(var.aval) == hash(var.aval) and var.aval == var.aval
    assert [seen[n].shape for n in "abc"] == [(100,), (3,), (64, 64)]
    members = [seen[n].transforms[0] for n in "abc"]
    assert [(m.offset, m.group) for m in members] == [(0, 0), (0, 1), (1024, 1)]
    assert members[2].shape == (8, 1, 8, 64)


def test_union_errors():
    with pytest.raises(InvalidValueError, match="must all be in shared memory"):
        RefUnion(SMEM((4,), F16), GMEM((4,), F16))
    with pytest.raises(InvalidValueError, match="can't be assigned to as a whole"):
        trace(lambda u: u.__setitem__(..., 1), [RefUnion(SMEM((4,), F16), SMEM((4,), jnp.int8))])
    with pytest.raises(InvalidValueError, match="whole bytes"):
        RefUnion(SMEM((3,), jnp.int4))


def test_barriers():
    aval = Barrier(num_arrivals=2, num_barriers=3, orders_tensor_core=True).get_ref_aval()
    assert aval.shape == (3,) and aval.dtype == BarrierType(2, True)
    assert Barrier(num_barriers=(2, 3)).get_ref_aval().shape == (2, 3)
    assert Barrier().get_ref_aval().shape == ()
    cluster = ClusterBarrier(collective_axes="x").get_ref_aval()
    assert cluster.dtype == ClusterBarrierType(("x",), 1, False, False)
    assert hash(ClusterBarrier(collective_axes=["x", ("y", "z")]))


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (InvalidValueError, "num_arrivals is too small", lambda: Barrier(num_arrivals=0)),
        (InvalidTypeError, "num_arrivals must be known", lambda: Barrier(num_arrivals=1.0)),
        (InvalidValueError, r"num_barriers\[0\] is not positive", lambda: Barrier(num_barriers=0)),
        (InvalidValueError, "needs collective_axes", lambda: ClusterBarrier(collective_axes=None)),
        (InvalidTypeError, "not an axis name", lambda: ClusterBarrier(collective_axes=(3,))),
        (InvalidValueError, "is not an array", lambda: Barrier().get_array_aval()),
    ],
)
def test_bad_barriers(error, message, make):
    with pytest.raises(error, match=message) as caught:
        make()
    assert "test_memory.py" in str(caught.value)


def test_semaphores_persist():
    def body(o):
        semaphore = pl.get_global(SemaphoreType.REGULAR)
        several = pl.get_global(SemaphoreType.REGULAR((4,)))
        assert semaphore.shape == () and several.shape == (4,)

    jaxpr = spec_of(kernel(body, out_type=jax.ShapeDtypeStruct((4,), F16))).jaxpr
    assert [e.primitive.name for e in jaxpr.eqns] == ["get_global"] * 2


def test_views():
    seen = {}

    def body(a):
        seen["t"] = tr.transpose_ref(a, (1, 0))
        seen["c"] = tr.cluster_ref(a.at[0], {"x": 1})
        for function, message in [
            (lambda: tr.transpose_ref(a, (0, 0)), "not a permutation"),
            (lambda: tr.cluster_ref(a, 3), "which block"),
            (lambda: tr.cluster_ref(a[...], {"x": 1}), "not a reference"),
        ]:
            with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
                function()

    trace(body, [SMEM((4, 8), F16)])
    assert seen["t"].shape == (8, 4)
    assert seen["c"].shape == (8,) and seen["c"].transforms[-1].dims == ("x",)
