"""Random kernels with a planted mistake, and the same kernels without it.

A kernel brings tiles through a ring of slots, by one thread or by a producer and consumers, adds
them up, and stores the sums directly or through shared memory. The checks must say nothing of the
right one, which the simulator also runs, and must find what is wrong with the other one; what they
cannot be certain of, the simulator's sanitizer must find.

    python -m tests.fuzz checks --seed 0 --count 100
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

import pallasite
import pallasite_simulator
from pallasite import gpu as plgpu
from pallasite.errors import PallasiteError
from pallasite_std.checks.passes import KernelCheckWarning

COLUMNS = (16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Program:
    """A random kernel.

    Attributes:
      blocks: of the grid.
      steps: of each block.
      slots: of the ring.
      inputs: how many tiles a step takes.
      consumers: threads that add up; 0 if one thread does everything.
      expects: whether one call announces the bytes of a step's copies.
      staged: slots for results, or 0 if they are stored directly.
      columns: of a tile, which has 64 rows.
      doubt: what is done only if a number in memory says so, which it does: "use" the tiles of a
        step, "wait" for them, or a "store" of something else before; "" for nothing.
      mistake: what is wrong, or None.
      at: the step where it is, if it is in one.
    """

    blocks: int
    steps: int
    slots: int
    inputs: int
    consumers: int
    expects: bool
    staged: int
    columns: int
    doubt: str = ""
    mistake: str | None = None
    at: int = 0

    def mistakes(self) -> list[str]:
        """Those that can be planted."""
        found = ["wait"]
        if self.blocks > 1:
            found.append("grid")
        if self.expects:
            found += ["fewer bytes", "more bytes"]
        if self.steps > self.slots:
            found.append("early")
            if self.consumers:
                found += ["release", "arrivals"]
        if not self.staged:
            found.append("index")
        else:
            found.append("end")
            if self.steps > self.staged:
                found.append("store wait")
        return found


def make_program(seed: int) -> Program:
    """A random kernel with a random mistake."""
    choose = random.Random(seed)
    program = Program(
        blocks=choose.randint(1, 4),
        steps=choose.choice((choose.randint(1, 8), choose.randint(9, 40))),
        slots=choose.randint(1, 4),
        inputs=choose.randint(1, 2),
        consumers=choose.choice((0, 0, 1, 2)),
        expects=choose.random() < 0.5,
        staged=choose.choice((0, 1, 2)),
        columns=choose.choice(COLUMNS),
        doubt=choose.choice(("", "", "", "use", "wait", "store")),
    )
    mistake = choose.choice(program.mistakes())
    return dataclasses.replace(program, mistake=mistake, at=choose.randrange(program.steps))


def make_kernel(program: Program) -> Callable[..., Any]:
    """The kernel, of ``inputs`` arrays of 64 rows for each step of each block."""
    p = program
    rows = 64 // max(p.consumers, 1)

    def body(*refs: Any, tiles: Any, full: Any, empty: Any = None, staging: Any = None) -> None:
        *inputs, out = refs
        perhaps = pl.when(inputs[0][0, 0] > -jnp.inf) if p.doubt else None
        first = lax.axis_index("block") * p.steps

        def fetch(step: Any) -> None:
            slot = lax.rem(step, p.slots)
            source = pl.ds((first + step) * 64, 64)
            slots = [tile.at[slot] for tile in tiles]
            if p.expects:
                plgpu.barrier_expect(full.at[slot], *slots)
            copies = list(zip(inputs, slots, strict=True))
            if p.mistake == "more bytes":
                copies.append(copies[-1])
            for number, (x, tile) in enumerate(copies):

                def copy(x: Any = x, tile: Any = tile) -> None:
                    plgpu.copy_gmem_to_smem(x.at[source], tile, full.at[slot], arrive=not p.expects)

                if p.mistake == "fewer bytes" and number == 0:
                    pl.when(step != p.at)(copy)
                else:
                    copy()

        def use(step: Any, part: Any) -> None:
            slot = lax.rem(step, p.slots)

            def wait() -> None:
                if perhaps is not None and p.doubt == "wait":
                    perhaps(lambda: plgpu.barrier_wait(full.at[slot]))
                else:
                    plgpu.barrier_wait(full.at[slot])

            if p.mistake == "wait":
                pl.when(step != p.at)(wait)
            else:
                wait()
            if p.mistake == "early":
                release(step)
            begin = part * rows
            if perhaps is not None and p.doubt == "store":

                @perhaps
                def _() -> None:
                    out[pl.ds((first + step) * 64 + begin, 1)] = tiles[0][slot, pl.ds(begin, 1)]

            total = sum(tile[slot, pl.ds(begin, rows)] for tile in tiles)
            if p.mistake != "early":
                release(step)
            at = pl.ds((first + step) * 64 + begin + (64 if p.mistake == "index" else 0), rows)
            if staging is None:

                def store() -> None:
                    out[at] = total * 2

                if perhaps is not None and p.doubt == "use":
                    perhaps(store)
                else:
                    store()
                return
            pending = p.staged if p.mistake == "store wait" else p.staged - 1
            plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
            stage = staging.at[part, lax.rem(step, p.staged)]
            stage[...] = total * 2
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, out.at[at])

        def release(step: Any) -> None:
            if p.consumers:
                plgpu.barrier_arrive(empty.at[lax.rem(step, p.slots)])
                return
            plgpu.commit_smem()
            pl.when(step + p.slots < p.steps)(lambda: fetch(step + p.slots))

        def end() -> None:
            if p.staged and p.mistake != "end":
                plgpu.wait_smem_to_gmem(0)

        def consume(part: Any) -> None:
            pl.loop(0, p.steps)(lambda step: use(step, part))
            end()

        def produce() -> None:
            @pl.loop(0, p.steps)
            def _(step: Any) -> None:
                if p.mistake != "release":
                    slot = empty.at[lax.rem(step, p.slots)]
                    pl.when(step >= p.slots)(lambda: plgpu.barrier_wait(slot))
                fetch(step)

        if p.consumers:
            thread = lax.axis_index("thread")
            pl.when(thread == p.consumers)(produce)
            pl.when(thread < p.consumers)(lambda: consume(thread))
        else:
            for step in range(min(p.slots, p.steps)):
                fetch(jnp.int32(step))
            consume(jnp.int32(0))

    tile = plgpu.SMEM((p.slots, 64, p.columns), jnp.float32)
    scratch: dict[str, Any] = {
        "tiles": [tile] * p.inputs,
        "full": plgpu.Barrier(num_arrivals=1 if p.expects else p.inputs, num_barriers=p.slots),
    }
    options: dict[str, Any] = {}
    if p.consumers:
        arrivals = p.consumers + (p.mistake == "arrivals")
        scratch["empty"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=p.slots)
        options = {"num_threads": p.consumers + 1, "thread_name": "thread"}
    if p.staged:
        shape = (max(p.consumers, 1), p.staged, rows, p.columns)
        scratch["staging"] = plgpu.SMEM(shape, jnp.float32)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.blocks * p.steps * 64, p.columns), jnp.float32),
        grid=(p.blocks - (p.mistake == "grid"),),
        grid_names=("block",),
        scratch_types=scratch,
        **options,
    )


def findings(program: Program) -> list[str]:
    """What the checks say of a kernel, while it is compiled."""
    shape = jax.ShapeDtypeStruct((program.blocks * program.steps * 64, program.columns), "float32")
    with warnings.catch_warnings(record=True) as caught, pallasite.config.scoped(cache=False):
        warnings.simplefilter("always")
        try:
            pallasite.compile(make_kernel(program), *[shape] * program.inputs, target="sm_90a")
        except PallasiteError as error:
            return [str(error)]
    # More stages than steps are no mistake here.
    texts = [str(one.message) for one in caught if one.category is KernelCheckWarning]
    return [text for text in texts if "this pipeline has" not in text]


def check(program: Program, *, run: bool = True) -> None:
    """Both kernels.

    Raises:
      AssertionError: something is said of the right one, its result is wrong, or the mistake in the
        other one is not found.
    """
    right = dataclasses.replace(program, mistake=None)
    assert not (found := findings(right)), found
    generator = np.random.default_rng(program.steps)
    shape = (program.blocks * program.steps * 64, program.columns)
    inputs = [generator.standard_normal(shape, np.float32) for _ in range(program.inputs)]
    if run:
        result = jax.jit(make_kernel(right))(*inputs)
        np.testing.assert_allclose(result, 2 * sum(inputs), rtol=1e-6, atol=1e-6)
    if not findings(program):
        assert sanitized(program, inputs), f"nothing is found: {program.mistake}"


def sanitized(program: Program, inputs: list[np.ndarray]) -> bool:
    """Whether the simulator's sanitizer finds something, or the kernel cannot end."""
    compiled = pallasite.compile(make_kernel(program), *inputs, target="sm_90a")
    try:
        return bool(pallasite_simulator.simulate(compiled, *inputs, sanitize=True).findings)
    except PallasiteError:
        return True


def main(arguments: list[str]) -> int:
    """Returns 1 if any pair fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz checks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--no-run", action="store_true", help="only compile the kernels")
    options = parser.parse_args(arguments)
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        program = make_program(seed)
        try:
            check(program, run=not options.no_run)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {program}\n  {type(error).__name__}: {error}", file=sys.stderr)
    print(f"{options.count} pairs, {failed} failed")
    return int(failed > 0)
