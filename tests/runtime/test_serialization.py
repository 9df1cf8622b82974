"""Compiled kernels to bytes and back."""

from __future__ import annotations

import dataclasses
import json
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from fake_kernels import add_kernel, inputs, kernel, outputs, scratch, tensor_map

from pallasite.errors import SourceLocation
from pallasite.launch import Allocation, ArrayParameter, ResourceReport
from pallasite.runtime.serialization import CorruptError, dumps, loads


def everything():
    (x,), (out,) = inputs((64, 64), dtype=jnp.bfloat16), outputs((64, 64), dtype=jnp.int4)
    (s,) = scratch((7,), dtype=jnp.float8_e4m3fn, zeroed=True)
    where = SourceLocation("kérnel.py", 3, 4, "f")
    parameters = [
        dataclasses.replace(tensor_map(x, (8, 32)), location=where),
        ArrayParameter(out),
        ArrayParameter(s),
    ]
    compiled = kernel("", parameters, [x], [out], [s], aliases=())
    return dataclasses.replace(
        compiled,
        resources=ResourceReport(
            shared_memory_bytes=5, allocations=(Allocation("smem", "x", 1, 0, where),), registers=7
        ),
        cubin=bytes(range(256)),
        timings=(("lower", 0.25),),
        target=dataclasses.replace(compiled.target, features=frozenset({"tma", "cluster"})),
    )


def test_round_trip():
    compiled = everything()
    again = loads(dumps(compiled))
    assert again == compiled
    assert again.launch.inputs[0].dtype == jnp.bfloat16
    assert isinstance(again.launch.inputs[0].dtype, np.dtype)
    assert hash(again.launch) == hash(compiled.launch)
    assert dumps(again) == dumps(compiled)


def test_only_plain_records():
    bad = dataclasses.replace(add_kernel(), jaxpr=object())
    with pytest.raises(TypeError, match="cannot keep a object on disk"):
        dumps(bad)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"rubbish",
        zlib.compress(b"{"),
        zlib.compress(b"[]"),
        zlib.compress(json.dumps({"=": "os.system"}).encode()),
        zlib.compress(json.dumps({"=": "CompiledKernel", "name": "x"}).encode()),
        zlib.compress(json.dumps({"=": "Allocation", "more": 1}).encode()),
        zlib.compress(json.dumps({"no": "type"}).encode()),
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(CorruptError):
        loads(data)
