"""Random calls of kernels from JAX programs, against the same programs without kernels.

Small kernels are called by keywords, under custom derivatives, ``jax.vmap``, ``jax.checkpoint``,
loops and branches of JAX, and in ``jax.shard_map``, where they tell devices apart or not and have
operands that all devices share; collective operations are differentiated by such operands. Elements
have 8 to 64 bits. Some kernels read arrays whose elements 32 bits cannot count.

    python -m tests.fuzz calls --seed 0 --count 100
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from tests.fuzz import _executors
from tests.fuzz import _loop_terms as terms
from tests.fuzz._executors import Executor
from tests.fuzz._seeds import add_options, check_seeds

import pallasite
from pallasite import gpu as plgpu
from pallasite_multigpu import ops
from pallasite_simulator import simulate

AXIS = "x"
DEVICES = 2
BF16 = np.dtype(ml_dtypes.bfloat16)
NARROW = (BF16, *map(np.dtype, ("float32", "float32", "int32", "int32", "int8", "uint8", "uint32")))
WIDE = tuple(map(np.dtype, ("float64", "int64", "uint64")))
TOLERANCES = {BF16: 3e-2, np.dtype(np.float32): 2e-5, np.dtype(np.float64): 1e-12}

type Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A call in a program.

    Attributes:
      text: that describes it.
      arrays: its operands.
      make: ``make(True, devices)`` returns a function of the operands that calls kernels, and
        ``make(False, devices)`` the same without; both return a list of arrays.
      wide: whether 64-bit types are enabled.
      devices: how many it needs.
      tolerance: relative to the largest number of a result.
    """

    text: str
    arrays: list[np.ndarray]
    make: Callable[[bool, Sequence[Any]], Function]
    wide: bool
    devices: int
    tolerance: float

    def __str__(self) -> str:
        operands = ", ".join(f"{x.dtype}{list(x.shape)}" for x in self.arrays)
        return f"{self.text} of {operands}{', 64-bit types' if self.wide else ''}"


@dataclasses.dataclass
class Call:
    """A call while it is made up, from the kernel outwards.

    Attributes:
      shapes: of the operands.
      result: shape of the result.
      make: see :class:`Program`; of functions that return one array.
      words: of the description, outermost last.
      varies: for each operand, whether it differs between devices; None without devices.
    """

    shapes: list[tuple[int, ...]]
    result: tuple[int, ...]
    make: Callable[[bool, Sequence[Any]], Function]
    words: list[str]
    varies: list[bool] | None = None


class Generator:
    """Makes a program from a random state."""

    def __init__(self, choose: random.Random):
        self.choose = choose
        self.wide = choose.random() < 0.3
        self.dtype = choose.choice((*NARROW, *WIDE * 2) if self.wide else NARROW)
        self.is_float = self.dtype == BF16 or self.dtype.kind == "f"
        self.differentiates = self.is_float and choose.random() < 0.6

    def array(self, shape: tuple[int, ...]) -> np.ndarray:
        values = np.random.default_rng(self.choose.getrandbits(32))
        if self.is_float:
            return (values.integers(-32, 32, shape) / 8).astype(self.dtype)
        info = np.iinfo(self.dtype)
        low, high = (info.min, info.max) if self.choose.random() < 0.5 else (0, 100)
        return values.integers(low, high, shape, self.dtype, endpoint=True)

    def shape(self) -> tuple[int, ...]:
        rank = self.choose.choice([1, 2, 2, 3])
        return tuple(self.choose.choice([1, 2, 3, 4, 5, 8, 16, 17, 33]) for _ in range(rank))

    def program(self) -> Program:
        """A program."""
        if self.choose.random() < 0.3:
            return self.collective()
        return self.call()

    # Kernels in programs ----------------------------------------------------------------------

    def call(self) -> Program:
        """A kernel in a program."""
        choose = self.choose
        in_mesh = choose.random() < 0.5
        call = self.kernel(in_mesh)
        wrappers = [self.vmap, self.mapped, self.repeated, self.branch, self.remat, self.jit]
        for _ in range(choose.randint(0, 2)):
            choose.choice(wrappers)(call)
        if in_mesh:
            self.shard_map(call)
        if choose.random() < 0.3:
            choose.choice([self.remat, self.jit])(call)
        arrays = [self.array(shape) for shape in call.shapes]
        by = tuple(i for i in range(len(arrays)) if choose.random() < 0.7) or (0,)

        def make(kernels: bool, devices: Sequence[Any]) -> Function:
            function = call.make(kernels, devices)
            if not self.differentiates:
                return lambda *given: [function(*given)]

            def differentiated(*given: Any) -> list[Any]:
                result, pull = jax.vjp(function, *given)
                slopes = pull(jnp.ones_like(result) * jnp.asarray(0.5, result.dtype))
                return [result, *(slopes[i] for i in by)]

            return differentiated

        text = ", ".join(call.words) + (f", by {by}" if self.differentiates else "")
        tolerance = TOLERANCES.get(self.dtype, 0.0)
        return Program(text, arrays, make, self.wide, DEVICES if in_mesh else 1, tolerance)

    def kernel(self, in_mesh: bool) -> Call:
        """A kernel of some operands of one shape."""
        choose = self.choose
        shape, count = self.shape(), choose.randint(1, 3)
        tells_apart = in_mesh and choose.random() < 0.5
        semantics = choose.choice(list(plgpu.LoweringSemantics))
        text, function, slopes = self.function(count)
        names = ["a", "b", "c"][:count]
        way = choose.choice(["plain", "keywords", "some keywords"])
        if self.differentiates:
            way = choose.choice(["custom_vjp", "custom_vjp of it", "custom_jvp of it"])
        out_type = jax.ShapeDtypeStruct(shape, self.dtype)
        params = plgpu.CompilerParams(lowering_semantics=semantics)

        def whole(*given: Any) -> Any:
            result = function(*given)
            return result + lax.axis_index(AXIS).astype(self.dtype) if tells_apart else result

        def called(of: Function, parameters: Sequence[str]) -> Function:
            def on_refs(*refs: Any) -> None:
                refs[-1][...] = of(*(ref[...] for ref in refs[:-1]))

            # The names of the parameters are those of keywords.
            places = ", ".join([*parameters, "out"])
            body = eval(f"lambda {places}: on_refs({places})", {"on_refs": on_refs})
            made: Function = plgpu.kernel(body, out_type=out_type, compiler_params=params)
            return made

        def make(kernels: bool, devices: Sequence[Any]) -> Function:
            if not kernels:
                return whole
            kernel = called(whole, names)
            if way == "plain":
                return kernel
            if "keywords" in way:
                # What JAX makes of the kernel finds the names of its operands.
                named = jax.custom_jvp(kernel)
                named.defjvp(lambda primals, tangents: (kernel(*primals), tangents[0]))
                first = 1 if way == "some keywords" else 0
                return lambda *given: named(
                    *given[:first], **dict(zip(names[first:], given[first:], strict=True))
                )
            inner: Function = kernel if way.endswith("of it") else lambda *given: kernel(*given)
            if way == "custom_jvp of it":
                forward = jax.custom_jvp(inner)

                @forward.defjvp
                def _(primals: Any, tangents: Any) -> Any:
                    parts = [s(*primals) * t for s, t in zip(slopes, tangents, strict=True)]
                    return inner(*primals), functools.reduce(jnp.add, parts)

                return forward
            pulled = [called(lambda g, *given, s=s: g * s(*given), ["g", *names]) for s in slopes]
            both = jax.custom_vjp(inner)
            both.defvjp(
                lambda *given: (inner(*given), given),
                lambda given, g: tuple(one(g, *given) for one in pulled),
            )
            return both

        words = [f"{semantics.name} kernel {text}", way]
        words += ["tells devices apart"] if tells_apart else []
        varies = [choose.random() < 0.5 for _ in range(count)] if in_mesh else None
        if tells_apart and varies is not None:
            varies.append(True)
        return Call([shape] * count, shape, make, words, varies)

    def function(self, count: int) -> tuple[str, Function, list[Function]]:
        """A function of so many arrays, and its derivatives."""
        choose = self.choose
        if not self.is_float:
            chain = [terms.unary(choose, self.dtype) for _ in range(choose.randint(1, 3))]
            pairs = [terms.binary(choose, self.dtype) for _ in range(count - 1)]

            def integers(*given: Any) -> Any:
                result = given[0]
                for other, (_, pair) in zip(given[1:], pairs, strict=True):
                    result = pair(result, other)
                for _, one in chain:
                    result = one(result)
                return result

            return " | ".join(name for name, _ in [*pairs, *chain]), integers, []
        factors = [choose.choice([0.5, 2.0, -1.0, 0.25]) for _ in range(count)]
        multiplies = count > 1 and choose.random() < 0.5

        def number(x: Any, factor: float) -> Any:
            return jnp.asarray(factor, x.dtype)

        def linear(*given: Any) -> Any:
            parts = [x * number(x, f) for x, f in zip(given, factors, strict=True)]
            result = functools.reduce(jnp.add, parts)
            return result + given[0] * given[1] if multiplies else result

        def slope(place: int) -> Function:
            def derivative(*given: Any) -> Any:
                own = jnp.full_like(given[0], factors[place])
                return own + given[1 - place] if multiplies and place < 2 else own

            return derivative

        text = f"{factors}{' with a product' if multiplies else ''}"
        return text, linear, [slope(place) for place in range(count)]

    # Around them ------------------------------------------------------------------------------

    def _wrap(self, call: Call, word: str, wrap: Callable[[Function], Function]) -> None:
        make = call.make
        call.make = lambda kernels, devices: wrap(make(kernels, devices))
        call.words.append(word)

    def jit(self, call: Call) -> None:
        self._wrap(call, "jit", jax.jit)

    def remat(self, call: Call) -> None:
        self._wrap(call, "checkpoint", jax.checkpoint)

    def _axes(self, call: Call, *, first: bool) -> tuple[list[int | None], int]:
        """Adds an axis to some operands and to the result."""
        choose, size = self.choose, self.choose.randint(1, 3)
        axes: list[int | None] = []
        for number, shape in enumerate(call.shapes):
            axis = 0 if first else choose.randint(0, len(shape))
            has = choose.random() < 0.7 or (
                number == len(call.shapes) - 1 and not any(one is not None for one in axes)
            )
            axes.append(axis if has else None)
            if has:
                call.shapes[number] = (*shape[:axis], size, *shape[axis:])
        call.result = (size, *call.result)
        return axes, size

    def vmap(self, call: Call) -> None:
        axes, _ = self._axes(call, first=False)
        self._wrap(call, f"vmap {axes}", lambda function: jax.vmap(function, tuple(axes)))

    def mapped(self, call: Call) -> None:
        """A loop of JAX over parts of operands."""
        axes, _ = self._axes(call, first=True)

        def wrap(function: Function) -> Function:
            def over(*given: Any) -> Any:
                own = tuple(x for x, axis in zip(given, axes, strict=True) if axis is not None)

                def one(parts: Any) -> Any:
                    rest = iter(parts)
                    pairs = zip(given, axes, strict=True)
                    return function(*(x if axis is None else next(rest) for x, axis in pairs))

                return lax.map(one, own)

            return over

        self._wrap(call, f"map {axes}", wrap)

    def repeated(self, call: Call) -> None:
        """A loop that carries the first operand."""
        if call.shapes[0] != call.result:
            return
        times = self.choose.randint(0, 3)

        def wrap(function: Function) -> Function:
            def over(*given: Any) -> Any:
                start = self._as_result(function, given)
                return lax.fori_loop(0, times, lambda _, x: function(x, *given[1:]), start)

            return over

        self._wrap(call, f"{times} times", wrap)

    def branch(self, call: Call) -> None:
        def wrap(function: Function) -> Function:
            def either(*given: Any) -> Any:
                if given[0].shape != call_result:
                    return function(*given)
                other = self._as_result(function, given)
                flag = jnp.max(given[-1]).astype(jnp.float32) > 1
                return lax.cond(flag, lambda: function(*given), lambda: other)

            return either

        call_result = call.result
        self._wrap(call, "branch", wrap)

    def _as_result(self, function: Function, given: Sequence[Any]) -> Any:
        """The first operand, which differs between devices where the result does."""
        wanted = jax.typeof(jax.eval_shape(function, *given)).manual_axis_type.varying
        missing = tuple(wanted - jax.typeof(given[0]).manual_axis_type.varying)
        return lax.pcast(given[0], missing, to="varying") if missing else given[0]

    def shard_map(self, call: Call) -> None:
        """On several devices, each with parts of some operands."""
        varies = call.varies
        assert varies is not None
        count = len(call.shapes)
        result_varies = any(varies)
        sums = result_varies and self.choose.random() < 0.3
        for i, shape in enumerate(call.shapes):
            if varies[i]:
                call.shapes[i] = (DEVICES * shape[0], *shape[1:])
        specs = tuple(P(AXIS) if one else P() for one in varies[:count])
        out = P(AXIS) if result_varies and not sums else P()
        make = call.make

        def whole(kernels: bool, devices: Sequence[Any]) -> Function:
            function = make(kernels, devices)

            def on_one(*given: Any) -> Any:
                if kernels and result_varies and self.differentiates:
                    # Custom derivatives are of the types of their operands.
                    given = tuple(
                        x if one else lax.pcast(x, AXIS, to="varying")
                        for x, one in zip(given, varies[:count], strict=True)
                    )
                result = function(*given)
                return lax.psum(result, AXIS) if sums else result

            mesh = jax.sharding.Mesh(np.array(devices[:DEVICES]), (AXIS,))
            return jax.jit(jax.shard_map(on_one, mesh=mesh, in_specs=specs, out_specs=out))

        call.make = whole
        call.words.append(f"shard_map {specs} to {out}{' of sums' if sums else ''}")

    # Collective operations --------------------------------------------------------------------

    def collective(self) -> Program:
        """A collective operation, by operands that devices share or not, with gradients."""
        choose = self.choose
        shape = tuple(DEVICES * n if i == 0 else n for i, n in enumerate(self.shape()))
        name = choose.choice(["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
        reduction = choose.choice(["add", "add", "min", "max"]) if "reduce" in name else ""
        differentiates = self.differentiates and reduction in ("add", "")
        shared = choose.random() < 0.4
        options = {"reduction": reduction} if reduction else {}
        tiled = functools.partial(lax.all_gather, axis_name=AXIS, axis=0, tiled=True)

        def of_jax(x: Any) -> Any:
            if name == "all_gather":
                return tiled(x)
            if name == "all_to_all":
                return lax.all_to_all(x, AXIS, 0, 0, tiled=True)
            if reduction == "add":
                wide = x.astype(jnp.float32) if x.dtype == BF16 else x
                total = lax.psum(wide, AXIS).astype(x.dtype)
            else:
                total = {"min": lax.pmin, "max": lax.pmax}[reduction](x, AXIS)
            if name == "all_reduce":
                return lax.pcast(total, AXIS, to="varying")
            size = x.shape[0] // DEVICES
            return lax.dynamic_slice_in_dim(total, lax.axis_index(AXIS) * size, size)

        def make(kernels: bool, devices: Sequence[Any]) -> Function:
            mesh = jax.sharding.Mesh(np.array(devices[:DEVICES]), (AXIS,))

            def on_one(x: Any) -> Any:
                if kernels:
                    result = getattr(ops, name)(x, axis_name=AXIS, **options)
                else:
                    result = of_jax(lax.pcast(x, AXIS, to="varying") if shared else x)
                # Parts that differ, so that gradients do.
                varying = jax.typeof(result).manual_axis_type.varying
                result = result if varying else lax.pcast(result, AXIS, to="varying")
                return result * (lax.axis_index(AXIS) + 1).astype(result.dtype)

            specs = P() if shared else P(AXIS)
            call = jax.jit(jax.shard_map(on_one, mesh=mesh, in_specs=specs, out_specs=P(AXIS)))
            if not differentiates:
                return lambda x: [call(x)]

            def differentiated(x: Any) -> list[Any]:
                result, pull = jax.vjp(call, x)
                return [result, pull(jnp.ones_like(result))[0]]

            return differentiated

        text = f"{name} {reduction}{' of shared operands' if shared else ''}"
        text += ", differentiated" if differentiates else ""
        whole = shape if shared else (DEVICES * shape[0], *shape[1:])
        tolerance = TOLERANCES.get(self.dtype, 0.0)
        return Program(text, [self.array(whole)], make, self.wide, DEVICES, tolerance)


# Large arrays -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Large:
    """A kernel that reads parts of an array of more elements than 32 bits count.

    Attributes:
      shape: of the array, of bytes.
      parts: where each part begins.
      size: elements of a part.
      semantics: of the kernel.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    size: int
    semantics: Any

    def kernel(self) -> Function:
        """A function of the array and of the numbers where parts begin."""
        rank = len(self.shape)

        def body(x_ref: Any, places_ref: Any, out_ref: Any) -> None:
            @pl.loop(0, len(self.parts))
            def _(part: Any) -> None:
                *outer, last = (places_ref[part, d] for d in range(rank))
                out_ref[part] = x_ref[(*outer, pl.ds(last, self.size))]

        made: Function = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((len(self.parts), self.size), jnp.uint8),
            compiler_params=plgpu.CompilerParams(lowering_semantics=self.semantics),
        )
        return made

    def check(self, executors: Sequence[Executor]) -> None:
        """Compares the parts with what is there."""
        places = np.array(self.parts, np.int32)
        # Pages that nothing is written to take no memory.
        array = np.zeros(self.shape, np.uint8)
        views = [array[(*p[:-1], slice(p[-1], p[-1] + self.size))] for p in self.parts]
        for number, view in enumerate(views):
            view[...] = np.arange(self.size) + 3 * number + 1
        expected = np.stack(views)
        for executor in executors:
            if executor.name == "simulator":
                compiled = pallasite.compile(self.kernel(), array, places, target="sm_90a")
                found = simulate(compiled, array, places).outputs[0]
            else:
                with jax.default_device(executor.device):
                    found = self.kernel()(jnp.asarray(array), jnp.asarray(places))
            np.testing.assert_array_equal(np.asarray(found), expected)


def make_large(seed: int) -> Large:
    """The kernel of a seed."""
    choose = random.Random(seed)
    rank, size = choose.choice([2, 3]), choose.choice([1, 16, 100, 128])
    outer = [choose.choice([2, 3, 4]) for _ in range(rank - 1)]
    columns = (1 << 31) // math.prod(outer) + choose.choice([1, 7, 64, 4096])
    shape = (*outer, columns)
    parts = [tuple(n - 1 for n in outer) + (columns - size,), (0,) * rank]
    parts += [
        (*(choose.randrange(n) for n in outer), choose.randrange(columns - size))
        for _ in range(choose.randint(0, 2))
    ]
    return Large(shape, tuple(parts), size, choose.choice(list(plgpu.LoweringSemantics)))


# Checks -------------------------------------------------------------------------------------------


def make_program(seed: int) -> Program:
    """The program of a seed."""
    return Generator(random.Random(seed)).program()


def check(program: Program, executors: Sequence[Executor] | None = None) -> str | None:
    """Runs a program with kernels and without, and compares the results.

    Args:
      program: the program.
      executors: what runs kernels; by default what serves JAX's first device. Those that have too
        few devices are left out.

    Returns:
      Whether the bits of two executors are equal, or why they need not be.

    Raises:
      AssertionError: results differ.
      PallasiteError: the kernel does not compile.
    """
    executors = _executors.executors() if executors is None else executors
    cpus = jax.local_devices(backend="cpu")
    with jax.enable_x64(program.wide):
        with _executors.on_cpu():
            expected = _results(program, False, cpus)
        results = []
        target: contextlib.AbstractContextManager[Any] = pallasite.target("sm_90a")
        with target, _executors.recorded() as ptx:
            for executor in executors:
                devices = jax.local_devices(backend=executor.device.platform)
                if len(devices) < program.devices:
                    continue
                with jax.default_device(executor.device):
                    results.append(_results(program, True, devices))
                _compare(program, results[-1], expected, executor.name)
    if len(results) < 2:
        return None
    return _executors.compared(
        results[0], results[1], lambda: _executors.inexact(ptx, outside=True)
    )


def _results(program: Program, kernels: bool, devices: Sequence[Any]) -> list[np.ndarray]:
    call = program.make(kernels, devices)
    return [np.asarray(one) for one in call(*map(jnp.asarray, program.arrays))]


def _compare(
    program: Program, found: Sequence[np.ndarray], expected: Sequence[np.ndarray], name: str
) -> None:
    for number, (got, want) in enumerate(zip(found, expected, strict=True)):
        where = f"on the {name}, result {number}"
        assert got.dtype == want.dtype and got.shape == want.shape, where
        if not program.tolerance:
            np.testing.assert_array_equal(got, want, where)
            continue
        got, want = (one.astype(np.float64) for one in (got, want))
        largest = max(1.0, float(np.abs(want).max(initial=0.0)))
        np.testing.assert_allclose(got, want, 0, program.tolerance * largest, err_msg=where)


def main(arguments: Sequence[str]) -> int:
    """Checks random calls; prints those that fail, and how many."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz calls", description=__doc__)
    add_options(parser, "calls")
    parser.add_argument("--large", action="store_true", help="of kernels with large arrays only")
    given = parser.parse_args(arguments)
    executors = _executors.executors(given.executor)
    if given.large:
        return check_seeds(given, "calls", make_large, lambda large: large.check(executors))
    return check_seeds(given, "calls", make_program, lambda program: check(program, executors))
