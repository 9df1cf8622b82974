"""``pallasite_simulator.simulate`` and ``run_ptx``."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_kernels import pipelined, scaled, shape
from simulator_support import body_ptx, module

import pallasite
import pallasite_simulator
from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError, InvalidValueError, TargetError
from pallasite_simulator import SimulationError, TensorArgument, TensorMap, run_ptx, simulate

DOUBLE = """
.reg .b32 %x; .reg .b64 %at;
add.u64 %at, %array0, %offset4;
ld.global.b32 %x, [%at];
add.f32 %x, %x, %x;
add.u64 %at, %array1, %offset4;
st.global.b32 [%at], %x;
"""


def test_names():
    assert set(pallasite_simulator.__all__) <= set(dir(pallasite_simulator))
    for name in pallasite_simulator.__all__:
        assert getattr(pallasite_simulator, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = pallasite_simulator.nothing


def test_importing_it_imports_little():
    program = "import sys, pallasite_simulator; assert not {'numpy', 'jax'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )


# Compiled kernels ---------------------------------------------------------------------------------


def test_simulate():
    x = jax.random.normal(jax.random.key(0), (256, 256))
    compiled = pallasite.compile(pipelined(), x)
    simulation = simulate(compiled, x)
    (result,) = simulation.outputs
    np.testing.assert_array_equal(result, 2 * np.asarray(x))
    assert isinstance(result, np.ndarray)
    statistics = simulation.statistics
    assert statistics.kernel == compiled.name and statistics.target == "sm_90a"
    assert statistics.memory_read == statistics.memory_written == x.nbytes
    assert (simulation.printed, simulation.findings, simulation.note) == ("", (), "")


def rows(body, count=8, **options):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, 128), jnp.int32),
        grid=(count,),
        grid_names=("i",),
        **options,
    )


def test_chosen_blocks():
    def body(o):
        i = jax.lax.axis_index("i")
        o[i] = jnp.full((128,), i, jnp.int32)

    compiled = pallasite.compile(rows(body))
    simulation = simulate(compiled, blocks=[1, 5, 6])
    expected = np.full((8, 128), 0xCDCDCDCD, np.uint32).view(np.int32)
    for row in (1, 5, 6):
        expected[row] = row
    np.testing.assert_array_equal(simulation.outputs[0], expected)
    assert simulation.statistics.blocks == 3
    with pytest.raises(SimulationError, match="there is no such block in the grid"):
        simulate(compiled, blocks=[8])


def test_findings_are_part_of_the_result():
    def body(o, tile):
        i = jax.lax.axis_index("i")
        o[i] = tile[...]

    compiled = pallasite.compile(rows(body, scratch_types=[plgpu.SMEM((128,), jnp.int32)]))
    assert simulate(compiled).findings == ()
    simulation = simulate(compiled, sanitize=True)
    (finding,) = simulation.findings
    assert "shared memory" in str(finding) and "test_api.py" in str(finding)
    assert simulation.outputs[0].shape == (8, 128)
    assert simulate(compiled, sanitize="races").findings == ()
    with pallasite.config.scoped(sanitize=True):
        assert len(simulate(compiled).findings) == 1
        assert simulate(compiled, sanitize=False).findings == ()


def test_printed_text():
    def body(o):
        i = jax.lax.axis_index("i")
        jax.experimental.pallas.debug_print("block {}", i)
        o[i] = jnp.zeros((128,), jnp.int32)

    simulation = simulate(pallasite.compile(rows(body)), statistics=False)
    assert simulation.printed == "".join(f"block {i}\n" for i in range(8))
    assert simulation.statistics is None


def test_wrong_inputs():
    compiled = pallasite.compile(scaled(), shape(128))
    with pytest.raises(InvalidTypeError, match="run with the wrong inputs"):
        simulate(compiled, np.zeros(128))
    with pytest.raises(InvalidTypeError, match="got: none"):
        simulate(compiled)
    with pytest.raises(InvalidValueError, match="wrong number of processes"):
        simulate(compiled, np.zeros(128, np.float32), processes=0)


# PTX ----------------------------------------------------------------------------------------------


def test_run_ptx(tmp_path):
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    ptx = body_ptx(DOUBLE, 2)
    simulation = run_ptx(ptx, [x, y], grid=(2,), block=128)
    np.testing.assert_array_equal(y, 2 * x)
    assert simulation.outputs[1] is y
    file = tmp_path / "double.ptx"
    file.write_text(ptx)
    y[:] = 0
    run_ptx(file, [x, y], grid=[2, 1, 1], block=(32, 4))
    np.testing.assert_array_equal(y[:1], 0)  # threads are counted along x only


def test_the_same_array_is_the_same_memory():
    x = np.arange(128, dtype=np.float32)
    run_ptx(body_ptx(DOUBLE, 2), [x, x], block=128)
    np.testing.assert_array_equal(x, 2 * np.arange(128))


def test_arrays_that_cannot_be_written():
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    x.flags.writeable = False
    run_ptx(body_ptx(DOUBLE, 2), [x, y], block=128)
    np.testing.assert_array_equal(y, 2 * x)
    y.flags.writeable = False
    with pytest.raises(SimulationError, match="accesses memory read-only") as error:
        run_ptx(body_ptx(DOUBLE, 2), [x, y], block=128)
    assert "byte 0 of argument 1 (512 bytes)" in str(error.value)


SCALARS = module(
    """
    .reg .b64 %o, %l; .reg .b32 %i; .reg .f32 %f; .reg .f64 %d; .reg .b16 %s; .reg .b16 %b;
    ld.param.u64 %o, [o];
    ld.param.s64 %l, [l]; st.global.b64 [%o], %l;
    ld.param.s32 %i, [i]; st.global.b32 [%o+8], %i;
    ld.param.f32 %f, [f]; st.global.f32 [%o+12], %f;
    ld.param.f64 %d, [d]; st.global.f64 [%o+16], %d;
    ld.param.u16 %s, [s]; st.global.b16 [%o+24], %s;
    ld.param.u8 %b, [b]; st.global.b8 [%o+26], %b;
    """,
    [".u64 o", ".s64 l", ".s32 i", ".f32 f", ".f64 d", ".u16 s", ".b8 b"],
)
RECORD = np.dtype(
    dict(
        names=["l", "i", "f", "d", "s", "b"],
        formats=["i8", "i4", "f4", "f8", "u2", "u1"],
        offsets=[0, 8, 12, 16, 24, 26],
        itemsize=32,
    )
)


@pytest.mark.parametrize(
    "values",
    [
        (-5, -6, 1.5, 0.1, 65535, 200),
        (5, 1 << 31, 3, 4, 1, 2),
        (np.int64(1), np.int32(2), np.float32(3), np.float64(4), np.uint16(5), np.uint8(6)),
    ],
)
def test_scalars(values):
    values = [
        v[()].astype(f"i{8 >> n}") if isinstance(v, np.ndarray) else v for n, v in enumerate(values)
    ]
    out = np.zeros(1, RECORD)
    run_ptx(SCALARS, [out, *values])
    expected = [np.asarray(v).astype(RECORD[n]) for n, v in enumerate(values)]
    assert [out[0][name] for name in RECORD.names] == expected


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (2, 1 << 32, "does not fit its parameter of type .s32"),
        (2, 1.5, "argument 2 is a float, its parameter is of type .s32"),
        (5, -70000, "does not fit its parameter"),
        (4, np.float32(1), "argument 4 of kernel 'kernel' has the wrong size"),
    ],
)
def test_scalars_that_do_not_fit(place, value, message):
    values = [np.zeros(1, RECORD), 1, 2, 3.0, 4.0, 5, 6]
    values[place] = value
    with pytest.raises(pallasite.PallasiteError, match=message):
        run_ptx(SCALARS, values)


def test_wrong_arguments():
    ptx = body_ptx(DOUBLE, 2)
    x = np.zeros(128, np.float32)
    with pytest.raises(SimulationError, match="wrong number of arguments"):
        run_ptx(ptx, [x], block=128)
    with pytest.raises(SimulationError, match="must be contiguous"):
        run_ptx(ptx, [x, np.zeros((128, 2), np.float32)[:, 0]], block=128)
    with pytest.raises(InvalidValueError, match="narrower than a byte"):
        run_ptx(ptx, [x, np.zeros(128, jnp.int4)], block=128)
    with pytest.raises(SimulationError, match="out of bounds"):
        run_ptx(ptx, [x, None], block=128)


def test_wrong_launches():
    ptx = body_ptx("", 0)
    for options, message in (
        (dict(block=0), "wrong number of threads"),
        (dict(block=(64, 32)), "wrong number of threads"),
        (dict(block=32, grid=(1, 1, 1, 1)), "wrong extents"),
        (dict(block=32, grid=-1), "wrong extents"),
        (dict(block=32, grid=3, cluster=2), "not a whole number of clusters"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            run_ptx(ptx, **options)
    with pytest.raises(TargetError, match="no target named 'sm_1'"):
        run_ptx(ptx, block=32, target="sm_1")
    demanding = body_ptx("", 0, directives=".reqntid 64, 2")
    run_ptx(demanding, block=(64, 2))
    with pytest.raises(InvalidValueError, match="demands other extents: .reqntid"):
        run_ptx(demanding, block=128)
    with pytest.raises(InvalidValueError, match=".maxntid"):
        run_ptx(body_ptx("", 0, directives=".maxntid 64"), block=65)


def test_no_blocks():
    simulation = run_ptx(body_ptx("trap;", 0), block=32, grid=0)
    assert simulation.statistics.blocks == 0
    with pytest.raises(SimulationError, match="trap"):
        run_ptx(body_ptx("trap;", 0), block=32)


def test_several_kernels():
    two = body_ptx("", 0) + module("trap;", name="other").partition(".address_size 64")[2]
    with pytest.raises(pallasite_simulator.PtxError, match="say which one to run"):
        run_ptx(two, block=32)
    run_ptx(two, block=32, name="kernel")
    with pytest.raises(SimulationError, match="trap"):
        run_ptx(two, block=32, name="other")


def test_figures_of_a_target():
    ptx = body_ptx("", 0, target="sm_90")
    assert run_ptx(ptx, block=32).statistics.estimate.chip.name == "H100 SXM"
    assert run_ptx(ptx, block=32, target="sm_100").statistics.estimate.chip.name == "B200"
    chip = pallasite_simulator.Chip(
        name="mine",
        compute_capability=(1, 0),
        multiprocessors=1,
        clock=1e9,
        memory_bandwidth=1e9,
        tensor_rates={},
        pipes={},
    )
    assert run_ptx(ptx, block=32, chip=chip).statistics.estimate.binding == "instruction issue"


TILE = module(
    """
    .reg .b32 %thread, %at, %parity, %x, %bar; .reg .pred %first, %done; .reg .b64 %map, %o, %far;
    mov.u32 %thread, %tid.x;
    setp.eq.u32 %first, %thread, 0;
    mov.u32 %bar, barrier;
    @%first mbarrier.init.shared.b64 [%bar], 1;
    bar.sync 0;
    mov.b64 %map, m;
    cvta.param.u64 %map, %map;
    mov.u32 %at, tile;
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 1024;
    @%first cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%at], [%map, {8, 4}], [%bar];
    wait:
    mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0;
    @!%done bra wait;
    mad.lo.u32 %at, %thread, 4, %at;
    ld.shared.b32 %x, [%at];
    ld.param.u64 %o, [o];
    mul.wide.u32 %far, %thread, 4;
    add.u64 %o, %o, %far;
    st.global.b32 [%o], %x;
    """,
    [".align 64 .b8 m[128]", ".u64 o"],
    variables=".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b64 barrier;\n",
)


def test_tensor_maps():
    x = np.arange(64 * 64, dtype=np.int32).reshape(64, 64)
    o = np.zeros(256, np.int32)
    tile = TensorMap(
        address=64 * 4 * 16,  # the tensor begins in row 16
        element_type=3,
        sizes=(64, 48),
        strides=(256,),
        box=(16, 16),
    )
    run_ptx(TILE, [TensorArgument(x, tile), o], block=256)
    np.testing.assert_array_equal(o.reshape(16, 16), x[20:36, 8:24])


def test_structures_by_value():
    ptx = TILE.replace("m[128], .param .u64 o", "m[192]").replace("[o];", "[m+136];")
    x = np.arange(64 * 64, dtype=np.int32).reshape(64, 64)
    o = np.zeros(256, np.int32)
    tile = TensorMap(address=0, element_type=3, sizes=(64, 64), strides=(256,), box=(16, 16))
    run_ptx(ptx, [[TensorArgument(x, tile), np.int32(3), o, b"tail"]], block=256)
    np.testing.assert_array_equal(o.reshape(16, 16), x[4:20, 8:24])


def test_kernels_that_cannot_be_read_do_not_matter_to_others():
    good = module(".reg .b64 %p; ld.param.u64 %p, [o]; st.global.b32 [%p], 7;", [".u64 o"])
    both = good + "\n.visible .entry broken()\n{\n  mov.b32 %never, 1;\n}\n"
    o = np.zeros(1, np.int32)
    run_ptx(both, [o], name="kernel")
    assert o[0] == 7
    with pytest.raises(pallasite_simulator.PtxError, match="%never"):
        run_ptx(both, [], name="broken")
