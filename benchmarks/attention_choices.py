"""What estimates choose for attention, against the same without that choice.

Shapes are drawn by a seed as in ``attention_shapes.py``, of those for which an estimate decides:

- ``tiles``: tiles of as many warpgroups as an estimate says, of which blocks of a cluster may share
  the keys, or of as many as fill the multiprocessors in rounds, each with a block (forward). With
  ``--ways`` the best few others by the estimate are timed, too, and with ``--everywhere`` shapes
  for which one of these is estimated to gain, chosen or not;
- ``sections``: heads whose keys and values have 8 MiB together are worked on before others begin,
  instead of as many as a configuration says (forward, causal, many short sequences); with
  ``--ways`` also other sizes;
- ``divided``: the work of gradients is divided further than rounds of blocks say, or not (forward
  and gradients). With ``--everywhere`` also shapes without causal mask, or with a window, that the
  estimate is not used for;
- ``halves``: gradients of few tiles by blocks of two warpgroups, each with 128 keys, against twice
  as many blocks of one, chosen or not;
- ``prefill``: rows of a cache are brought together for attention's kernel, or the portable kernel
  goes through them (3 to 2048 queries that share a head).

Results are compared with float32 before they are timed. Times are those of the kernels on the
device, in random order; a ratio below 1 says that the choice gains.

    python benchmarks/attention_choices.py --seed 1 --count 24 --json attention_choices.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import attention_shapes as shapes
import harness
import jax
import jax.numpy as jnp
import numpy as np
import side_by_side
import timing

from pallasite import ops

KINDS = ("tiles", "sections", "divided", "halves", "prefill")

SHORT = 48
"""Sequences of fewer tokens share tiles."""


@dataclasses.dataclass(frozen=True)
class Cached:
    """Queries against a cache; ``page``: rows of a page, 0 without pages."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_len: int
    page: int


@dataclasses.dataclass(frozen=True)
class Task:
    """A case of a kind, and how it is measured."""

    kind: str
    case: shapes.Case | Cached
    repeats: int
    ways: int = 0


@dataclasses.dataclass
class Row:
    """One measurement; times in milliseconds.

    Attributes:
      others: of other configurations, with their estimates in microseconds.
    """

    kind: str
    case: dict[str, Any]
    chosen_ms: float
    without_ms: float
    others: dict[str, float]

    @property
    def ratio(self) -> float:
        """Of the time without the choice."""
        return self.chosen_ms / self.without_ms


# What is drawn ------------------------------------------------------------------------------------


def draw(kind: str, seed: int, count: int, everywhere: bool) -> list[shapes.Case | Cached]:
    """The first cases of a seed for which the choice matters."""
    found: list[shapes.Case | Cached] = []
    if kind == "prefill":
        dice = random.Random(f"{seed}/prefill")
        while len(found) < count:
            found.append(_cached(dice))
        return found
    for part in range(200):
        for case in shapes.draw(seed * 1000 + part, 60):
            short = case.length < SHORT and case.batch > 1
            if case.ends is None and not short and _decided(kind, case, everywhere):
                found.append(case)
        if len(found) >= count:
            break
    return found[:count]


def _cached(dice: random.Random) -> Cached:
    head_dim, kv_heads = dice.choice((64, 128, 128)), dice.choice((4, 8, 16))
    group = dice.choice((1, 4, 8))
    tokens = max(9, round(2 ** dice.uniform(1.5, 11)) // group)
    kv_len = 1024 * dice.randint(max(1, tokens // 1024), 8)
    batch = max(1, min(16, 65536 // kv_len, 2048 // tokens))
    return Cached(
        batch, tokens, kv_heads * group, kv_heads, head_dim, kv_len, dice.choice((0, 16, 64))
    )


def _decided(kind: str, case: shapes.Case, everywhere: bool) -> bool:
    if kind == "sections":
        config, tiles = _default(case), -(-case.length // 128) * case.batch * case.heads
        sizes = case.batch * case.heads, case.heads // case.kv_heads, case.length, case.head_dim
        short = case.causal and case.window is None and 256 <= case.length <= 4096
        return short and tiles > 500 and config.heads_at_once(*sizes) > 8
    if kind == "tiles":
        found = _tiles(case)
        if not found or not everywhere:
            return bool(found) and _default(case) != found[0]
        first, second = (_estimate(case, one) for one in found[:2])
        return second < 0.95 * first
    if kind == "halves":
        from pallasite_hopper.ops.flash.backward_config import config_for_heads

        return not _one_kernel(case) and config_for_heads(_backward_problem(case)).warpgroups == 1
    if not everywhere and (not case.causal or case.window is not None):
        return False
    if _one_kernel(case):
        return False
    problem = _backward_problem(case)
    first, best = _first_and_best(problem)
    from pallasite_hopper.ops.flash.backward_choice import microseconds

    return microseconds(problem, best) < 0.95 * microseconds(problem, first)


def _default(case: shapes.Case) -> Any:
    from pallasite_hopper.ops.flash.forward_choice import default_config

    return default_config(
        case.head_dim,
        case.causal,
        case.length,
        heads=case.batch * case.heads,
        group=case.heads // case.kv_heads,
        kv_seq=case.length,
        left=case.window,
    )


def _tiles(case: shapes.Case) -> list[Any]:
    """The configuration by rounds, then the others that are estimated, the fastest one first."""
    from pallasite_hopper.ops.flash import forward_choice as choice

    found = []

    def pick(config: Any, work: Any, most: int, *, shared: bool) -> Any:
        others = choice.alternatives(config, work, most, shared=shared)
        others.sort(key=lambda one: choice.microseconds(work, one))
        found.extend([config, *(one for one in others if one != config)])
        return config

    with mock.patch.object(choice, "_of_least_time", pick):
        _default(case)
    return found


def _estimate(case: shapes.Case, config: Any) -> float:
    from pallasite_hopper.ops.flash.forward_time import Work, microseconds

    heads, group = case.batch * case.heads, case.heads // case.kv_heads
    right = 0 if case.causal else None
    work = Work(heads, case.length, case.length, case.head_dim, case.window, right, group)
    return microseconds(work, config)


def _one_kernel(case: shapes.Case) -> bool:
    """Whether one kernel computes all gradients, so that nothing is divided."""
    from pallasite_hopper.ops.flash.single_choice import one_kernel
    from pallasite_std.api import AttentionProblem

    problem = AttentionProblem(
        batch=case.batch,
        q_seq=case.length,
        kv_seq=case.length,
        q_heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_dim=case.head_dim,
        dtype=jnp.dtype(case.dtype),
        scale=1.0,
        soft_cap=None,
        left=case.window,
        right=0 if case.causal else None,
    )
    return one_kernel(problem) is not None


def _backward_problem(case: shapes.Case) -> Any:
    from pallasite_hopper.ops.flash.backward_config import BackwardProblem
    from pallasite_hopper.ops.flash.config import head_tile

    return BackwardProblem(
        batch=case.batch,
        q_heads=case.heads,
        kv_heads=case.kv_heads,
        q_seq=case.length,
        kv_seq=case.length,
        head_dim=head_tile(case.head_dim),
        dtype=jnp.dtype(case.dtype),
        causal=case.causal,
        scale=1.0,
        soft_cap=None,
        has_lengths=False,
        left=case.window,
    )


def _first_and_best(problem: Any) -> tuple[Any, Any]:
    """What rounds of blocks say, and what takes the least time by the estimate."""
    from pallasite_hopper.ops.flash import backward_choice as choice

    rounds = choice._by_rounds(problem, choice.config_for_heads(problem))
    first = choice._divided(problem, *rounds)
    if choice._blocks(problem, first) >= choice._MANY * choice.MULTIPROCESSORS:
        return first, first
    found = [
        choice._divided(problem, parts, own_keys)
        for own_keys in ((False, True) if problem.group > 1 else (False,))
        for parts in range(1, choice.MOST_PARTS + 1)
    ]
    most = max(choice._steps(problem, first))
    fitting = [config for config in found if config.parts <= most]
    return first, min([first, *fitting], key=lambda one: choice.microseconds(problem, one))


# With and without a choice ------------------------------------------------------------------------


@contextlib.contextmanager
def chosen(kind: str, choose: bool) -> Iterator[None]:
    """What is traced meanwhile has the choice, or not."""
    with contextlib.ExitStack() as stack:
        if kind == "tiles" and not choose:
            from pallasite_hopper.ops.flash import forward_choice

            same: Any = lambda config, work, most, shared: config  # noqa: E731
            stack.enter_context(mock.patch.object(forward_choice, "_of_least_time", same))
        if kind == "sections" and choose:
            from pallasite_hopper.ops.flash import api

            default = api.default_config
            smaller: Any = lambda *args, **named: dataclasses.replace(  # noqa: E731
                default(*args, **named), cache_bytes=8 << 20
            )
            stack.enter_context(mock.patch.object(api, "default_config", smaller))
        if kind in ("divided", "halves"):
            from pallasite_hopper.ops.flash import backward, backward_choice, single_api

            def pick(problem: Any) -> Any:
                if kind == "divided":
                    return _first_and_best(problem)[choose]
                return backward_choice.best_of(problem, halves=not choose)

            stack.enter_context(mock.patch.object(backward, "default_config", pick))
            several: Any = lambda problem, extras: None  # noqa: E731
            stack.enter_context(mock.patch.object(single_api, "chosen", several))
        if kind == "prefill":
            from pallasite_hopper.ops.decode import prefill

            same = lambda q_shape, kv_heads: choose  # noqa: E731
            stack.enter_context(mock.patch.object(prefill, "gains", same))
        yield


def compiled(kind: str, function: Callable[..., Any], given: Any) -> dict[str, Any]:
    """Programs with and without the choice."""
    programs = {}
    for name, choose in (("chosen", True), ("without", False)):
        with chosen(kind, choose):
            # Another function, or the first one's trace would be taken.
            programs[name] = jax.jit(lambda *args: function(*args)).lower(*given).compile()
    return programs


def prepare(task: Task) -> Callable[[], Row]:
    """Compiles everything; what it returns measures."""
    if isinstance(task.case, Cached):
        return _prepare_cached(task, task.case)
    case, backward = task.case, task.kind in ("divided", "halves")
    q_shape = (case.batch, case.length, case.heads, case.head_dim)
    kv_shape = (case.batch, case.length, case.kv_heads, case.head_dim)
    specs = [jax.ShapeDtypeStruct(one, jnp.bfloat16) for one in (q_shape, kv_shape, kv_shape)]
    function: Any = functools.partial(ops.attention, **case.options())
    if backward:
        both = shapes.with_gradients(function)
        function = lambda q, k, v, d: both(d, q, k, v)  # noqa: E731
    given = [*specs, specs[0]]
    programs = compiled(
        task.kind, function if backward else lambda q, k, v, d: [function(q, k, v)], given
    )
    for config in _ways(task.kind, case)[: task.ways]:
        other = functools.partial(function, config=config)
        traced = jax.jit(lambda q, k, v, d, other=other: [other(q, k, v)])
        programs[_name(case, config)] = traced.lower(*given).compile()
    reference = functools.partial(shapes.reference, case, backward)
    expected = jax.jit(reference, **timing.reference_options()).lower(*given).compile()

    def errors(arrays: Any, results: Any) -> float:
        return float(shapes.relative_errors(case, results, expected(*arrays)).max())

    return functools.partial(measure, task, _operands(given), programs, errors)


def _ways(kind: str, case: shapes.Case) -> list[Any]:
    """Other configurations that may be timed."""
    if kind == "tiles":
        return [one for one in _tiles(case)[1:] if one != _default(case)]
    if kind == "sections":
        config = _default(case)
        return [dataclasses.replace(config, cache_bytes=size << 20) for size in (16, 4, 2)]
    return []


def _name(case: shapes.Case, config: Any) -> str:
    """Of a configuration, with its estimate."""
    shape = f"{config.warpgroups} x 64 x {config.block_kv}, {config.split} parts"
    order = "table" if config.persistent else "hardware"
    sizes = f"{config.stages} stages, {config.cache_bytes >> 20} MiB"
    return f"{shape}, {sizes}, {order}: {_estimate(case, config):.1f}"


def _prepare_cached(task: Task, case: Cached) -> Callable[[], Row]:
    c, rng = case, np.random.default_rng(task.case.kv_len)
    lengths = rng.integers(c.kv_len * 3 // 4, c.kv_len + 1, c.batch).astype(np.int32)
    rows = (c.batch, c.kv_len, c.kv_heads, c.head_dim)
    table = None
    if c.page:
        count = c.batch * c.kv_len // c.page
        table = rng.permutation(count).reshape(c.batch, -1).astype(np.int32)
        rows = (count, c.page, c.kv_heads, c.head_dim)
    q_shape = (c.batch, c.tokens, c.heads, c.head_dim)
    given = [jax.ShapeDtypeStruct(one, jnp.bfloat16) for one in (q_shape, rows, rows)]

    def function(q: Any, k: Any, v: Any) -> Any:
        if table is None:
            return [ops.decode_attention(q, k, v, kv_lengths=jnp.asarray(lengths))]
        pages = jnp.asarray(lengths), jnp.asarray(table)
        return [ops.paged_attention(q, k, v, *pages, page_layout="tokens_first")]

    def exact(q: Any, k: Any, v: Any) -> Any:
        """The first head of the first sequence."""
        k, v = ((x if table is None else x[table[:1]]) for x in (k, v))
        key, value = (x[:1].reshape(c.kv_len, c.kv_heads, -1)[:, 0] for x in (k, v))
        query = q[0, :, 0].astype(jnp.float32) * c.head_dim**-0.5
        scores = jnp.einsum("qd,kd->qk", query, key.astype(jnp.float32), precision="highest")
        own = int(lengths[0]) - c.tokens + jnp.arange(c.tokens)
        scores = jnp.where(jnp.arange(c.kv_len) <= own[:, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("qk,kd->qd", weights, value.astype(jnp.float32), precision="highest")

    programs = compiled(task.kind, function, given)
    expected = jax.jit(exact, **timing.reference_options()).lower(*given).compile()

    def errors(arrays: Any, results: Any) -> float:
        wanted = expected(*arrays)
        difference = results[0][0, :, 0].astype(jnp.float32) - wanted
        return float(jnp.linalg.norm(difference) / jnp.linalg.norm(wanted))

    return functools.partial(measure, task, _operands(given), programs, errors)


def _operands(specs: Any) -> Any:
    def make(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(specs))
        pairs = zip(keys, specs, strict=True)
        return [jax.random.normal(key, spec.shape, spec.dtype) for key, spec in pairs]

    return jax.jit(make).lower(jax.random.key(0)).compile()


def measure(task: Task, draw_operands: Any, programs: dict[str, Any], errors: Any) -> Row:
    """One row, of compiled programs."""
    arrays = draw_operands(jax.random.key(1))
    for name, program in programs.items():
        error = errors(arrays, program(*arrays))
        if not error < 1.5e-2:
            raise ValueError(f"wrong result {name}, relative error {error}")
    framework = timing.FRAMEWORKS["jax"]
    calls = {name: (framework, functools.partial(one, *arrays)) for name, one in programs.items()}
    dice = random.Random(str(task))
    times = timing.interleaved(shapes.timer(), calls, task.repeats, dice)
    both = times.pop("chosen"), times.pop("without")
    return Row(task.kind, dataclasses.asdict(task.case), *both, times)


def main() -> int:
    """Measures, prints a table and writes JSON; 1 if a case failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=24)
    side_by_side.hold_option(parser)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--everywhere", action="store_true", help="see above")
    parser.add_argument("--ways", type=int, default=0, help="others that are timed")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"it needs a GPU, and JAX is on {jax.default_backend()!r}")
    print(harness.machine())
    count = -(-arguments.count // len(arguments.kinds))
    tasks = [
        Task(kind, case, arguments.repeats, arguments.ways)
        for kind in arguments.kinds
        for case in draw(kind, arguments.seed, count, arguments.everywhere)
    ]
    outcomes = side_by_side.prepared(
        prepare, tasks, arguments.processes, arguments.seconds, arguments.hold
    )
    rows, failed = side_by_side.collected(
        outcomes, show=lambda task, row: f"{task.kind} {task.case} {row.ratio:.3f} {row.others}"
    )
    for kind in arguments.kinds:
        ratios = [row.ratio for row in rows if row.kind == kind]
        mean, worst = harness.geometric_mean(ratios), max(ratios, default=None)
        print(f"{kind}: geometric mean {mean} of {len(ratios)}, at most {worst}")
    harness.write_json(arguments.json, "attention_choices", rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
