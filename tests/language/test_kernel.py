"""Kernels are traced: meshes, operands, outputs, captured values, references, vmap."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from tests.language.interpreter import run_kernel, spec_of

from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite.language.kernel import kernel
from pallasite.language.kernel_call import kernel_call_p
from pallasite.language.memory import GMEM, SMEM
from pallasite.language.mesh import Mesh
from pallasite.language.params import CompilerParams, LoweringSemantics
from pallasite.language.tracing import identifier
from pallasite_std.barriers.types import Barrier
from pallasite_std.pipelines.helpers import warp_map
from pallasite_std.primitives.arrays import atomic_add

F32 = jnp.float32
X = jax.ShapeDtypeStruct((8, 32), F32)


def names_of(jaxpr):
    return [equation.primitive.name for equation in jaxpr.eqns]


def copy_body(x, o):
    o[...] = x[...]


def ones(*shape):
    return jnp.ones(shape, F32)


# --- Structure ---
def test_spec():
    k = kernel(
        copy_body,
        out_type=X,
        grid=(2, 3),
        grid_names=("a", "b"),
        cluster=(2,),
        cluster_names=("c",),
        num_threads=2,
        thread_name="t",
        compiler_params=CompilerParams(approx_math=True, target="sm_90a"),
    )
    spec = spec_of(k, ones(8, 32))
    assert spec.name == "copy_body"
    assert dict(spec.mesh.shape) == {"a": 2, "b": 3, "c": 2, "t": 2}
    assert spec.params.approx_math and spec.params.target == "sm_90a"
    assert [v.aval.memory_space for v in spec.jaxpr.invars] == [GMEM, GMEM]
    assert not spec.jaxpr.outvars and not spec.jaxpr.consts
    assert names_of(spec.jaxpr) == ["get", "swap"]
    assert spec.location.file.endswith("test_kernel.py")


def test_decorator_and_older_names():
    @kernel(out_shape=[X, X], scratch_shapes=[SMEM((8, 32), F32)])
    def two(x, a, b, scratch):
        scratch[...] = x[...]
        a[...] = scratch[...]
        b[...] = scratch[...] + 1

    a, b = jax.eval_shape(two, ones(8, 32))
    assert a.shape == b.shape == (8, 32)
    assert two.__name__ == "two"


def test_trees_of_operands_and_named_scratch():
    def body(inputs, out, *, scratch, barrier):
        assert barrier.shape == ()
        scratch[...] = inputs["a"][...]
        out["sum"][...] = scratch[...] + inputs["b"][0][...]

    k = kernel(
        body,
        out_type={"sum": X},
        scratch_types=dict(scratch=SMEM((8, 32), F32), barrier=Barrier()),
    )
    operands = {"a": np.ones((8, 32), np.float32), "b": [np.ones((8, 32), np.float32)]}
    spec = spec_of(k, operands)
    (out,), _ = run_kernel(spec, *jax.tree.leaves(operands))
    assert (out == 2).all()
    assert set(jax.eval_shape(k, operands)) == {"sum"}


def test_scratch_is_shared_by_threads():
    def body(o, scratch):
        scratch[...] = o[...]

    k = kernel(body, out_type=X, scratch_types=[SMEM((8, 32), F32)], num_threads=2, thread_name="t")
    (equation,) = spec_of(k).jaxpr.eqns
    assert equation.params["collective_axes"] == ("t",)


def test_program_ids_and_axis_names():
    def body(o):
        assert pl.num_programs(1) == 3
        o[...] = jnp.full(o.shape, 10 * pl.program_id(0) + lax.axis_index("b"), F32)

    k = kernel(body, out_type=X, grid=(2, 3), grid_names=("a", "b"))
    (out,), blocks = run_kernel(spec_of(k))
    assert len(blocks) == 6 and (out == 12).all()


def test_names_are_identifiers():
    assert identifier("a b-c") == "a_b_c"
    assert identifier("<lambda>") == "lambda"
    assert identifier("2x") == "kernel_2x"
    k = kernel(functools.partial(copy_body), out_type=X, kernel_name="my kernel")
    assert spec_of(k, ones(8, 32)).name == "my_kernel"


def test_trace_is_kept():
    traced = []

    @kernel(out_type=X)
    def body(x, o):
        traced.append(1)
        o[...] = x[...]

    first, second = spec_of(body, ones(8, 32)), spec_of(body, ones(8, 32))
    assert first is second and len(traced) == 1


def test_body_runs_under_jit_and_keeps_locations():
    k = jax.jit(kernel(copy_body, out_type=X))
    jaxpr = jax.make_jaxpr(k)(ones(8, 32))
    (equation,) = jaxpr.eqns[0].params["jaxpr"].eqns
    from pallasite import _jax

    location = _jax.user_location(equation.params["spec"].jaxpr.eqns[0].source_info)
    assert location.file.endswith("test_kernel.py") and location.function == "copy_body"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_array_stands_for_its_type(wrap):
    types = []

    def call(x):
        types.append(jax.eval_shape(kernel(copy_body, out_type=x), x))
        return x

    wrap(call)(ones(8, 32))
    assert types == [jax.ShapeDtypeStruct((8, 32), F32)]


def test_warp_map():
    def body(o):
        @warp_map
        def _(warp):
            @pl.when(warp == 1)
            def _():
                o[0, 0] = jnp.float32(1)

    (equation,) = spec_of(kernel(body, out_type=X)).jaxpr.eqns
    assert equation.primitive.name == "mpmd_map"
    assert list(equation.params["meshes"][0].shape.values()) == [4]


# --- Captured values ---
def test_captured_scalars():
    """A known scalar becomes a literal, a traced one an input of shape ()."""
    known = jnp.float32(3)

    def call(x, traced):
        def body(x, o):
            o[...] = x[...] * known + traced

        return kernel(body, out_type=X)(x)

    spec = spec_of(call, ones(8, 32), jnp.float32(2))
    assert [aval.shape for aval in spec.in_avals] == [(8, 32), ()]
    (out,), _ = run_kernel(spec, ones(8, 32), np.float32(2))
    assert (out == 5).all()


def test_captured_scalar_under_vmap():
    def call(x, traced):
        def body(x, o):
            o[...] = x[...] + traced

        return kernel(body, out_type=X)(x)

    values = jnp.arange(3, dtype=F32)
    spec = spec_of(jax.vmap(call, in_axes=(None, 0)), ones(8, 32), values)
    assert [aval.shape for aval in spec.in_avals] == [(8, 32), (3,)]
    (out,), _ = run_kernel(spec, ones(8, 32), values)
    np.testing.assert_array_equal(out[:, 0, 0], [1, 2, 3])


def test_large_captured_array_is_an_error():
    table = np.ones((1025,), np.float32)

    def body(x, o):
        o[...] = x[...] + jnp.asarray(table)[0]

    with pytest.raises(InvalidValueError, match=r"captures an array of shape \(1025,\)") as caught:
        kernel(body, out_type=X)(ones(8, 32))
    assert "as an operand" in str(caught.value) and "test_kernel.py" in str(caught.value)


# --- References ---
def test_reference_operand_is_updated():
    def body(x_ref, o):
        o[...] = x_ref[...]
        x_ref[...] = o[...] + 1

    k = kernel(body, out_type=X)

    def call(x):
        ref = jax.new_ref(x)
        out = k(ref)
        return out, ref[...]

    jaxpr = jax.make_jaxpr(call)(ones(8, 32))
    (equation,) = (e for e in jaxpr.eqns if e.primitive is kernel_call_p)
    assert {str(effect) for effect in jaxpr.effects} >= set()
    assert any("Write" in str(type(effect)) for effect in equation.effects)

    from pallasite import _jax

    def stateful(ref):
        return k(ref)

    inner = jax.make_jaxpr(stateful)(jax.new_ref(ones(8, 32)))
    discharged = _jax.discharge_state(inner)
    (equation,) = (e for e in discharged.eqns if e.primitive is kernel_call_p)
    spec = equation.params["spec"]
    assert spec.input_output_aliases == ((0, 1),)
    assert [aval.shape for aval in spec.out_avals] == [(8, 32), (8, 32)]
    assert len(spec.jaxpr.invars) == 3 and len(discharged.outvars) == 2


def test_captured_reference():
    def call(x):
        ref = jax.new_ref(x)

        def body(o):
            o[...] = ref[...]
            ref[...] = o[...]

        return kernel(body, out_type=X)(), ref[...]

    jaxpr = jax.make_jaxpr(call)(ones(8, 32))
    (equation,) = (e for e in jaxpr.eqns if e.primitive is kernel_call_p)
    assert len(equation.invars) == 1


def test_one_reference_twice_is_an_error():
    ref = jax.new_ref(ones(8, 32))
    with pytest.raises(InvalidValueError, match="twice"):
        kernel(lambda a, b, o: None, out_type=X)(ref, ref)


def test_unwritten_kernel_without_outputs_is_dropped_and_a_written_one_kept():
    def call(x):
        ref = jax.new_ref(x)
        kernel(lambda r: None)(ref)
        kernel(lambda r: r.__setitem__(..., r[...] + 1))(ref)
        return ref[...]

    jaxpr = jax.make_jaxpr(call)(ones(8, 32))
    calls = [e for e in jaxpr.eqns if e.primitive is kernel_call_p]
    assert sum(bool(e.effects) for e in calls) == 1


def test_aliases():
    k = kernel(copy_body, out_type=X, input_output_aliases={0: 0})
    assert spec_of(k, ones(8, 32)).input_output_aliases == ((0, 0),)
    with pytest.raises(InvalidValueError, match="cannot share a buffer"):
        spec_of(k, ones(8, 16))
    with pytest.raises(InvalidValueError, match="no such pair"):
        spec_of(kernel(copy_body, out_type=X, input_output_aliases={1: 0}), ones(8, 32))


def test_loops_stay_loops_without_jit():
    """``jax.disable_jit`` is for what runs in Python, which a kernel's body never does."""

    def body(x, o):
        def step(i, total):
            return total + lax.cond(i < 2, lambda: x[i], lambda: x[0])

        o[0] = lax.fori_loop(0, 4, step, jnp.zeros((32,), F32))

    call = kernel(body, out_type=jax.ShapeDtypeStruct((1, 32), F32))
    with jax.disable_jit():
        spec = spec_of(call, ones(2, 32))
    assert [one.primitive.name for one in spec.jaxpr.eqns].count("scan") == 1


# --- vmap ---
def test_vmap():
    def body(x, y, o, scratch):
        def step(i, total):
            @pl.when(pl.program_id(0) == 1)
            def _():
                scratch[...] = x[0]

            return total + x[i] * y[0]

        scratch[...] = jnp.zeros(scratch.shape, F32)
        o[pl.program_id(0)] = lax.fori_loop(0, 4, step, jnp.zeros((32,), F32)) + scratch[...]

    k = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 32), F32),
        scratch_types=[SMEM((32,), F32)],
        grid=(2,),
        grid_names=("g",),
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 3, 32)).astype("f"), rng.normal(size=(1, 32)).astype("f")
    spec = spec_of(jax.vmap(k, in_axes=(1, None), out_axes=0), x, y)
    assert spec.mesh.grid == (3, 2)
    assert [aval.shape for aval in spec.in_avals] == [(3, 4, 32), (1, 32)]
    (out,), _ = run_kernel(spec, x.transpose(1, 0, 2), y)
    expected = (x.sum(0) * y[0])[:, None] + np.stack([np.zeros_like(x[0]), x[0]], 1)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_nested_vmap():
    k = jax.vmap(jax.vmap(kernel(copy_body, out_type=X)))
    x = np.random.default_rng(0).normal(size=(2, 3, 8, 32)).astype("f")
    (out,), blocks = run_kernel(spec_of(k, x), x)
    np.testing.assert_array_equal(out, x)
    assert len(blocks) == 6


def test_vmap_over_nothing():
    """There is nothing to launch."""
    k = kernel(copy_body, out_type=X)
    x = jnp.zeros((0, *X.shape), X.dtype)
    out = jax.vmap(jax.vmap(k, in_axes=1), in_axes=1)(jnp.zeros((X.shape[0], 2, 0, *X.shape[1:])))
    assert jax.jit(jax.vmap(k))(x).shape == x.shape
    assert out.shape == (2, *x.shape)


def test_vmap_selects_in_our_primitives():
    def body(x, total):
        atomic_add(total, x[...])

    def call(x):
        return kernel(body, out_type=X)(x)

    spec = spec_of(jax.vmap(call), ones(3, 8, 32))
    (equation,) = (e for e in spec.jaxpr.eqns if e.primitive.name == "atomic")
    ref, _ = equation.params["args_tree"].unflatten(equation.invars)
    (indexer,) = ref.transforms
    assert indexer.get_indexer_shape() == (8, 32)


def test_vmap_over_nothing_batched():
    k = kernel(copy_body, out_type=X)
    spec = spec_of(jax.vmap(lambda i, x: (k(x), i), in_axes=(0, None)), jnp.arange(3), ones(8, 32))
    assert spec.mesh.grid == ()


def test_vmap_of_references():
    def body(r):
        r[...] = r[...] + 1

    k = kernel(body)
    with pytest.raises(InvalidValueError, match="write one reference"):
        ref = jax.new_ref(ones(8, 32))

        def call(x):
            def capturing(r):
                r[...] = r[...] + x

            kernel(capturing)(ref)

        jax.make_jaxpr(jax.vmap(call))(jnp.arange(3, dtype=F32))
    del k


# --- Errors ---
@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (InvalidValueError, "grid has 1 axes but grid_names has 0", dict(grid=(2,))),
        (
            InvalidValueError,
            "cluster has 1 axes but cluster_names has 2",
            dict(cluster=(2,), cluster_names=("a", "b")),
        ),
        (
            InvalidValueError,
            "cannot have 4 axes",
            dict(cluster=(1, 1, 1, 1), cluster_names=tuple("abcd")),
        ),
        (InvalidValueError, "num_threads is given without thread_name", dict(num_threads=2)),
        (InvalidValueError, "thread_name is given without num_threads", dict(thread_name="t")),
        (
            InvalidValueError,
            "too many threads per block: 17",
            dict(num_threads=17, thread_name="t"),
        ),
        (InvalidValueError, "num_threads is too small", dict(num_threads=0, thread_name="t")),
        (
            InvalidValueError,
            "'a' is used more than once",
            dict(grid=(1,), grid_names=("a",), cluster=(1,), cluster_names=("a",)),
        ),
        (InvalidValueError, r"grid\[0\] is not positive", dict(grid=(0,), grid_names=("a",))),
        (InvalidTypeError, r"grid\[0\] is a float", dict(grid=(2.0,), grid_names=("a",))),
        (InvalidTypeError, "grid is an integer", dict(grid=2, grid_names=("a",))),
        (InvalidTypeError, "grid_names is a single string", dict(grid=(1, 1), grid_names="ab")),
        (InvalidTypeError, "no parameter 'gird'", dict(gird=(1,))),
        (InvalidTypeError, "another backend", dict(compiler_params=object())),
        (InvalidTypeError, "interpret", dict(interpret="yes")),
        (InvalidValueError, "both given", dict(out_type=X, out_shape=X)),
    ],
)
def test_bad_arguments(error, message, arguments):
    with pytest.raises(error, match=message) as caught:
        kernel(copy_body, **arguments)
    assert "test_kernel.py" in str(caught.value)


def test_body_that_returns():
    with pytest.raises(InvalidTypeError, match="body of kernel body returns a value") as caught:

        def body(x, o):
            return x[...]

        kernel(body, out_type=X)(ones(8, 32))
    assert "test_kernel.py" in str(caught.value) and "(body)" in str(caught.value)


@pytest.mark.parametrize(
    ("message", "operand"),
    [("not an array", "text"), ("keys of a generator", jax.random.key(0, impl="rbg"))],
)
def test_bad_operands(message, operand):
    with pytest.raises(InvalidTypeError, match=message):
        kernel(copy_body, out_type=X)(operand)


def test_bad_outputs():
    with pytest.raises(InvalidTypeError, match="output 0 of kernel copy_body has no type"):
        kernel(copy_body, out_type=3)(ones(8, 32))
    with pytest.raises(InvalidValueError, match="not in global memory"):
        kernel(copy_body, out_type=SMEM((8, 32), F32))(ones(8, 32))
    assert spec_of(kernel(copy_body, out_type=GMEM((8, 32), F32)), ones(8, 32))


def test_view_operand():
    def call(x):
        return kernel(copy_body, out_type=X)(jax.new_ref(x).at[0])

    with pytest.raises(InvalidTypeError, match="view of a reference"):
        jax.make_jaxpr(call)(ones(8, 32))


def test_no_derivative():
    k = kernel(copy_body, out_type=X)
    with pytest.raises(UnsupportedError, match="differentiated"):
        jax.grad(lambda x: k(x).sum())(ones(8, 32))


def with_scratch(x, o, tile, copied):
    tile[...] = x[...]
    o[...] = tile[...]


def with_named_scratch(x, o, *, tile, copied):
    with_scratch(x, o, tile, copied)


def with_default(x, o, tile=None):
    (tile if tile is not None else o)[...] = x[...]
    o[...] = x[...]


def with_named_default(x, o, /, *, tile=None):
    with_default(x, o, tile)


def with_any_references(*refs, tile=None):
    with_default(*refs, tile)


def with_number(number, x, o, tile=None):
    with_default(x, o, tile)


class Body:
    """Bodies that are no plain functions."""

    def method(self, x, o, tile=None):
        with_default(x, o, tile)

    __call__ = method


def passing_a_number(function):
    """A decorator whose function takes less than that which it wraps."""

    @functools.wraps(function)
    def passing(x, o, tile=None):
        function(3, x, o, tile)

    return passing


TILE = SMEM((8, 32), F32)
NAMED_TILE = {"tile": TILE}


@pytest.mark.parametrize(
    ("body", "scratch"),
    [
        (copy_body, []),
        (lambda *refs: copy_body(*refs), []),
        (lambda x, o, factor=1: copy_body(x, o), []),
        (with_scratch, [SMEM((8, 32), F32), Barrier()]),
        (with_named_scratch, {"tile": SMEM((8, 32), F32), "copied": Barrier()}),
        (with_default, []),
        (with_default, [TILE]),
        (with_default, NAMED_TILE),
        (with_named_default, NAMED_TILE),
        (with_any_references, NAMED_TILE),
        (functools.partial(with_number, 3), [TILE]),
        (functools.partial(with_number, 3), NAMED_TILE),
        (Body().method, [TILE]),
        (Body().method, NAMED_TILE),
        (Body(), NAMED_TILE),
        (passing_a_number(with_number), [TILE]),
        (passing_a_number(with_number), NAMED_TILE),
    ],
)
def test_custom_derivatives_and_batching_of_the_kernel_itself(body, scratch):
    copy = kernel(body, out_type=X, scratch_types=scratch)

    @jax.custom_vjp
    def halved(x):
        return copy(x)

    differentiable = jax.custom_vjp(copy)
    for one in (differentiable, halved):
        one.defvjp(lambda x: (copy(x), None), lambda _, gradient: (gradient / 2,))
    found = jax.make_jaxpr(jax.grad(lambda x: differentiable(x).sum()))(X)
    assert names_of(found.jaxpr) == names_of(
        jax.make_jaxpr(jax.grad(lambda x: halved(x).sum()))(X).jaxpr
    )
    forward = jax.custom_jvp(copy)
    forward.defjvp(lambda primals, tangents: (copy(*primals), *tangents))
    assert jax.eval_shape(lambda x: jax.jvp(forward, (x,), (x,)), X)[1].shape == X.shape
    batched = jax.custom_batching.custom_vmap(copy)
    batched.def_vmap(lambda size, axes, x: (x, axes[0]))
    assert jax.eval_shape(jax.vmap(batched), jax.ShapeDtypeStruct((3, 8, 32), F32)).shape[0] == 3


def test_parameters_have_the_names_of_operands():
    copy = kernel(with_scratch, out_type=X, scratch_types=[SMEM((8, 32), F32), Barrier()])
    assert list(inspect.signature(copy).parameters) == ["x"]


@pytest.mark.parametrize(
    ("body", "scratch", "names"),
    [
        (with_default, [], ["x"]),
        (with_default, NAMED_TILE, ["x"]),
        (with_default, [TILE], ["operands"]),  # The tile, or the output and the tile.
        (with_named_default, NAMED_TILE, ["x"]),
        (with_any_references, NAMED_TILE, ["operands"]),
        (functools.partial(with_number, 3), NAMED_TILE, ["x"]),
        (functools.partial(with_number, 3), [TILE], ["operands"]),
        (Body().method, NAMED_TILE, ["x"]),
        (Body(), NAMED_TILE, ["x"]),
        (passing_a_number(with_number), NAMED_TILE, ["x"]),
        (with_scratch, {"tile": TILE, "copied": Barrier()}, ["x"]),
    ],
)
def test_scratch_is_no_parameter_whatever_its_default(body, scratch, names):
    copy = kernel(body, out_type=X, scratch_types=scratch)
    assert list(inspect.signature(copy).parameters) == names
    assert jax.eval_shape(copy, X).shape == X.shape


def test_operands_by_name():
    copy = kernel(with_default, out_type=X, scratch_types=NAMED_TILE)
    assert jax.eval_shape(lambda x: copy(x=x), X).shape == X.shape
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        copy(y=ones(8, 32))
    anything = kernel(lambda *refs: copy_body(*refs), out_type=X)
    with pytest.raises(TypeError, match="'x'"):
        anything(x=ones(8, 32))


def test_mesh_is_hashable_and_replaceable():
    mesh = Mesh(grid=[2], grid_names=["a"])
    assert hash(mesh) == hash(Mesh(grid=(2,), grid_names=("a",)))
    assert mesh.replace(grid=(3,)).shape == {"a": 3}


# --- Parameters ---
def test_params():
    params = CompilerParams()
    assert params.lowering_semantics is LoweringSemantics.Warpgroup and params.target is None
    assert params.max_concurrent_steps == 1 and params.reduction_scratch_bytes == 2048
    assert hash(params) == hash(CompilerParams())
    assert params.replace(approx_math=True).approx_math
    lane = CompilerParams(lowering_semantics=LoweringSemantics.Lane)
    assert lane.lowering_semantics is LoweringSemantics.Lane and lane != params
    assert CompilerParams(dimension_semantics=["parallel"]).dimension_semantics == ("parallel",)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (InvalidValueError, r"dimension_semantics\[0\]", dict(dimension_semantics=("arbitrary",))),
        (InvalidValueError, "go together", dict(profile_space=4)),
        (InvalidValueError, "max_concurrent_steps", dict(max_concurrent_steps=0)),
        (InvalidTypeError, "lowering_semantics", dict(lowering_semantics="lane")),
        (InvalidTypeError, "target", dict(target=90)),
    ],
)
def test_bad_params(error, message, arguments):
    with pytest.raises(error, match=message):
        CompilerParams(**arguments)


def test_upstream_semantics_enum_is_accepted():
    from jax.experimental.mosaic.gpu.core import LoweringSemantics as Theirs

    assert CompilerParams(lowering_semantics=Theirs.Lane).lowering_semantics is (
        LoweringSemantics.Lane
    )


@pytest.mark.parametrize("scratch", [3, [3], {"tile": (4, 4)}, [SMEM((4,), jnp.float32), "x"]])
def test_scratch_that_is_no_allocation(scratch):
    with pytest.raises(InvalidTypeError, match="scratch_types are no allocations"):
        kernel(lambda o, *refs: None, out_type=X, scratch_types=scratch)()
