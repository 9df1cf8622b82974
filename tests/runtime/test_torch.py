"""``plgpu.as_torch_kernel``: on the CPU by the simulator, on a GPU by a driver that records.

PyTorch and the driver are stand-ins on NumPy arrays, so that no GPU is needed.
"""

from __future__ import annotations

import ctypes
import sys

import fake_torch
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallasite import config
from pallasite import gpu as plgpu
from pallasite.codegen.tools import find_tool
from pallasite.errors import (
    ExecutionError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
)
from pallasite.launch import TensorMapParameter
from pallasite.runtime import compiler
from pallasite_std.torch import kernel as torch_kernel
from pallasite_std.torch.launch import CudaKernel, HostKernel

SHAPE = (2, 128)


@pytest.fixture(autouse=True)
def torch(monkeypatch):
    module = fake_torch.make_module()
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def driver(monkeypatch):
    found = fake_torch.FakeDriver()
    monkeypatch.setattr("pallasite_std.torch.cuda_driver.library", lambda: found)
    compiler._watch_code()  # What was patched makes what was compiled before out of date.
    return found


def tensor(array, where="cpu"):
    return fake_torch.Tensor(fake_torch.aligned(np.asarray(array)), where)


def random(dtype=np.float32, seed=0, where="cpu", shape=SHAPE):
    values = np.random.default_rng(seed).integers(-100, 100, shape)
    return tensor(values.astype(dtype), where)


def add_body(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def kernel(body, shape=SHAPE, dtype=jnp.float32, **arguments):
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(shape, dtype), **arguments)


add = kernel(add_body)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.int8])
def test_numbers(dtype):
    """Tensors in, tensors out, in every dtype, those unknown to NumPy too."""
    x, y = random(dtype), random(dtype, 1)
    out = plgpu.as_torch_kernel(kernel(add_body, dtype=dtype))(x, y)
    assert isinstance(out, fake_torch.Tensor) and str(out.dtype) == str(x.dtype)
    np.testing.assert_array_equal(out.array, x.array + y.array)


@pytest.mark.runs_kernels
def test_several_kernels_and_views():
    """Kernels one after the other, with shapes, dtypes and constants between them."""

    @jax.jit
    def function(inputs):
        x, y, row = inputs["x"], inputs["y"], inputs["row"]
        both = add(x, y.T)
        table = jnp.arange(256, dtype=jnp.float32).reshape(SHAPE) * 2
        rows = jnp.broadcast_to(row[None], SHAPE)
        result = add(add(both, table), rows)
        return {"sum": result.reshape(256).astype(jnp.int32), "x": x, "table": table}

    x, y = random(), random(seed=1, shape=SHAPE[::-1])
    call = plgpu.as_torch_kernel(function)
    row = random(seed=2, shape=SHAPE[1:])
    out = call({"x": x, "y": y, "row": row})
    table = np.arange(256, dtype=np.float32).reshape(SHAPE) * 2
    expected = x.array + y.array.T + table + row.array
    np.testing.assert_array_equal(out["sum"].array, expected.reshape(256).astype(np.int32))
    assert out["x"] is x
    out["table"].array[...] = 0  # A constant is not given away.
    np.testing.assert_array_equal(call({"x": x, "y": y, "row": row})["table"].array, table)


@pytest.mark.runs_kernels
def test_calls_within_the_function():
    """Calls of all kinds, captured arrays, and ``pl.pallas_call``."""
    ones = np.ones(SHAPE, np.float32)
    structure = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    pallas_call = pl.pallas_call(
        add_body, out_shape=structure, compiler_params=plgpu.CompilerParams()
    )

    @jax.custom_vjp
    def twice(x):
        return jax.jit(pallas_call)(x, x)

    twice.defvjp(lambda x: (twice(x), None), lambda _, g: (g,))

    @jax.checkpoint
    def function(x):
        return add(twice(x), jnp.asarray(ones))

    x = random()
    np.testing.assert_array_equal(plgpu.as_torch_kernel(function)(x).array, 2 * x.array + 1)


def increment(x_ref, o_ref):
    o_ref[...] = o_ref[...] + 1


@pytest.mark.runs_kernels
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_in_place(where):
    """An output that shares memory with an argument is that argument, unless it is used again."""
    if where == "cuda":
        mode = plgpu.InterpretGPUParams()  # Runs on the host, wherever the tensors are.
    else:
        mode = None
    step = kernel(increment, input_output_aliases={0: 0}, interpret=mode)
    x = random(where=where)
    before = x.array.copy()
    out = plgpu.as_torch_kernel(step)(x)
    assert out is x
    np.testing.assert_array_equal(x.array, before + 1)

    once, old = plgpu.as_torch_kernel(lambda x: (step(step(x)), x.reshape(256)))(x)
    np.testing.assert_array_equal(once.array, before + 3)
    np.testing.assert_array_equal(x.array, before + 1)
    np.testing.assert_array_equal(old.array, x.array.reshape(256))

    keeps = kernel(
        lambda x_ref, y_ref, o_ref: o_ref.__setitem__(..., o_ref[...] + y_ref[...]),
        input_output_aliases={0: 0},
        interpret=mode,
    )
    out = plgpu.as_torch_kernel(keeps)(x, x)  # Both arguments are one tensor.
    np.testing.assert_array_equal(x.array, before + 1)
    np.testing.assert_array_equal(out.array, 2 * (before + 1))


@pytest.mark.runs_kernels
def test_strided_arguments():
    """Arguments need not be row-major."""
    x, y = random(shape=SHAPE[::-1]).permute((1, 0)), random(seed=1)
    out = plgpu.as_torch_kernel(add)(x, y)
    np.testing.assert_array_equal(out.array, x.array + y.array)


def test_programs_are_kept(monkeypatch):
    """Traced and compiled once for the same types."""
    traces = []

    def function(x, y):
        traces.append(x.shape)
        return add(x, y)

    monkeypatch.setattr(HostKernel, "__call__", lambda self, operands, *rest: [operands[0]])
    call = plgpu.as_torch_kernel(function)
    for _ in range(3):
        call(random(), random())
    assert traces == [SHAPE]
    assert call.__name__ == "function"


# On a GPU ---------------------------------------------------------------------------------------


def test_launch_with_pointers(driver):
    """The table of parameters leads to the tensors' addresses; each kernel is loaded once."""
    driver.sizes = (8,) * 5
    x, y = random(where="cuda:0"), random(seed=1, where="cuda:0")

    def compute(values):
        first, second, result, *null = [int.from_bytes(value, "little") for value in values]
        assert null == [0, 0]
        assert (first, second) == (x.data_ptr(), y.data_ptr())
        ctypes.memmove(result, (x.array + y.array).tobytes(), x.array.nbytes)

    driver.on_launch = compute
    call = plgpu.as_torch_kernel(add)
    for _ in range(2):
        out = call(x, y)
        np.testing.assert_array_equal(out.array, x.array + y.array)
        assert str(out.device) == "cuda:0"
    (image,) = driver.of("cuModuleLoadData")
    assert image[0][:4] == b"\x7fELF" or b".visible .entry add_body" in image[0]
    assert driver.of("cuModuleGetFunction") == [(11, b"add_body")]
    launches = driver.of("cuLaunchKernel")
    assert len(launches) == 2
    function, *grid_and_block, shared, stream, _, extra = launches[0]
    assert (function, stream, extra) == (22, 77, None)
    assert grid_and_block == [1, 1, 1, 128, 1, 1]
    assert driver.of("cuFuncSetAttribute") == [(22, 8, shared)]


@pytest.mark.parametrize("assembler", ["auto", "off"])
def test_what_the_driver_is_handed(driver, assembler):
    """Machine code, so that it does not assemble the kernel again; PTX without an assembler."""
    driver.sizes = (8,) * 5
    x = random(where="cuda:0")
    with config.scoped(ptxas=assembler):
        plgpu.as_torch_kernel(add)(x, x)
        found = find_tool("ptxas").path
    ((image,),) = driver.of("cuModuleLoadData")
    if found is None:
        assert b".visible .entry add_body" in image
    else:
        assert image[:4] == b"\x7fELF" and assembler == "auto"


def copy_body(x_ref, o_ref, scratch, barrier):
    plgpu.copy_gmem_to_smem(x_ref, scratch, barrier)
    plgpu.barrier_wait(barrier)
    o_ref[...] = scratch[...]


def test_tensor_maps(driver):
    """Descriptors are encoded minor to major with strides in bytes, once for each address."""
    shape = (64, 64)
    copy = kernel(
        copy_body,
        shape,
        jnp.bfloat16,
        scratch_types=[
            plgpu.SMEM(
                shape,
                jnp.bfloat16,
                transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
            ),
            plgpu.Barrier(),
        ],
    )
    call = plgpu.as_torch_kernel(copy)
    x = random(ml_dtypes.bfloat16, where="cuda:0", shape=shape)
    kernels = []
    original = torch_kernel.CudaKernel

    class Remembered(original):
        def __init__(self, compiled):
            super().__init__(compiled)
            kernels.append(self)
            driver.sizes = (
                *(128 if isinstance(p, TensorMapParameter) else 8 for p in self.parameters()),
                *(8, 8),
            )

        def parameters(self):
            return self.compiled.launch.parameters

    seen = []
    driver.on_launch = lambda values: seen.extend(v for v in values if len(v) == 128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_kernel, "CudaKernel", Remembered)
        compiler._watch_code()
        call(x)
        call(x)
    (encoded,) = driver.of("cuTensorMapEncodeTiled")
    assert seen == [bytes([1] * 128)] * 2
    kind, rank, pointer, extents, strides, box, steps, *modes = encoded
    (parameter,) = [p for p in kernels[0].parameters() if isinstance(p, TensorMapParameter)]
    assert pointer == x.data_ptr() and kind == 9
    assert rank == len(parameter.shape) == len(strides) + 1
    assert extents == list(parameter.shape[::-1]) and box == list(parameter.box[::-1])
    assert strides == [2 * stride for stride in parameter.strides[-2::-1]]
    assert steps == [1] * rank
    assert modes == [0, 3, 0, 0]


def test_in_place_on_a_gpu(driver):
    """The kernel gets the argument's own address, or that of a copy if it is used again."""
    driver.sizes = (8,) * 4
    addresses = []
    driver.on_launch = lambda values: addresses.append(int.from_bytes(values[0], "little"))
    step = kernel(increment, input_output_aliases={0: 0})
    x = random(where="cuda:0")
    compiled_sizes = []
    original = CudaKernel.__init__

    def remember(self, compiled):
        original(self, compiled)
        compiled_sizes.append(len(compiled.launch.parameters))
        driver.sizes = (8,) * (len(compiled.launch.parameters) + 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaKernel, "__init__", remember)
        assert plgpu.as_torch_kernel(step)(x) is x
        assert addresses == [x.data_ptr()]
        out, same = plgpu.as_torch_kernel(lambda x: (step(x), x))(x)
        assert same is x and addresses[1] == out.data_ptr() != x.data_ptr()
        # What is not row-major is copied, and the result is copied back.
        strided = random(where="cuda:0", shape=SHAPE[::-1]).permute((1, 0))
        before = strided.array.copy()
        assert plgpu.as_torch_kernel(step)(strided) is strided
        assert addresses[2] != strided.data_ptr()
        np.testing.assert_array_equal(strided.array, before)


def test_failure_of_the_driver(driver):
    """What the driver says is an error that names the kernel."""
    driver.sizes, driver.status = (8,) * 5, 700
    with pytest.raises(ExecutionError, match="cannot launch kernel 'add_body'\\n.*CUDA_ERROR_700"):
        plgpu.as_torch_kernel(add)(random(where="cuda:0"), random(where="cuda:0"))


def test_large_clusters(driver):
    """More than 8 blocks in a cluster have to be permitted."""
    from pallasite_std.torch import cuda_driver

    for blocks in (8, 16):
        cuda_driver.load(b"", "kernel", shared_memory_bytes=4096, blocks_of_cluster=blocks)
    assert driver.of("cuFuncSetAttribute") == [(22, 8, 4096), (22, 8, 4096), (22, 14, 1)]


def test_without_a_driver():
    """It is asked for where it is needed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(ExecutionError, match="needs NVIDIA's driver"):
            plgpu.as_torch_kernel(add)(random(where="cuda:0"), random(where="cuda:0"))
    else:
        pytest.skip("there is a driver")


# Errors -----------------------------------------------------------------------------------------


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ExecutionError, match=r"pip install pallasite\[torch\]"):
        plgpu.as_torch_kernel(add)(random(), random())


def test_other_operations():
    """The error is at the line of the function and says which operation it is."""
    with pytest.raises(UnsupportedError, match=r"test_torch.py:\d+.*\n?.*it calls 'mul'"):
        plgpu.as_torch_kernel(lambda x: add(x, x) * 2)(random())


def test_arguments():
    call = plgpu.as_torch_kernel(add)
    with pytest.raises(InvalidTypeError, match="argument 1 of add_body is not a tensor"):
        call(random(), 3.0)
    with pytest.raises(InvalidValueError, match="several devices"):
        call(random(), random(where="cuda:0"))
    with pytest.raises(InvalidValueError, match="runs no kernels"):
        call(random(where="xpu"), random(where="xpu"))
    with pytest.raises(InvalidTypeError, match="jax_enable_x64"):
        plgpu.as_torch_kernel(kernel(add_body, dtype=jnp.int32))(random(np.int64), random(np.int64))
    with pytest.raises(InvalidTypeError, match="needs a function"):
        plgpu.as_torch_kernel(3)
