"""Every example compiles for Hopper and Blackwell, and runs correctly where there is a GPU."""

from __future__ import annotations

import contextlib
import pathlib

import jax
import numpy as np
import pytest

import pallasite
from examples import catalog
from pallasite.codegen.tools import find_tool
from pallasite.target_selection import find_target

EXAMPLES = catalog.all_examples()


SPILLS = {("softmax_bf16_32768", "sm_100a"): 8}
"""Bytes that ptxas spills: with 512 threads, 128 registers are all that there are."""


def by_name(example: catalog.Example) -> str:
    return example.name


@pytest.fixture(scope="module", params=EXAMPLES, ids=by_name)
def example(request: pytest.FixtureRequest) -> catalog.Example:
    """Each example; all that is tested of it is tested together."""
    return request.param


@pytest.fixture(scope="module")
def inputs(example: catalog.Example) -> tuple[jax.Array, ...]:
    """Made once for all tests of an example: to make random arrays takes long on the CPU."""
    return example.make_inputs(jax.random.key(0))


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.sampled(alone=("example", "target"))
def test_compiles(example: catalog.Example, target: str):
    if not example.needs <= find_target(target).features:
        pytest.skip(f"{target} does not have {', '.join(example.needs)}")
    types = jax.eval_shape(example.make_inputs, jax.random.key(0))
    assembler = find_tool("ptxas").path is not None
    with pallasite.config.scoped(cache=False):
        kernel = pallasite.compile(example.function, *types, target=target, assemble=assembler)
    assert f".target {target}" in kernel.ptx
    if assembler:
        assert kernel.cubin
        assert kernel.resources.spill_store_bytes <= SPILLS.get((example.name, target), 0)


@pytest.mark.runs_kernels
def test_runs(example: catalog.Example, inputs: tuple[jax.Array, ...]):
    scope: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not example.needs <= find_target("sm_90a").features:
        if jax.default_backend() == "gpu":
            pytest.skip("the kernel is for chips that are not there")
        scope = pallasite.target("sm_100a")
    with scope:
        example.check(inputs, jax.jit(example.function)(*inputs))


def test_reference_has_the_shape_of_the_output(
    example: catalog.Example, inputs: tuple[jax.Array, ...]
):
    expected = example.reference(*[catalog.in_high_precision(array) for array in inputs])
    assert expected.shape == jax.eval_shape(example.function, *inputs).shape
    assert np.isfinite(expected).all()


def test_names_are_unique():
    names = [example.name for example in EXAMPLES]
    assert len(names) == len(set(names))


def test_every_module_is_listed():
    folder = pathlib.Path(catalog.__file__).parent
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "EXAMPLES = [" in path.read_text()
    }
    assert modules == set(catalog.MODULES)


def test_common_types_appear():
    types = {
        str(array.dtype)
        for example in EXAMPLES
        for array in jax.eval_shape(example.make_inputs, jax.random.key(0))
    }
    assert types >= {"float32", "bfloat16", "float16", "int32", "int8"}


def test_check_refuses_wrong_results():
    example = next(one for one in EXAMPLES if one.name == "vector_add_i32")
    inputs = example.make_inputs(jax.random.key(0))
    right = inputs[0] + inputs[1]
    assert example.check(inputs, right) == 0
    with pytest.raises(AssertionError, match="relative error"):
        example.check(inputs, right.at[7].add(1))
    with pytest.raises(AssertionError, match="shape"):
        example.check(inputs, right[:-1])


def test_multicast_is_one_copy_for_the_cluster():
    example = next(one for one in EXAMPLES if one.name == "multicast_f32_cluster_4")
    inputs = jax.eval_shape(example.make_inputs, jax.random.key(0))
    kernel = pallasite.compile(example.function, *inputs, target="sm_90a")
    assert kernel.launch.cluster == (4, 1, 1)
    assert ".multicast::cluster" in kernel.ptx


def test_tma_reduction_adds_in_memory():
    example = next(one for one in EXAMPLES if one.name == "tma_reduce_f32")
    inputs = jax.eval_shape(example.make_inputs, jax.random.key(0))
    kernel = pallasite.compile(example.function, *inputs, target="sm_90a")
    assert "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add" in kernel.ptx


def test_swizzle_reaches_the_descriptors():
    for swizzle in (16, 32, 64, 128):
        name = f"tiled_copy_bf16_swizzle_{swizzle}"
        example = next(one for one in EXAMPLES if one.name == name)
        inputs = jax.eval_shape(example.make_inputs, jax.random.key(0))
        kernel = pallasite.compile(example.function, *inputs, target="sm_90a")
        maps = [p for p in kernel.launch.parameters if hasattr(p, "swizzle")]
        assert [p.swizzle for p in maps] == [swizzle, swizzle]
