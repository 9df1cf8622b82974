"""Loops and index arithmetic, against plain Python."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.language.interpreter import run_kernel, spec_of

from pallasite.errors import InvalidValueError
from pallasite.language import PUBLIC_NAMES
from pallasite.language.kernel import kernel
from pallasite_std.pipelines.helpers import nd_loop, planar_snake
from pallasite_std.plugin import pallasite_names

NAMES = {**PUBLIC_NAMES, **pallasite_names()}


def visited(grid, programs, **arguments):
    """For each program, the indices that its loop visits, in order."""

    def body(o):
        @nd_loop(grid, collective_axes="p", **arguments)
        def _(info):
            program = jax.lax.axis_index("p")
            linear = 0
            for index, size in zip(info.index, grid, strict=True):
                linear = linear * size + index
            o[program, info.local_index] = linear
            o[program, 31] = info.num_local_steps

    k = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((programs, 32), jnp.int32),
        grid=(programs,),
        grid_names=("p",),
    )
    (out,), _ = run_kernel(spec_of(k))
    return [list(row[: row[31]]) if row[31] > 0 else [] for row in out]


@pytest.mark.parametrize(("grid", "programs"), [((2, 3), 4), ((3, 3), 2), ((5,), 5), ((2, 2), 3)])
def test_nd_loop(grid, programs):
    steps = list(range(int(np.prod(grid))))
    assert visited(grid, programs) == [steps[p::programs] for p in range(programs)]


def test_nd_loop_by_tiles():
    order = [
        (2 * a + c) * 6 + 3 * b + d
        for a, b, c, d in itertools.product(range(2), range(2), range(2), range(3))
    ]
    assert visited((4, 6), 3, tiling=(2, 3)) == [order[p::3] for p in range(3)]


def test_nd_loop_carries():
    def body(o):
        @nd_loop((7,), collective_axes="p", init_carry=jnp.int32(0))
        def total(info, carry):
            return carry + info.index[0]

        o[0] = total

    k = kernel(body, out_type=jax.ShapeDtypeStruct((1,), jnp.int32), grid=(1,), grid_names=("p",))
    (out,), _ = run_kernel(spec_of(k))
    assert out[0] == 21


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("no axis named 'q'", dict(collective_axes="q")),
        ("a tile of 2 does not divide 3", dict(tiling=(2, 1))),
        ("the tiling has 1", dict(tiling=(1,))),
    ],
)
def test_nd_loop_errors(message, arguments):
    def body():
        nd_loop((3, 4), **(dict(collective_axes="p") | arguments))(lambda info: None)

    with pytest.raises(InvalidValueError, match=message):
        kernel(body, grid=(1,), grid_names=("p",))()


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (3, 4)])
@pytest.mark.parametrize("minor_dim", [0, 1])
@pytest.mark.parametrize("tile_width", [1, 2, 3])
def test_planar_snake(shape, minor_dim, tile_width):
    """Visits everything once; steps inside a strip go to a neighbour."""
    count = shape[0] * shape[1]
    positions = jax.vmap(lambda i: jnp.stack(planar_snake(i, shape, minor_dim, tile_width)))(
        jnp.arange(count, dtype=jnp.int32)
    )
    positions = [tuple(p) for p in np.asarray(positions)]
    assert sorted(positions) == list(itertools.product(*map(range, shape)))
    for a, b in itertools.pairwise(positions):
        assert max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= max(tile_width, 1)


# --- The public names ---
def resolve(name):
    module, attribute = NAMES[name].split(":")
    return getattr(__import__(module, fromlist=[attribute]), attribute)


# Names that upstream does not have.
OWN = {"barrier_expect"}


@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_public_name(name):
    """Every name exists, is documented, and takes the parameters that upstream's takes."""
    value = resolve(name)
    assert value.__doc__ or name == "Transform"
    import jax.experimental.pallas.mosaic_gpu as upstream

    if name in OWN:
        assert not hasattr(upstream, name)
        return
    theirs = getattr(upstream, name)
    if not inspect.isfunction(theirs):
        return
    ours = inspect.signature(value).parameters
    for parameter in inspect.signature(theirs).parameters.values():
        if parameter.name == "mesh_kwargs":
            continue
        assert parameter.name in ours, parameter.name
        mine = ours[parameter.name]
        assert mine.kind == parameter.kind, parameter.name
        simple = int | str | bool | tuple | None
        if isinstance(parameter.default, simple) and name != "kernel":
            assert mine.default == parameter.default, parameter.name


def test_upstream_names_are_there_or_in_a_plugin():
    import jax.experimental.pallas.mosaic_gpu as upstream

    from pallasite import gpu
    from pallasite.known_plugins import known_plugins

    plugins = {name for plugin in known_plugins() for name in plugin.names}
    missing = {
        name
        for name in dir(upstream)
        if not name.startswith("_") and name not in dir(gpu) and name not in plugins
    }
    assert missing == set()


def test_the_package_imports_nothing_by_itself():
    code = "import sys, pallasite.language; assert 'jax' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
