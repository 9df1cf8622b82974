"""Every primitive of the language: how it is bound, its effects, its errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from tests.language.interpreter import spec_of

from pallasite import _jax
from pallasite.errors import InvalidTypeError, InvalidValueError, PallasiteError, UnsupportedError
from pallasite.language.kernel import kernel
from pallasite.language.memory import SMEM, SemaphoreType
from pallasite.language.transforms import SwizzleTransform, TilingTransform
from pallasite_std.barriers.types import Barrier, ClusterBarrier
from pallasite_std.primitives import arrays, barriers, copies, inline, semaphores
from pallasite_std.primitives.copy_options import CopyPartition, OOBFillMode
from pallasite_std.primitives.layouts import Layout, ReducedLayout, layout_cast

F32 = jnp.float32
TILED = (TilingTransform((8, 32)), SwizzleTransform(128))


def traced(body):
    """Traces ``body(x, i, o, smem, barrier, group, cluster)`` and returns the equations.

    x and o are f32[64, 64] in GMEM, i is i32[8] there, smem is f32[32, 32]; barrier is one Barrier,
    group are three, cluster is a ClusterBarrier.
    """
    k = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=[
            SMEM((32, 32), F32, transforms=TILED),
            Barrier(),
            Barrier(num_barriers=3),
            ClusterBarrier(collective_axes=("c",)),
        ],
        cluster=(2,),
        cluster_names=("c",),
    )
    (scope,) = spec_of(k, jnp.ones((64, 64), F32), jnp.arange(8)).jaxpr.eqns
    return scope.params["jaxpr"].eqns


def only(body, primitive):
    """The only equation of ``primitive``, and its arguments as a rule gets them."""
    (equation,) = (e for e in traced(body) if e.primitive is primitive)
    return equation, equation.params["args_tree"].unflatten(equation.invars)


def effects(equation):
    """Effects as (name, operand position)."""
    return {(type(e).__name__, getattr(e, "input", None)) for e in equation.effects}


def ref_effects(equation):
    found = set()
    for effect in equation.effects:
        if isinstance(effect, _jax.RefEffect):
            found.add(
                (
                    type(effect).__name__,
                    equation.invars.index(effect.input)
                    if isinstance(effect.input, _jax.Var)
                    else effect.input,
                )
            )
    return found


# --- Copies ---
def test_copy_gmem_to_smem():
    def body(x, i, o, smem, barrier, group, cluster):
        row = i[0]
        copies.copy_gmem_to_smem(
            x.at[pl.ds(row, 32), :32],
            smem,
            group.at[row],
            collective_axes="c",
            oob_mode=OOBFillMode.ZEROS,
            predicate=row == 0,
        )

    equation, (src, dst, barrier, predicate) = only(body, copies.copy_gmem_to_smem_p)
    assert equation.params["collective_axes"] == ("c",)
    assert equation.params["oob_mode"] is OOBFillMode.ZEROS
    assert equation.params["leader_tracked"] is None
    assert src.ref.aval.shape == (64, 64) and len(src.transforms) == 1
    assert [type(t).__name__ for t in dst.transforms] == ["UnswizzleTransform", "UntilingTransform"]
    assert barrier.ref.aval.shape == (3,) and predicate is not None
    dst_position = equation.invars.index(dst.ref)
    assert ref_effects(equation) == {("ReadEffect", 0), ("WriteEffect", dst_position)}
    assert "->" in str(equation) and "using" in str(equation)


def test_copy_gmem_to_smem_without_barrier_and_gather():
    def body(x, i, o, smem, *_):
        copies.copy_gmem_to_smem(x.at[:32, :32], smem)
        rows = i[...]
        copies.copy_gmem_to_smem(x.at[rows, :32], smem.at[:8])

    equations = [e for e in traced(body) if e.primitive is copies.copy_gmem_to_smem_p]
    for equation in equations:
        args = equation.params["args_tree"].unflatten(equation.invars)
        assert args[2] is None and args[3] is None


def test_partitioned_copy():
    def body(x, i, o, smem, barrier, *_):
        copies.copy_gmem_to_smem(
            x.at[:, :32],
            smem,
            barrier,
            collective_axes="c",
            leader_tracked=CopyPartition.PARTITIONED(0),
        )
        copies.copy_gmem_to_smem(
            x.at[:32, :32],
            smem,
            barrier,
            collective_axes=("c",),
            leader_tracked=CopyPartition.REPLICATED,
        )

    assert [e.params["leader_tracked"] for e in traced(body)] == [
        CopyPartition.PARTITIONED(0),
        CopyPartition.REPLICATED,
    ]


def test_copy_smem_to_gmem():
    def body(x, i, o, smem, *_):
        copies.copy_smem_to_gmem(smem, o.at[:32, :32], commit_group=False)
        copies.copy_smem_to_gmem(smem, o.at[:32, :32], i[0] == 0, reduction_op="add")
        copies.commit_smem_to_gmem_group()
        copies.wait_smem_to_gmem(0, wait_read_only=True)
        copies.wait_gmem_to_smem(1)

    equations = [e for e in traced(body) if e.primitive is copies.copy_smem_to_gmem_p]
    plain, reducing = equations
    assert plain.params["commit_group"] is False and plain.params["reduction_op"] is None
    assert {name for name, _ in ref_effects(plain)} == {"ReadEffect", "WriteEffect"}
    assert len(ref_effects(reducing)) == 3  # The destination of a reduction is read, too.
    waits = [e.params for e in traced(body) if "wait" in e.primitive.name]
    assert waits == [dict(n=0, wait_read_only=True), dict(n=1)]


def test_async_prefetch_and_store():
    def body(x, i, o, smem, barrier, *_):
        copies.async_prefetch(x.at[:32], collective_axes="c", predicate=True)
        copies.async_store_smem(
            jnp.zeros((32, 32), F32), smem, barrier, cluster_idx=i[0], cluster_dim="c", atomic="add"
        )

    prefetch, (ref, predicate) = only(body, copies.async_prefetch_p)
    assert predicate.val is True or predicate.val == np.True_
    assert ref_effects(prefetch) == {("ReadEffect", 0)}
    store, (value, ref, _, _) = only(body, copies.async_store_smem_p)
    assert store.params["cluster_dim"] == "c" and store.params["atomic"] == "add"
    assert {name for name, _ in ref_effects(store)} == {"ReadEffect", "WriteEffect"}


# --- Barriers ---
def test_barriers():
    def body(x, i, o, smem, barrier, group, cluster):
        barriers.barrier_arrive(barrier)
        barriers.barrier_arrive(cluster, predicate=i[0] > 0)
        barriers.barrier_wait(group.at[i[0]])
        barriers.barrier_wait(group.at[pl.ds(0, 2)].at[1])
        done = barriers.barrier_test(barrier)
        assert done.shape == () and done.dtype == bool
        barriers.commit_smem()
        barriers.griddepcontrol_wait()
        barriers.griddepcontrol_launch_dependents()

    equations = [e for e in traced(body) if e.effects and e.primitive.name != "get"]
    assert [e.primitive.name for e in equations] == [
        "barrier_arrive",
        "barrier_arrive",
        "barrier_wait",
        "barrier_wait",
        "barrier_test",
        "commit_smem",
        "griddepcontrol_wait",
        "griddepcontrol_launch_dependents",
    ]
    assert all("MemoryEffect" in {name for name, _ in effects(e)} for e in equations)


# --- Arrays ---
def test_load():
    def body(x, i, o, smem, *_):
        value = arrays.load(smem, layout=Layout.WGMMA, optimized=False)
        assert value.shape == (32, 32)
        assert arrays.load(x.at[0]).shape == (64,)
        assert arrays.load(x, (0, pl.ds(0, 8))).shape == (8,)

    equations = traced(body)
    assert [e.primitive.name for e in equations] == ["load", "layout_cast", "load", "load"]
    assert equations[0].params["optimized"] is False
    assert equations[1].params["new_layout"] is Layout.WGMMA
    assert ref_effects(equations[0]) == {("ReadEffect", 0)}


def test_iota():
    def body(*_):
        value = arrays.broadcasted_iota(jnp.int32, (4, 8), -1, layout=Layout.WG_STRIDED((4, 8), 1))
        assert value.shape == (4, 8) and value.dtype == jnp.int32

    assert [e.primitive.name for e in traced(body)] == ["iota", "layout_cast"]


@pytest.mark.parametrize("name", ["add", "and", "max", "min", "or", "xor"])
def test_atomics(name):
    def body(x, i, o, smem, *_):
        getattr(arrays, f"atomic_{name}")(i.at[pl.ds(0, 4)], jnp.ones((4,), jnp.int32))

    equation, (ref, value) = only(body, arrays.atomic_p)
    assert equation.params["operation"] == name and value.aval.shape == (4,)
    assert ref_effects(equation) == {("ReadEffect", 0), ("WriteEffect", 0)}


def test_print_layout():
    def body(x, i, o, smem, *_):
        arrays.print_layout("value {}", smem[...])
        arrays.print_layout("smem {}", smem.at[i[0]])

    equations = [e for e in traced(body) if e.primitive is arrays.print_layout_p]
    assert [e.params["fmt"] for e in equations] == ["value {}", "smem {}"]


def test_layouts():
    strided = Layout.WG_STRIDED((128, 64), vec_size=4)
    assert strided == Layout.WG_STRIDED([128, 64], vec_size=4) and hash(strided)
    assert strided.kwargs == {"vec_size": 4}
    assert strided.resolve((128, 64), F32).shape == (128, 64)
    assert Layout.WGMMA.resolve((64, 16), F32).shape == (64, 16)
    reduced = Layout.WGMMA.reduce(1)
    assert reduced == ReducedLayout(Layout.WGMMA, (1,))
    assert reduced.resolve((128,), F32).shape == (128,)
    assert str(strided) == "Layout.WG_STRIDED((128, 64), vec_size=4)"
    assert Layout.MMA_ACC(jnp.bfloat16).resolve((128, 128), F32).shape == (128, 128)
    with pytest.raises(InvalidValueError):
        Layout.WGMMA.resolve((60, 16), F32)


# --- inline_mgpu ---
def test_inline_mgpu():
    def body(x, i, o, smem, *_):
        @inline.inline_mgpu(
            arg_types=(inline.RefType(TILED), {"scale": Layout.WG_SPLAT(())}),
            return_type=[inline.ShapeDtypeStruct((32, 32), F32, Layout.WGMMA)],
        )
        def code(context, ref, scalars):
            """Never called while tracing."""
            raise AssertionError

        (result,) = code(smem, {"scale": jnp.float32(2)})
        assert result.shape == (32, 32) and result.dtype == F32

    equation, (ref, scale) = only(body, inline.inline_mgpu_p)
    assert ref.transforms and equation.params["arg_types"][0] == inline.RefType(TILED)
    assert {name for name, _ in ref_effects(equation)} == {"ReadEffect", "WriteEffect"}


# --- Semaphores ---
def test_semaphores():
    def body(x, i, *_):
        semaphore = pl.get_global(SemaphoreType.REGULAR((2,)))
        semaphores.semaphore_signal(semaphore.at[i[0]], 2, device_id=(0, i[1]))
        semaphores.semaphore_signal(semaphore.at[0], memory_scope="gpu")
        semaphores.semaphore_wait(semaphore.at[1], decrement=False)

    equations = [e for e in traced(body) if "semaphore" in e.primitive.name]
    signal, local, wait = equations
    assert (signal.primitive, wait.primitive) == (_jax.semaphore_signal_p, _jax.semaphore_wait_p)
    assert _jax.comms_effect in signal.effects and _jax.comms_effect not in local.effects
    *_, device, _ = signal.params["args_tree"].unflatten(signal.invars)
    assert len(device) == 2
    *_, decrement = wait.params["args_tree"].unflatten(wait.invars)
    assert not decrement.val


# --- Errors ---
def gmem_to_smem(**changes):
    def call(x, i, o, smem, barrier, group, cluster):
        scope = dict(locals())
        arguments = dict(src=x.at[:32, :32], dst=smem, barrier=barrier)
        for name, change in changes.items():
            arguments[name] = change(scope) if callable(change) else change
        copies.copy_gmem_to_smem(**arguments)

    return call


def smem_to_gmem(**changes):
    def call(x, i, o, smem, barrier, group, cluster):
        scope = dict(locals())
        arguments = dict(src=smem, dst=o.at[:32, :32])
        for name, change in changes.items():
            arguments[name] = change(scope) if callable(change) else change
        copies.copy_smem_to_gmem(**arguments)

    return call


def on(function):
    return lambda x, i, o, smem, barrier, group, cluster: function(
        x=x, i=i, o=o, smem=smem, barrier=barrier, group=group, cluster=cluster
    )


CASES = [
    # Copies to shared memory
    (gmem_to_smem(src=lambda s: s["smem"]), InvalidValueError, "src is in SMEM"),
    (gmem_to_smem(dst=lambda s: s["o"].at[:32, :32]), InvalidValueError, "dst is in GMEM"),
    (gmem_to_smem(src=lambda s: s["x"][...]), InvalidTypeError, "src is not a reference"),
    (gmem_to_smem(src=3), InvalidTypeError, "src is not a reference"),
    (gmem_to_smem(dst=lambda s: s["barrier"]), InvalidTypeError, "dst is a reference to a barrier"),
    (gmem_to_smem(src=lambda s: s["i"]), InvalidValueError, "src and dst have different dtypes"),
    (gmem_to_smem(src=lambda s: s["x"]), InvalidValueError, "does not have the shape of dst"),
    (gmem_to_smem(barrier=lambda s: s["smem"]), InvalidTypeError, "barrier is not a barrier"),
    (gmem_to_smem(barrier=lambda s: s["group"]), InvalidValueError, "group of 3 barriers"),
    (
        gmem_to_smem(barrier=lambda s: s["group"].at[pl.ds(0, 2)]),
        InvalidValueError,
        "group of 2 barriers",
    ),
    (gmem_to_smem(barrier=lambda s: s["cluster"]), InvalidTypeError, "is a ClusterBarrier"),
    (gmem_to_smem(predicate=1), InvalidTypeError, "predicate is not a boolean"),
    (gmem_to_smem(oob_mode=7), InvalidTypeError, "oob_mode"),
    (gmem_to_smem(collective_axes=3), InvalidTypeError, "not an axis name"),
    (gmem_to_smem(collective_axes="nowhere"), InvalidValueError, "no axis named 'nowhere'"),
    (
        gmem_to_smem(leader_tracked=CopyPartition.REPLICATED),
        InvalidValueError,
        "leader_tracked is given without collective_axes",
    ),
    (gmem_to_smem(leader_tracked=0, collective_axes="c"), InvalidTypeError, "leader_tracked"),
    (
        gmem_to_smem(leader_tracked=CopyPartition.REPLICATED, collective_axes=("c", "d")),
        InvalidValueError,
        "one cluster axis, not 2",
    ),
    (
        gmem_to_smem(leader_tracked=CopyPartition.PARTITIONED(0), collective_axes="c"),
        InvalidValueError,
        "partitioned over 2 blocks",
    ),
    (
        gmem_to_smem(leader_tracked=CopyPartition.PARTITIONED(2), collective_axes="c"),
        InvalidValueError,
        "no axis 2",
    ),
    # Copies to global memory
    (smem_to_gmem(src=lambda s: s["x"].at[:32, :32]), InvalidValueError, "src is in GMEM"),
    (smem_to_gmem(dst=lambda s: s["smem"]), InvalidValueError, "dst is in SMEM"),
    (smem_to_gmem(dst=lambda s: s["o"]), InvalidValueError, "different shapes"),
    (smem_to_gmem(dst=lambda s: s["i"]), InvalidValueError, "different dtypes"),
    (smem_to_gmem(reduction_op="mul"), InvalidValueError, "reduction_op is unknown"),
    (smem_to_gmem(predicate=lambda s: s["i"][...] > 0), InvalidTypeError, "predicate"),
    # Waits and prefetches
    (on(lambda **_: copies.wait_smem_to_gmem(-1)), InvalidValueError, "n is too small"),
    (on(lambda i, **_: copies.wait_smem_to_gmem(i[0])), InvalidTypeError, "known while tracing"),
    (on(lambda **_: copies.wait_gmem_to_smem(True)), InvalidTypeError, "known while tracing"),
    (on(lambda smem, **_: copies.async_prefetch(smem)), InvalidValueError, "ref is in SMEM"),
    # Asynchronous stores
    (
        on(
            lambda smem, barrier, **_: copies.async_store_smem(
                smem[...], smem, barrier, cluster_idx=0, cluster_dim="c", atomic="mul"
            )
        ),
        InvalidValueError,
        "atomic is unknown",
    ),
    (
        on(
            lambda smem, barrier, **_: copies.async_store_smem(
                smem, smem, barrier, cluster_idx=0, cluster_dim="c"
            )
        ),
        InvalidTypeError,
        "src is a reference",
    ),
    (
        on(
            lambda smem, barrier, **_: copies.async_store_smem(
                smem[...], smem, barrier, cluster_idx=0.5, cluster_dim="c"
            )
        ),
        InvalidTypeError,
        "cluster_idx",
    ),
    # Barriers
    (on(lambda smem, **_: barriers.barrier_wait(smem)), InvalidTypeError, "not a barrier"),
    (on(lambda group, **_: barriers.barrier_wait(group)), InvalidValueError, "barrier.at"),
    (on(lambda group, **_: barriers.barrier_arrive(group)), InvalidValueError, "group of 3"),
    (on(lambda group, **_: barriers.barrier_test(group)), InvalidValueError, "group of 3"),
    (on(lambda **_: barriers.barrier_wait(None)), InvalidTypeError, "not a reference"),
    (
        on(lambda barrier, **_: barriers.barrier_arrive(barrier, predicate=2)),
        InvalidTypeError,
        "predicate",
    ),
    (
        on(lambda barrier, **_: barriers.barrier_wait(barrier.reshape(1))),
        InvalidValueError,
        "only indexed",
    ),
    # Arrays
    (on(lambda barrier, **_: arrays.load(barrier)), InvalidTypeError, "a barrier, not to data"),
    (on(lambda x, **_: arrays.load(x[...])), InvalidTypeError, "src is not a reference"),
    (on(lambda x, **_: arrays.atomic_add(x, x[0])), InvalidValueError, "different shapes"),
    (on(lambda x, i, **_: arrays.atomic_add(x, i[...])), InvalidValueError, "different dtypes"),
    (on(lambda x, **_: arrays.atomic_xor(x, x[...])), InvalidValueError, "works on bits"),
    (on(lambda x, **_: arrays.atomic_add(x, x)), InvalidTypeError, "val is a reference"),
    (
        on(lambda x, **_: arrays.print_layout("{} {}", x[...])),
        InvalidValueError,
        "placeholder",
    ),
    (on(lambda x, **_: arrays.print_layout(3, x[...])), InvalidTypeError, "not a string"),
    (
        on(lambda **_: arrays.broadcasted_iota(jnp.int32, (4,), 1)),
        InvalidValueError,
        "no dimension 1",
    ),
    (on(lambda x, **_: layout_cast(x[...], "WGMMA")), InvalidTypeError, "not a layout"),
    (on(lambda x, **_: layout_cast(x, Layout.WGMMA)), InvalidTypeError, "no register layout"),
    # Inlined code
    (
        on(lambda **_: inline.inline_mgpu(arg_types=("x",))),
        InvalidTypeError,
        "arg_types holds something",
    ),
    (
        on(lambda **_: inline.inline_mgpu(return_type=jax.ShapeDtypeStruct((1,), F32))),
        InvalidTypeError,
        "return_type holds something",
    ),
    (
        on(lambda x, **_: inline.inline_mgpu(arg_types=(inline.RefType(),))(print)(x[...])),
        InvalidTypeError,
        "argument 0 is an array",
    ),
    (
        on(lambda x, **_: inline.inline_mgpu(arg_types=(Layout.WGMMA,))(print)(x)),
        InvalidTypeError,
        "argument 0 is a reference",
    ),
    (on(lambda x, **_: inline.inline_mgpu()(print)(x)), InvalidTypeError, "structure of arg_types"),
    (on(lambda **_: inline.inline_mgpu(values="ours")), InvalidValueError, "values is unknown"),
    # Semaphores
    (on(lambda x, **_: semaphores.semaphore_signal(x)), InvalidTypeError, "not a semaphore"),
    (
        on(lambda **_: semaphores.semaphore_wait(pl.get_global(SemaphoreType.REGULAR((2,))))),
        InvalidValueError,
        "group of 2 semaphores",
    ),
    (
        on(
            lambda **_: semaphores.semaphore_signal(
                pl.get_global(SemaphoreType.REGULAR), device_id=1, memory_scope="gpu"
            )
        ),
        InvalidValueError,
        "does not reach another device",
    ),
    (
        on(
            lambda **_: semaphores.semaphore_wait(
                pl.get_global(SemaphoreType.REGULAR), memory_scope="block"
            )
        ),
        InvalidValueError,
        "memory_scope is unknown",
    ),
]


@pytest.mark.parametrize(("body", "error", "message"), CASES, ids=[case[2] for case in CASES])
def test_errors(body, error, message):
    """Each error has its class and message, says what would be accepted or what to do, and names
    the line of this file that the user would look at."""
    with pytest.raises(error, match=message) as caught:
        traced(body)
    text = str(caught.value)
    assert isinstance(caught.value, PallasiteError)
    assert "test_primitives.py:" in text
    assert any(word in text for word in ("got:", "expected:", "try:"))


def test_tensor_core_barrier_is_no_target_of_copies():
    def body(x, smem, barrier):
        copies.copy_gmem_to_smem(x.at[:32, :32], smem, barrier)

    k = kernel(body, scratch_types=[SMEM((32, 32), F32), Barrier(orders_tensor_core=True)])
    with pytest.raises(InvalidValueError, match="orders the tensor core"):
        k(jnp.ones((64, 64), F32))


def test_discharge_is_a_clear_error():
    def body(ref):
        arrays.atomic_add(ref, jnp.ones((4,), F32))

    with pytest.raises(UnsupportedError, match="no meaning on values"):
        jax.jit(lambda x: _jax.run_state(body)(x))(jnp.ones((4,), F32))
