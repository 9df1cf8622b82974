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
from pallasite.runtime import serialization
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


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000 + b"]" * 100_000, b'{"a": ' * 50_000 + b"1" + b"}" * 50_000, b"9" * 10_000],
)
def test_rubbish_in_json_is_refused(text):
    with pytest.raises(CorruptError):
        loads(zlib.compress(text))


def test_what_unpacks_to_too_much_is_refused_at_once(monkeypatch):
    bomb = zlib.compressobj(9)
    data = b"".join([*(bomb.compress(b"[" + bytes(2**20)) for _ in range(80)), bomb.flush()])
    parsed = []
    monkeypatch.setattr(json, "loads", parsed.append)
    for one in (data, dumps(everything())[:-4], dumps(everything()) + b"more"):
        with pytest.raises(CorruptError, match="no complete stream"):
            loads(one)
    assert parsed == []


def test_kernels_that_are_too_large_are_not_kept(monkeypatch):
    monkeypatch.setattr(serialization, "_MAX_BYTES", 1000)
    with pytest.raises(TypeError, match="too large"):
        dumps(dataclasses.replace(everything(), ptx="x" * 1000))
