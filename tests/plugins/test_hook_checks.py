"""What the checks of kernels know of primitives of another author's plugin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallasite import gpu as plgpu
from pallasite.errors import PallasiteError
from pallasite.language.kernel_call import kernel_call_p
from pallasite.passes.pipeline import PassContext, run_stage
from pallasite.plugin import (
    BarrierRole,
    BarrierUse,
    EventKind,
    MemoryEvent,
    MemoryEvents,
    hookimpl,
    jax_internals,
    plugins,
)
from pallasite.plugin.language import element_bits, memory_effect
from pallasite_std.api import ASYNC, arguments


def primitive(name, read=(), written=()):
    new = jax_internals.Primitive(name)
    new.multiple_results = True

    @jax_internals.abstract_eval(new)
    def _(*avals, args_tree, **params):
        effects = arguments.reference_effects(args_tree, len(avals), read=read, written=written)
        return (), effects | {memory_effect}

    arguments.no_discharge(new)
    return new


announce_p = primitive("announce")
fetch_p = primitive("fetch", read=(0,), written=(1,))
poll_p = primitive("poll")
scan_p = primitive("scan_tile", read=(0,))


def announce(barrier, num_bytes):
    arguments.bind(announce_p, arguments.barrier(barrier), num_bytes=num_bytes)


def fetch(source, tile, barrier):
    """An asynchronous copy, as a unit of its own makes it; it does not arrive."""
    views = arguments.reference(source, "source"), arguments.reference(tile, "tile")
    arguments.bind(fetch_p, *views, arguments.barrier(barrier))


def poll(barrier):
    arguments.bind(poll_p, arguments.barrier(barrier))


def scan_tile(tile):
    arguments.bind(scan_p, arguments.reference(tile, "tile"))


def fetched(arguments, params):
    tile = arguments[1]
    return element_bits(tile.dtype, tuple(tile.shape)) // 8


class Unit:
    @hookimpl
    def pallasite_barrier_uses(self):
        return [
            BarrierUse(
                primitive=announce_p,
                role=BarrierRole.EXPECT,
                transfers=lambda arguments, params: params["num_bytes"],
            ),
            BarrierUse(
                primitive=fetch_p,
                role=BarrierRole.COMPLETE,
                barrier=2,
                arrivals=lambda dtype, params: 0,
                transfers=fetched,
            ),
            BarrierUse(primitive=poll_p, role=BarrierRole.WAIT),
        ]

    @hookimpl
    def pallasite_memory_events(self):
        def fetches(context, *operands, args_tree):
            _, tile, _ = args_tree.unflatten(operands)
            return [MemoryEvent(EventKind.STORE, tile, proxy=ASYNC)]

        def scans(context, *operands, args_tree):
            (tile,) = args_tree.unflatten(operands)
            return [MemoryEvent(EventKind.LOAD, tile, proxy=ASYNC)]

        return [
            MemoryEvents(primitive=fetch_p, function=fetches),
            MemoryEvents(primitive=scan_p, function=scans),
        ]


@pytest.fixture
def unit():
    plugins.register(Unit(), name="unit")
    yield
    plugins.unregister("unit")


X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def outcome(body):
    scratch = [plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()]
    kernel = plgpu.kernel(body, out_type=X, scratch_types=scratch)
    (call,) = jax.make_jaxpr(kernel)(X).eqns
    assert call.primitive is kernel_call_p
    spec = call.params["spec"]
    target = plugins.registry().targets["sm_90a"]
    try:
        run_stage("jaxpr", spec.jaxpr, PassContext(spec.name, target, spec.params, spec.mesh, spec))
    except PallasiteError as error:
        return error.message
    return ""


@pytest.mark.parametrize("size", [16384, 8192, 32768])
def test_bytes(unit, size):
    def body(x, o, tile, barrier):
        announce(barrier, size)
        fetch(x, tile, barrier)
        poll(barrier)
        o[...] = tile[...]

    found = outcome(body)
    if size == 16384:
        assert not found
    else:
        assert f"bring {'more' if size == 8192 else 'fewer'} bytes" in found


@pytest.mark.parametrize("waits", [True, False])
def test_reads(unit, waits):
    def body(x, o, tile, barrier):
        announce(barrier, 16384)
        fetch(x, tile, barrier)
        if waits:
            poll(barrier)
        scan_tile(tile)
        if not waits:
            poll(barrier)
        o[...] = x[...]

    assert ("read while a copy" in outcome(body)) == (not waits)


def test_what_nobody_declares_is_not_followed():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        poll(barrier)
        o[...] = tile[...]
        plgpu.barrier_wait(barrier)

    assert not outcome(body)
