"""Hidden operands and results of kernels that PyTorch calls; PyTorch and the driver are fakes."""

from __future__ import annotations

import ctypes
import sys

import fake_torch
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from offset_plugin import offset, registered

from pallasite import gpu as plgpu
from pallasite.runtime import compiler

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


@pytest.fixture
def seen():
    with registered() as found:
        yield found


def tensor(where):
    values = np.random.default_rng(0).integers(-100, 100, SHAPE).astype(np.float32)
    return fake_torch.Tensor(fake_torch.aligned(values), where)


def function(source, name):
    def body(x_ref, o_ref):
        o_ref[...] = offset(x_ref[...], source)

    out = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return plgpu.as_torch_kernel(plgpu.kernel(body, out_type=out, kernel_name=name))


@pytest.mark.runs_kernels
def test_on_the_host(seen):
    fn = function("rank", "on_host")
    x = tensor("cpu")
    for _ in range(2):
        np.testing.assert_array_equal(fn(x).array, x.array + 10)
    assert [one for one in seen if one[0] in ("prepare", "collect")] == [
        ("prepare", "cpu", 0, "on_host", {"grid": 1}),
        ("collect", [10.0], "on_host", {"source": "rank"}),
        ("collect", [10.0], "on_host", {"source": "rank"}),
    ]


def test_on_gpus(seen, driver):
    """A value for each device, copied there once; the result goes back to the host."""
    fn = function("rank", "on_gpu")
    operands = []

    def compute(parameters):
        """The kernel's parameters: the input, the hidden operand, the output, the hidden result."""
        pointers = [int.from_bytes(one, "little") for one in parameters]
        x, number, out, used = (
            np.ctypeslib.as_array((ctypes.c_float * count).from_address(pointer))
            for pointer, count in zip(pointers, (256, 1, 256, 1), strict=False)
        )
        operands.append(pointers[1])
        out[...] = x + number
        used[...] = number

    driver.sizes, driver.on_launch = (8,) * 6, compute
    for where, number in (("cuda:0", 10), ("cuda:0", 10), ("cuda:2", 210)):
        x = tensor(where)
        result = fn(x)
        assert isinstance(result, fake_torch.Tensor) and str(result.device) == where
        np.testing.assert_array_equal(result.array, x.array + number)
    first, again, other = operands
    assert first == again != other
    assert [one for one in seen if one[0] == "prepare"] == [
        ("prepare", "cuda", 0, "on_gpu", {"grid": 1}),
        ("prepare", "cuda", 2, "on_gpu", {"grid": 1}),
    ]
    numbers = [array for kind, array, *_ in seen if kind == "collect"]
    assert numbers == [[10.0], [10.0], [210.0]]
