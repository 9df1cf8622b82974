"""Memrefs, and loads and stores of vectors, on this machine and as PTX."""

# ruff: noqa: E501

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from codegen_support import check, compile_host, kernel, parse, to_llvm, to_ptx

from pallasite.codegen.llvm_ir import translate
from pallasite.errors import PallasiteError

DESCRIPTION = "!llvm.struct<(ptr, ptr, i64, array<2 x i64>, array<2 x i64>)>"


def on_host(body: str, source: np.ndarray, out: np.ndarray, *numbers: int) -> np.ndarray:
    """Runs code that reads ``%x``, a memref of the source, and stores to ``%y``.

    Numbers are ``%i0``, ``%i1``, ... of type ``index``.
    """

    def memref(array: np.ndarray) -> str:
        kinds = {"f": "f", "i": "i", "u": "i", "b": "i"}
        element = f"{kinds[array.dtype.kind]}{1 if array.dtype == bool else 8 * array.itemsize}"
        return f"memref<{'x'.join(map(str, array.shape))}x{element}>"

    values = ", ".join(f"%n{i}: i64" for i in range(len(numbers)))
    casts = "\n".join(f"%i{i} = arith.index_cast %n{i} : i64 to index" for i in range(len(numbers)))
    text = f"""
      llvm.func @f(%p: !llvm.ptr, %q: !llvm.ptr{", " if values else ""}{values}) {{
        {casts}
        %x = builtin.unrealized_conversion_cast %p : !llvm.ptr to {memref(source)}
        %y = builtin.unrealized_conversion_cast %q : !llvm.ptr to {memref(out)}
        {body}
        llvm.return
      }}"""
    kinds = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * len(numbers)
    source, out = np.ascontiguousarray(source), np.array(out)
    function = ctypes.CFUNCTYPE(None, *kinds)(compile_host(text))
    function(source.ctypes.data, out.ctypes.data, *numbers)
    return out


X = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_parts(start):
    """Known and unknown starts, dimensions that are dropped, views of views."""
    body = """
      %a = memref.subview %x[%i0, 1, 2] [1, 4, 6] [1, 1, 1] : memref<4x6x8xf32> to memref<4x6xf32, strided<[8, 1], offset: ?>>
      %b = memref.subview %a[1, %i1] [3, 2] [1, 1] : memref<4x6xf32, strided<[8, 1], offset: ?>> to memref<3x2xf32, strided<[8, 1], offset: ?>>
      %t = memref.transpose %b (d0, d1) -> (d1, d0) : memref<3x2xf32, strided<[8, 1], offset: ?>> to memref<2x3xf32, strided<[1, 8], offset: ?>>
      %one = arith.constant 1 : index
      %v = memref.load %t[%one, %i2] : memref<2x3xf32, strided<[1, 8], offset: ?>>
      memref.store %v, %y[%i2] : memref<3xf32>"""
    out = on_host(body, X, np.zeros(3, np.float32), start, 3, 2)
    view = X[start, 1:5, 2:8][1:4, 3:5].T
    np.testing.assert_array_equal(out, [0, 0, view[1, 2]])


def test_reshapes():
    body = """
      %a = memref.collapse_shape %x [[0, 1], [2]] : memref<4x6x8xf32> into memref<24x8xf32>
      %b = memref.expand_shape %a [[0, 1], [2]] output_shape [12, 2, 8] : memref<24x8xf32> into memref<12x2x8xf32>
      %c = memref.cast %b : memref<12x2x8xf32> to memref<12x2x8xf32, strided<[16, 8, 1], offset: ?>>
      %v = vector.load %c[%i0, %i1, %i2] : memref<12x2x8xf32, strided<[16, 8, 1], offset: ?>>, vector<4xf32>
      %z = arith.constant 0 : index
      vector.store %v, %y[%z] : memref<4xf32>, vector<4xf32>"""
    out = on_host(body, X, np.zeros(4, np.float32), 7, 1, 3)
    np.testing.assert_array_equal(out, X.reshape(12, 2, 8)[7, 1, 3:7])


def test_booleans_take_bytes():
    flags = np.array([[True, False, True, True]])
    body = """
      %z = arith.constant 0 : index
      %three = arith.constant 3 : index
      %v = vector.load %x[%z, %z] : memref<1x4xi1>, vector<4xi1>
      vector.store %v, %y[%z, %z] : memref<2x4xi1>, vector<4xi1>
      %b = memref.load %x[%z, %i0] : memref<1x4xi1>
      %one = arith.constant 1 : index
      memref.store %b, %y[%one, %three] : memref<2x4xi1>"""
    out = on_host(body, flags, np.zeros((2, 4), bool), 2)
    np.testing.assert_array_equal(out, [flags[0], [False, False, False, True]])


@pytest.mark.parametrize("offset", ["?", "11"])
def test_descriptions(offset):
    """A memref's description, from which code computes an address, and back."""
    start = "%i0" if offset == "?" else "1"
    body = f"""
      %m = memref.collapse_shape %x [[0, 1], [2]] : memref<4x6x8xf32> into memref<24x8xf32>
      %s = memref.subview %m[{start}, 3] [2, 5] [1, 1] : memref<24x8xf32> to memref<2x5xf32, strided<[8, 1], offset: {offset}>>
      %d = builtin.unrealized_conversion_cast %s : memref<2x5xf32, strided<[8, 1], offset: {offset}>> to {DESCRIPTION}
      %p1 = llvm.extractvalue %d[1] : {DESCRIPTION}
      %o = llvm.extractvalue %d[2] : {DESCRIPTION}
      %size = llvm.extractvalue %d[3, 1] : {DESCRIPTION}
      %stride = llvm.extractvalue %d[4, 0] : {DESCRIPTION}
      %a = llvm.getelementptr %p1[%o] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      %v0 = llvm.load %a : !llvm.ptr -> f32
      %e = builtin.unrealized_conversion_cast %d : {DESCRIPTION} to memref<2x5xf32, strided<[8, 1]>>
      %one = arith.constant 1 : index
      %v1 = memref.load %e[%one, %one] : memref<2x5xf32, strided<[8, 1]>>
      %base, %off, %sizes:2, %strides:2 = memref.extract_strided_metadata %s : memref<2x5xf32, strided<[8, 1], offset: {offset}>> -> memref<f32>, index, index, index, index, index
      %address = memref.extract_aligned_pointer_as_index %s : memref<2x5xf32, strided<[8, 1], offset: {offset}>> -> index
      %i = arith.index_cast %address : index to i64
      %off64 = arith.index_cast %off : index to i64
      %ip = llvm.inttoptr %i : i64 to !llvm.ptr
      %ap = llvm.getelementptr %ip[%off64] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      %v2 = llvm.load %ap : !llvm.ptr -> f32
      %n = arith.addi %size, %stride : i64
      %v3 = arith.sitofp %n : i64 to f32
      %v = vector.from_elements %v0, %v1, %v2, %v3 : vector<4xf32>
      %z = arith.constant 0 : index
      vector.store %v, %y[%z] : memref<4xf32>, vector<4xf32>"""
    out = on_host(body, X, np.zeros(4, np.float32), 1)
    part = X.reshape(24, 8)[1:3, 3:8]
    np.testing.assert_array_equal(out, [part[0, 0], part[1, 1], part[0, 0], 5 + 8])


def test_parts_of_bytes():
    """Elements of less than a byte are addressed by bytes."""
    body = """
      %p4 = builtin.unrealized_conversion_cast %p : !llvm.ptr to memref<4x8xi4>
      %s = memref.subview %p4[%i0, 2] [1, 4] [1, 1] : memref<4x8xi4> to memref<4xi4, strided<[1], offset: ?>>
      %q1 = builtin.unrealized_conversion_cast %s : memref<4xi4, strided<[1], offset: ?>> to !llvm.ptr
      %v = llvm.load %q1 : !llvm.ptr -> i8
      %z = arith.constant 0 : index
      memref.store %v, %y[%z] : memref<1xi8>"""
    data = np.arange(16, dtype=np.int8)
    out = on_host(body, data, np.zeros(1, np.int8), 2)
    assert out[0] == data[2 * 4 + 1]


SHARED = "#gpu.address_space<workgroup>"


def test_address_spaces_and_alignment():
    """Accesses are as wide as what is known of addresses allows."""
    source = kernel(
        f"""%x = builtin.unrealized_conversion_cast %p : !llvm.ptr<3> to memref<8x64xf32, {SHARED}> {{pallasite.alignment = 16 : i64}}
        %g = builtin.unrealized_conversion_cast %q : !llvm.ptr<1> to memref<8x64xf32> {{pallasite.alignment = 256 : i64}}
        %t = gpu.thread_id x
        %four = arith.constant 4 : index
        %i = arith.muli %t, %four : index
        %a = vector.load %x[%t, %i] : memref<8x64xf32, {SHARED}>, vector<4xf32>
        %s = memref.subview %g[%t, 2] [1, 8] [1, 1] : memref<8x64xf32> to memref<8xf32, strided<[1], offset: ?>>
        vector.store %a, %s[%i] : memref<8xf32, strided<[1], offset: ?>>, vector<4xf32>
        vector.store %a, %s[%t] : memref<8xf32, strided<[1], offset: ?>>, vector<4xf32>""",
        "%p: !llvm.ptr<3>, %q: !llvm.ptr<1>",
    )
    check(
        to_llvm(source),
        """CHECK: addrspacecast ptr addrspace(1) %a1 to ptr
        CHECK: load <4 x float>, ptr addrspace(3) {{.*}}, align 16
        CHECK: store <4 x float> {{.*}}, ptr {{.*}}, align 8
        CHECK: store <4 x float> {{.*}}, ptr {{.*}}, align 4""",
    )
    text = to_ptx(source)
    assert "ld.shared.v4.b32" in text and "st.global.v2.b32" in text, text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "%x = builtin.unrealized_conversion_cast %p : !llvm.ptr to memref<4x4xf32, strided<[?, 1]>>\n"
            "%v = memref.load %x[%z, %z] : memref<4x4xf32, strided<[?, 1]>>",
            "strides that are computed",
        ),
        (
            "%x = builtin.unrealized_conversion_cast %p : !llvm.ptr to memref<4xi4>\n"
            "%v = memref.load %x[%z] : memref<4xi4>",
            "single elements of 4 bits",
        ),
        (
            "%x = builtin.unrealized_conversion_cast %p : !llvm.ptr to memref<4x8xi4>\n"
            "%v = memref.subview %x[1, 1] [1, 2] [1, 1] : memref<4x8xi4> to memref<2xi4, strided<[1], offset: 9>>",
            "inside a byte",
        ),
        (
            "%x = builtin.unrealized_conversion_cast %p : !llvm.ptr to memref<8x4xf32, strided<[1, 8]>>\n"
            "%v = vector.load %x[%z, %z] : memref<8x4xf32, strided<[1, 8]>>, vector<2xf32>",
            "not contiguous in memory|minor dimension",
        ),
        (
            "%x:2 = builtin.unrealized_conversion_cast %p : !llvm.ptr to i32, i32",
            r"a cast from !llvm.ptr to i32, i32",
        ),
        (
            "%x = builtin.unrealized_conversion_cast %p : !llvm.ptr to memref<4xi1>\n"
            "%d = builtin.unrealized_conversion_cast %x : memref<4xi1> to"
            " !llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>",
            "address of booleans",
        ),
    ],
)
def test_messages(body, message):
    source = kernel("%z = arith.constant 0 : index\n" + body, "%p: !llvm.ptr")
    try:
        module = parse(source)
    except Exception as error:  # Some are wrong for MLIR already.
        assert "minor" in str(error)
        return
    with pytest.raises(PallasiteError, match=message):
        translate(module)


def test_narrow_floats():
    source = kernel(
        """%a = arith.constant 1.5 : f8E4M3FN
        %v = arith.constant dense<-2.0> : vector<4xf8E5M2>
        %b = arith.bitcast %a : f8E4M3FN to i8
        %w = vector.bitcast %v : vector<4xf8E5M2> to vector<1xi32>
        llvm.store %b, %p : i8, !llvm.ptr<1>
        llvm.store %w, %p : vector<1xi32>, !llvm.ptr<1>"""
        , "%p: !llvm.ptr<1>",
    )  # fmt: skip
    check(
        to_llvm(source),
        """CHECK: bitcast <4 x i8> <i8 192, i8 192, i8 192, i8 192>
        CHECK: store i8 60""",
    )


@pytest.mark.parametrize(
    "operation",
    [
        "%r = arith.extf %x : f8E4M3FN to f32",
        "%r = arith.truncf %y : f32 to f8E4M3FN",
        "%r = arith.addf %x, %x : f8E4M3FN",
        "%r = arith.maximumf %x, %x : f8E4M3FN",
        "%r = arith.negf %x : f8E4M3FN",
        "%r = arith.cmpf olt, %x, %x : f8E4M3FN",
    ],
)
def test_arithmetic_of_narrow_floats(operation):
    source = kernel(
        "%x = arith.constant 1.5 : f8E4M3FN\n%y = arith.constant 1.5 : f32\n" + operation
    )
    with pytest.raises(PallasiteError, match="arithmetic of floats of 8 bits"):
        translate(parse(source))
