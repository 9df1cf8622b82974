"""The custom call that a launch becomes, lowered for CUDA on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_kernels import add_kernel, element, inputs, kernel, outputs, scratch, tensor_map

from pallasite.errors import (
    ExecutionError,
    InternalError,
    InvalidValueError,
    SourceLocation,
    UnsupportedError,
)
from pallasite.launch import ArrayParameter
from pallasite.runtime import launch as launch_module
from pallasite.runtime.launch import custom_call_attribute, launch, nbytes, validate_launch
from pallasite_std.copies.tensor_map_encoding import encode

pytest.importorskip("jax_cuda13_plugin", reason="building the call needs the CUDA plugin's wheel")


def lowered(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def call_line(text: str) -> str:
    (line,) = [line for line in text.splitlines() if "@triton_kernel_call_ffi" in line]
    return re.sub(r'opaque = "(\\.|[^"\\])*"', "opaque", line)


def proto(compiled) -> bytes:
    return zlib.decompress(custom_call_attribute(compiled, validate_launch(compiled.launch, "k")))


def array(shape=(128,)):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_plain_call():
    compiled = add_kernel()
    line = call_line(lowered(lambda x: launch(compiled, x)[0], array()))
    assert "@triton_kernel_call_ffi(%arg0)" in line
    assert "(tensor<128xf32>) -> tensor<128xf32>" in line
    assert "output_operand_alias" not in line
    assert "has_side_effect" not in line


def test_attribute_holds_the_kernel():
    compiled = add_kernel(name="add_one")
    data = proto(compiled)
    assert b"add_one" in data
    assert compiled.ptx.encode() in data


def test_input_with_several_descriptors_is_passed_as_often():
    (x,), (out,) = inputs((64, 64)), outputs((64, 64))
    parameters = [
        tensor_map(x, (8, 32)),
        tensor_map(x, (16, 32), 128),
        ArrayParameter(x),
        ArrayParameter(out),
    ]
    compiled = kernel("", parameters, [x], [out])
    line = call_line(lowered(lambda x: launch(compiled, x)[0], array((64, 64))))
    assert "(%arg0, %arg0, %arg0)" in line
    assert "operand_layouts = [dense<[1, 0]>" in line
    assert "result_layouts = [dense<[1, 0]>" in line


def test_second_parameter_of_an_output_is_an_aliased_empty_operand():
    (out,) = outputs((64, 64))
    compiled = kernel("", [ArrayParameter(out), tensor_map(out, (8, 32))], [], [out])
    text = lowered(lambda: launch(compiled)[0])
    assert re.search(r"%0 = stablehlo.custom_call @AllocateBuffer\(\)", text)
    line = call_line(text)
    assert "(%0)" in line
    assert "output_operand_alias<output_tuple_indices = []" in line
    assert "operand_index = 0" in line


def test_users_alias():
    (a, b), (out,) = inputs((128,), (128,)), outputs((128,))
    compiled = kernel(
        "", [ArrayParameter(a), ArrayParameter(out)], [a, b], [out], aliases=((1, 0),)
    )
    line = call_line(lowered(lambda a, b: launch(compiled, a, b)[0], array(), array()))
    assert "(%arg0, %arg1)" in line
    assert re.search(r"output_operand_alias<output_tuple_indices = \[\],\s*operand_index = 1", line)


def test_zeroed_scratch_is_a_hidden_result_that_the_launcher_clears():
    (x,), (out,), (s,) = inputs((128,)), outputs((128,)), scratch((1000,), zeroed=True)
    parameters = [ArrayParameter(buffer) for buffer in (s, x, out)]
    compiled = kernel("", parameters, [x], [out], [s])
    text = lowered(lambda x: launch(compiled, x), array())
    assert "(tensor<128xf32>) -> (tensor<128xf32>, tensor<1000xf32>)" in call_line(text)
    assert "return %0#0 : tensor<128xf32>" in text
    plain = dataclasses.replace(s, zeroed=False)
    uncleared = kernel(
        "", [ArrayParameter(buffer) for buffer in (plain, x, out)], [x], [out], [plain]
    )
    # The varint of 4000 bytes to clear, as field 1 of the array parameter.
    assert b"\x08\xa0\x1f" in proto(compiled)
    assert b"\x08\xa0\x1f" not in proto(uncleared)


def test_descriptor_strides_and_codes_reach_the_launcher():
    (x,), (out,) = inputs((64, 96)), outputs((64,))
    first = kernel("", [tensor_map(x, (8, 32)), ArrayParameter(out)], [x], [out])
    second = kernel("", [tensor_map(x, (16, 32)), ArrayParameter(out)], [x], [out])
    assert proto(first) != proto(second)


def test_outputs_that_the_kernel_does_not_access():
    (x, y), outs = inputs((128,), (128,)), outputs((128,), (128,), (128,))
    compiled = kernel("", [ArrayParameter(outs[1])], [x, y], outs, aliases=((1, 2),))
    text = lowered(lambda x, y: launch(compiled, x, y), array(), array())
    line = call_line(text)
    assert "@triton_kernel_call_ffi() " in line
    assert "() -> tensor<128xf32>" in line
    (returned,) = [line for line in text.splitlines() if " return " in line]
    assert re.search(r"return %\d+, %\d+, %arg\d :", returned)


def test_kernels_without_outputs_are_kept():
    (x,) = inputs((128,))
    compiled = kernel("", [ArrayParameter(x)], [x], [])
    text = lowered(lambda x: (launch(compiled, x), x)[1], array())
    assert "has_side_effect = true" in call_line(text)


@pytest.mark.parametrize("grid", [(0, 1, 1), (4, 0, 1)])
def test_empty_grid_launches_nothing(grid):
    compiled = add_kernel()
    compiled = dataclasses.replace(compiled, launch=dataclasses.replace(compiled.launch, grid=grid))
    text = lowered(lambda x: launch(compiled, x)[0], array())
    assert "triton" not in text
    np.testing.assert_array_equal(launch(compiled, jnp.ones(128))[0], jnp.zeros(128))


def test_empty_outputs_launch_nothing():
    (x,), (out,) = inputs((128,)), outputs((0, 128))
    compiled = kernel("", [ArrayParameter(x), ArrayParameter(out)], [x], [out])
    assert "triton" not in lowered(lambda x: launch(compiled, x)[0], array())
    assert launch(compiled, jnp.ones(128))[0].shape == (0, 128)


def test_empty_arrays_need_no_descriptor():
    (x,), (out,) = inputs((0, 128)), outputs((0, 128))
    parameters = [tensor_map(b, (8, 32)) for b in (x, out)]
    compiled = kernel("", parameters, [x], [out])
    assert launch(compiled, jnp.ones((0, 128)))[0].shape == (0, 128)


def test_several_kernels_in_one_jit():
    first, second = add_kernel(name="first"), add_kernel(name="second", constant=2.0)
    text = lowered(lambda x: launch(second, launch(first, x)[0])[0], array())
    assert text.count("@triton_kernel_call_ffi") == 2


SCRIPT = """
import hashlib, sys, jax, jax.numpy as jnp
from fake_kernels import add_kernel
from pallasite.runtime.launch import launch
compiled = add_kernel()
text = jax.jit(lambda x: launch(compiled, x)[0]).trace(jnp.ones(128)).lower(
    lowering_platforms=("cuda",)).as_text()
print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_the_call_is_the_same_in_every_process():
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def replace_launch(**changes):
    return dataclasses.replace(add_kernel().launch, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block": (32, 4, 1)}, UnsupportedError, "whole warps along x"),
        ({"block": (100, 1, 1)}, UnsupportedError, "whole warps along x"),
        ({"block": (2048, 1, 1)}, UnsupportedError, "at most 1024"),
        ({"grid": (1, 70000, 1)}, InvalidValueError, "too many blocks along y"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, InvalidValueError, "whole number of clusters"),
    ],
)
def test_launches_that_the_launcher_cannot_do(changes, error, message):
    with pytest.raises(error, match=message):
        validate_launch(replace_launch(**changes), "add")


def test_too_many_descriptors():
    (x,) = inputs((64, 64))
    parameters = tuple(tensor_map(x, (1 + n, 32)) for n in range(256))
    with pytest.raises(UnsupportedError, match="too many TMA descriptors"):
        validate_launch(replace_launch(parameters=parameters, inputs=(x,), outputs=()), "many")


def test_missing_cuda_plugin(monkeypatch):
    from jaxlib import gpu_triton

    launch_module.launcher.cache_clear()
    monkeypatch.delattr(gpu_triton, "create_tma_descriptor_parameter")
    with pytest.raises(ExecutionError, match="JAX's CUDA plugin"):
        launch_module.launcher()


WHERE = SourceLocation("kernel.py", 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (64,) * 6, "strides": (1,) * 6, "box": (1,) * 6}, "number of dimensions"),
        ({"strides": (1, 64)}, "last dimension is not contiguous"),
        ({"box": (257, 32)}, "too large"),
        ({"box": (8, 0)}, "empty or too large"),
        ({"shape": (0, 64)}, "a dimension is empty"),
        ({"box": (8, 6)}, "16-byte pieces"),
        ({"swizzle": 48}, "unknown swizzle"),
        ({"box": (8, 64), "swizzle": 128}, "longer than the swizzle"),
        ({"strides": (66, 1)}, "multiples of 16 bytes"),
        ({"element_type": 99}, "unknown TMA element type"),
        ({"element_type": 0, "shape": (64, 63)}, "fill whole bytes"),
    ],
)
def test_impossible_descriptors_name_the_users_line(changes, message):
    good = dataclasses.replace(tensor_map(inputs((64, 64))[0], (8, 32)), location=WHERE)
    encode(good)
    with pytest.raises((InvalidValueError, InternalError), match=message) as error:
        encode(dataclasses.replace(good, **changes))
    assert str(error.value).startswith("kernel.py:7: ")


def test_packed_elements_become_bytes():
    good = dataclasses.replace(tensor_map(inputs((64, 128))[0], (8, 64)), element_type=0)
    encoding = encode(good)
    assert (encoding.element_type, encoding.shape, encoding.strides, encoding.box) == (
        0,
        (64, 64),
        (64, 1),
        (8, 32),
    )


def test_driver_codes():
    good = tensor_map(inputs((64, 64))[0], (8, 32), 128)
    assert (encode(good).element_type, encode(good).swizzle) == (7, 3)
    bfloat16 = dataclasses.replace(good, element_type=7)
    assert encode(bfloat16).element_type == 9


def test_bytes_of_arrays():
    assert nbytes((3, 5), np.float32) == 60
    assert nbytes((5,), jnp.int4) == 3
    assert nbytes((), np.bool_) == 1
    assert nbytes((0, 5), np.float32) == 0


def test_element_helper_is_valid_ir():
    assert "getelementptr" in element("%p0", "%x")
