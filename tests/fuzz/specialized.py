"""Random warp-specialized kernels, right ones and such with a mistake.

A producer, a warpgroup or some of its warps, brings tiles through a ring of slots; consumers use
them and give the slots back. Of the right kernels the checks must say nothing. Of those with a
mistake, they may say something only if the simulator's sanitizer does so too.

    python -m tests.fuzz specialized --seed 0 --count 1000
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from tests.checks.checked import findings_of

import pallasite
import pallasite_simulator
from pallasite import gpu as plgpu
from pallasite.errors import PallasiteError

ROWS, COLUMNS = 64, 16


@dataclasses.dataclass(frozen=True)
class Mistake:
    """What is left out or done wrongly.

    Attributes:
      what: see ``MISTAKES``.
      where: "always", "step" if only in step ``at`` of each tile, "block" if only in block 0.
      at: that step.
    """

    what: str
    where: str = "always"
    at: int = 0


MISTAKES = (
    *("full wait", "empty wait", "release", "early release", "more arrivals", "fewer arrivals"),
    *("more bytes", "fewer bytes", "longer", "shorter", "producer shorter", "other slot"),
    *("reuse early", "reuse late", "commit", "store wait", "end", "drain"),
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A random kernel.

    Attributes:
      blocks: of the grid.
      tiles: of each block, one after the other.
      steps: of each tile.
      slots: of the ring.
      inputs: how many arrays there are tiles of.
      consumers: warpgroups that use them.
      expects: whether one call announces the bytes of a step's copies.
      counted: whether the slot is the remainder of a counter, or counted itself.
      flat: whether one loop goes over all steps of all tiles.
      prologue: whether the first slots are filled before the loop.
      lag: whether consumers give slots back in the next step.
      skips: a number and a remainder: steps in which nothing is done. None for all steps.
      drains: whether the producer waits until all slots are given back.
      warps: whether "one" warp copies, or one for "each" input; "" if the warpgroup does.
      staged: slots for results, or 0 if they are stored directly.
      branch: "idle" if only the first block does anything, "more" if it has one more tile, "parts"
        if its copies are elsewhere in the program; "" for nothing.
      lane: whether the semantics are those of lanes.
      mistake: what is wrong, or None.
    """

    blocks: int
    tiles: int
    steps: int
    slots: int
    inputs: int
    consumers: int
    expects: bool
    counted: bool
    flat: bool
    prologue: bool
    lag: bool
    skips: tuple[int, int] | None
    drains: bool
    warps: str
    staged: int
    branch: str
    lane: bool
    mistake: Mistake | None = None

    def used(self, step: int) -> bool:
        """Whether anything is done in a step of a tile."""
        return self.skips is None or step % self.skips[0] != self.skips[1]

    @property
    def most(self) -> int:
        """Steps of one block in which something is done, at most."""
        tiles = self.tiles + (self.branch == "more")
        return tiles * sum(map(self.used, range(self.steps)))


def make_program(seed: int) -> Program:
    """A random kernel without a mistake."""
    choose = random.Random(seed)

    def maybe(probability: float) -> bool:
        return choose.random() < probability

    slots = choose.randint(1, 6)
    warps = choose.choice(("", "", "one", "each"))
    skips = None
    if maybe(0.2):
        number = choose.randint(2, 4)
        skips = number, choose.randrange(number)
    return Program(
        blocks=choose.randint(1, 3),
        tiles=choose.choice((1, 1, 2, 3, choose.randint(4, 14))),
        steps=choose.choice((choose.randint(1, 8), choose.randint(9, 40))),
        slots=slots,
        inputs=choose.randint(1, 2),
        consumers=choose.choice((1, 1, 2)),
        expects=maybe(0.5) and warps != "each",
        counted=maybe(0.5),
        flat=maybe(0.4),
        prologue=maybe(0.3) and skips is None,
        lag=slots > 1 and maybe(0.3),
        skips=skips,
        drains=maybe(0.3),
        warps=warps,
        staged=choose.choice((0, 0, 1, 2)),
        branch=choose.choice(("", "", "", "idle", "more", "parts")),
        lane=maybe(0.5),
    )


def with_mistake(program: Program, seed: int) -> Program:
    """The same with a random mistake, which may be none."""
    choose = random.Random(seed)
    while True:
        what = choose.choice(MISTAKES)
        needs = {
            "fewer arrivals": program.consumers > 1,
            "more bytes": program.expects,
            "fewer bytes": program.expects,
            "commit": program.staged > 0 and program.lane,
            "store wait": program.staged > 0,
            "end": program.staged > 0,
            "drain": program.drains,
        }
        if needs.get(what, True):
            break
    where = choose.choice(("always", "always", "step", "block"))
    return dataclasses.replace(
        program, mistake=Mistake(what, where, choose.randrange(program.steps))
    )


def _unless(condition: Any, function: Callable[[], Any]) -> None:
    if condition is False:
        function()
    elif condition is not True:
        pl.when(jnp.logical_not(condition))(function)


class Body:
    """The kernel's body."""

    def __init__(self, program: Program):
        self.program = program

    def __call__(
        self, *refs: Any, buffers: Any, full: Any, empty: Any, staging: Any = None
    ) -> None:
        """Traces it."""
        p = self.program
        *self.inputs, self.out = refs
        self.buffers, self.full, self.empty, self.staging = buffers, full, empty, staging
        self.block = lax.axis_index("block")
        self.tiles: Any = p.tiles
        if p.branch == "more":
            self.tiles = p.tiles + jnp.where(self.block == 0, 1, 0)
        if p.branch == "idle":
            pl.when(self.block == 0)(self.threads)
        else:
            self.threads()

    def threads(self) -> None:
        """What each thread does."""
        p = self.program
        thread = lax.axis_index("thread")
        pl.when(thread == p.consumers)(self.producer)
        pl.when(thread < p.consumers)(lambda: self.consumer(thread))

    def wrong(self, what: str, step: Any = None) -> Any:
        """Whether a mistake is here, which may be known only when the kernel runs."""
        mistake = self.program.mistake
        if mistake is None or mistake.what != what:
            return False
        if mistake.where == "step" and step is not None:
            return step == mistake.at
        return self.block == 0 if mistake.where == "block" else True

    def all_steps(self, function: Callable[..., Any], steps: int, first: int, init: Any) -> Any:
        """Runs ``function(step of the tile, state)``, from a step of the first tile on."""
        p = self.program
        if p.flat or first:

            def flat(number: Any, state: Any) -> Any:
                return function(lax.rem(number, p.steps), state)

            return lax.fori_loop(first, self.tiles * p.steps + steps - p.steps, flat, init)

        def tile(_: Any, state: Any) -> Any:
            return lax.fori_loop(0, steps, function, state)

        return lax.fori_loop(0, self.tiles, tile, init)

    def step(self, function: Callable[..., None]) -> Callable[..., Any]:
        """Counts uses and slots around a step."""
        p = self.program

        def step(number: Any, state: Any) -> Any:
            count, slot = state
            at = lax.rem(count, p.slots) if p.counted else slot
            if p.skips is None:
                function(number, count, at)
                use: Any = True
            else:
                use = lax.rem(number, p.skips[0]) != p.skips[1]
                pl.when(use)(lambda: function(number, count, at))
            following = jnp.where(slot + 1 == p.slots, 0, slot + 1)
            if use is True:
                return count + 1, following
            return count + jnp.where(use, 1, 0), jnp.where(use, following, slot)

        return step

    # The producer ---------------------------------------------------------------------------------

    def producer(self) -> None:
        """Of all inputs, or each in a warp of its own."""
        p = self.program
        everything = range(p.inputs)
        if not p.warps:
            self.produce(everything)
            return

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _() -> None:
            warp = lax.axis_index("warp")
            if p.warps == "one":
                pl.when(warp == 0)(lambda: self.produce(everything))
            else:
                for number in everything:
                    pl.when(warp == number)(lambda number=number: self.produce([number]))

    def produce(self, inputs: Sequence[int]) -> None:
        """Brings tiles of some inputs."""
        p = self.program
        first = 0
        if p.prologue:
            first = min(p.slots, p.steps)
            for number in range(first):
                self.fetch(inputs, jnp.int32(number), number, number)
        start = jnp.int32(first), jnp.int32(first % p.slots)

        def fill(number: Any, count: Any, slot: Any) -> None:
            skipped = self.wrong("empty wait", number)
            free = p.slots
            if self.wrong("reuse early") is not False:
                free += 1
            if self.wrong("reuse late") is not False:
                free -= 1

            def wait() -> None:
                pl.when(count >= free)(lambda: plgpu.barrier_wait(self.empty.at[slot]))

            _unless(skipped, wait)
            self.fetch(inputs, number, count, slot)

        steps = p.steps - (self.wrong("producer shorter") is not False)
        count, slot = self.all_steps(self.step(fill), steps, first, start)
        if p.drains:
            for number in range(min(p.slots, p.most)):
                last = self.wrong("drain") is not False and number == 0
                if not last:
                    at = lax.rem(count + (p.slots - 1 - number), p.slots)
                    in_use = count > number
                    pl.when(in_use)(lambda at=at: plgpu.barrier_wait(self.empty.at[at]))

    def fetch(self, inputs: Sequence[int], number: Any, count: Any, slot: Any) -> None:
        """Starts the copies of a step."""
        p = self.program
        chosen = [self.buffers[one].at[slot] for one in inputs]
        full = self.full.at[slot]
        if p.expects:
            plgpu.barrier_expect(full, *chosen)
        source = pl.ds((self.block * p.most + count) * ROWS, ROWS)
        pairs = [(self.inputs[one], buffer) for one, buffer in zip(inputs, chosen, strict=True)]

        def copies(pairs: Sequence[Any]) -> None:
            for x, buffer in pairs:
                plgpu.copy_gmem_to_smem(x.at[source], buffer, full, arrive=not p.expects)

        if p.branch == "parts":
            pl.when(self.block == 0)(lambda: copies(pairs[:1]))
            pl.when(self.block != 0)(lambda: copies(pairs[:1]))
        else:
            _unless(self.wrong("fewer bytes", number), lambda: copies(pairs[:1]))
        copies(pairs[1:])
        more = self.wrong("more bytes", number)
        if more is True:
            copies(pairs[:1])
        elif more is not False:
            pl.when(more)(lambda: copies(pairs[:1]))

    # Consumers ------------------------------------------------------------------------------------

    def consumer(self, part: Any) -> None:
        """Uses a part of each tile."""
        p = self.program
        rows = ROWS // p.consumers

        def release(count: Any, slot: Any, number: Any) -> None:
            if p.lag:
                slot = lax.rem(slot + (p.slots - 1), p.slots)
                late = self.wrong("release", number)
                _unless(
                    late,
                    lambda: pl.when(count > 0)(lambda: plgpu.barrier_arrive(self.empty.at[slot])),
                )
            else:
                _unless(
                    self.wrong("release", number),
                    lambda: plgpu.barrier_arrive(self.empty.at[slot]),
                )

        def use(number: Any, count: Any, slot: Any) -> None:
            if self.wrong("other slot") is not False:
                slot = lax.rem(slot + 1, p.slots)
            _unless(self.wrong("full wait", number), lambda: plgpu.barrier_wait(self.full.at[slot]))
            early = self.wrong("early release") is not False
            if early:
                release(count, slot, number)
            begin = pl.ds(part * rows, rows)
            total = sum(buffer[slot, begin] for buffer in self.buffers)
            if not early:
                release(count, slot, number)
            target = self.out.at[pl.ds((self.block * p.most + count) * ROWS + part * rows, rows)]
            if not p.staged:
                target[...] = total
                return
            left = p.staged - 1
            if self.wrong("store wait") is not False:
                left += 1
            plgpu.wait_smem_to_gmem(left, wait_read_only=True)
            stage = self.staging.at[part, lax.rem(count, p.staged)]
            stage[...] = total
            _unless(self.wrong("commit", number), plgpu.commit_smem)
            plgpu.copy_smem_to_gmem(stage, target)

        steps = p.steps + (self.wrong("longer") is not False)
        steps -= self.wrong("shorter") is not False
        start = jnp.int32(0), jnp.int32(0)
        count, slot = self.all_steps(self.step(use), steps, 0, start)
        if p.lag:
            last = lax.rem(slot + (p.slots - 1), p.slots)
            pl.when(count > 0)(lambda: plgpu.barrier_arrive(self.empty.at[last]))
        if p.staged:
            _unless(self.wrong("end"), lambda: plgpu.wait_smem_to_gmem(0))


def make_kernel(program: Program) -> Callable[..., Any]:
    """The kernel, of ``inputs`` arrays."""
    p = program
    what = p.mistake.what if p.mistake else ""
    arrivals = p.consumers + (what == "more arrivals") - (what == "fewer arrivals")
    scratch: dict[str, Any] = {
        "buffers": [plgpu.SMEM((p.slots, ROWS, COLUMNS), jnp.float32)] * p.inputs,
        "full": plgpu.Barrier(num_arrivals=1 if p.expects else p.inputs, num_barriers=p.slots),
        "empty": plgpu.Barrier(num_arrivals=arrivals, num_barriers=p.slots),
    }
    if p.staged:
        shape = (p.consumers, p.staged, ROWS // p.consumers, COLUMNS)
        scratch["staging"] = plgpu.SMEM(shape, jnp.float32)
    semantics = plgpu.LoweringSemantics.Lane if p.lane else plgpu.LoweringSemantics.Warpgroup
    partial = {"standard": {"partial_outputs": True}}
    return plgpu.kernel(
        Body(program),
        out_type=shape_of(p),
        grid=(p.blocks,),
        grid_names=("block",),
        num_threads=p.consumers + 1,
        thread_name="thread",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics, plugin_options=partial),
    )


def shape_of(program: Program) -> jax.ShapeDtypeStruct:
    """Of the inputs, and of the output."""
    # One more step than there is: who goes on too long does not leave the arrays.
    count = program.blocks * program.most + program.tiles + 2
    return jax.ShapeDtypeStruct((count * ROWS, COLUMNS), jnp.float32)


def findings(program: Program) -> list[str]:
    """What the checks say of a kernel."""
    shapes = [shape_of(program)] * program.inputs
    found = findings_of(make_kernel(program), shapes, make_kernel)
    # More stages than steps are no mistake, nor is an output with room behind its end.
    harmless = "this pipeline has", "the grid covers output"
    return [one.text for one in found if not any(text in one.text for text in harmless)]


def sanitized(program: Program) -> str:
    """What the simulator's sanitizer says first; "" for nothing."""
    random_numbers = np.random.default_rng(program.steps)
    shape = shape_of(program).shape
    inputs = [random_numbers.standard_normal(shape, np.float32) for _ in range(program.inputs)]
    names = "transfers", "copies", "reuse", "arrivals", "stages", "barriers", "indices", "grid"
    disabled = tuple(f"check-{name}" for name in names)
    with pallasite.config.scoped(cache=False, disabled_passes=disabled):
        compiled = pallasite.compile(make_kernel(program), *inputs, target="sm_90a")
        try:
            found = pallasite_simulator.simulate(compiled, *inputs, sanitize=True).findings
        except PallasiteError as error:
            return str(error)
    return str(found[0]) if found else ""


def main(arguments: list[str]) -> int:
    """Returns 1 if there is a false alarm."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz specialized")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--wrong", type=int, default=0, help="how many to plant mistakes in, too")
    options = parser.parse_args(arguments)
    alarms = 0
    tally: collections.Counter[tuple[str, str]] = collections.Counter()
    for seed in range(options.seed, options.seed + options.count):
        program = make_program(seed)
        programs = [program]
        if seed - options.seed < options.wrong:
            programs.append(with_mistake(program, seed))
        for one in programs:
            try:
                found = findings(one)
                known = one.mistake is None and not found and seed % 50
                truth = "" if known else sanitized(one)
            except Exception as error:
                found, truth = [f"{type(error).__name__}: {error}"], ""
            if one.mistake is None and truth:
                found, truth = [f"not right: {truth}"], ""
            if found and not truth:
                alarms += 1
                print(f"seed {seed}: {one}\n  {found[0]}", file=sys.stderr, flush=True)
            if one.mistake is not None:
                which = "found" if found else "missed" if truth else "right"
                tally[one.mistake.what, which] += 1
                if which == "missed":
                    print(f"seed {seed}: missed: {one}\n  {truth[:300]}", flush=True)
    for (what, which), count in sorted(tally.items()):
        print(f"{what}: {count} {which}")
    print(f"{options.count} right programs, {options.wrong} with mistakes: {alarms} false alarms")
    return int(alarms > 0)
