"""The passes that check kernels; they share one walk."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pallasite.plugin import InvalidValueError, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import JaxprTable
from pallasite.plugin.language import MemorySpace, memory_space_of
from pallasite_std.barriers.base import is_barrier
from pallasite_std.checks.accesses import Accesses, TooLongError, Use
from pallasite_std.checks.contents import check_contents
from pallasite_std.checks.early_reads import check_early_reads
from pallasite_std.checks.grids import repeated, uncovered, windows_of
from pallasite_std.checks.indices import check_indices
from pallasite_std.checks.scalars import Memory, Places
from pallasite_std.primitives import arrays, cluster_launch

if TYPE_CHECKING:
    from pallasite_std.checks.order import Problem

_BETWEEN_BLOCKS = frozenset(
    {_jax.get_global_p, _jax.semaphore_wait_p, _jax.semaphore_read_p, arrays.atomic_p}
)
"""What blocks agree by on who writes."""


class KernelCheckWarning(UserWarning):
    """A kernel does something that is hardly meant, but has a meaning."""


class Walk:
    """What all threads of a kernel do to references.

    Attributes:
      uses: by all threads.
      opaque: references that something unknown is done to.
      places: the grid.
      complete: whether the kernel is short enough to be followed.
      all_blocks_run: whether no block is canceled by others, which do its work instead.
    """

    def __init__(self, jaxpr: Any, context: Any):
        self.jaxpr = jaxpr
        self.context = context
        self.uses: list[Use] = []
        self.opaque: set[Any] = set()
        self.places = Places(context.mesh)
        self.complete = True
        equations = context.jaxprs.equations(jaxpr)
        self.all_blocks_run = all(
            one.primitive is not cluster_launch.try_cluster_cancel_p for one in equations
        )
        try:
            for visitor in self.visit(Accesses):
                self.uses += visitor.uses
                self.opaque |= visitor.opaque
        except TooLongError:
            self.complete = False

    def visit(self, visitor: type[Accesses]) -> list[Any]:
        """The kernel visited once for each thread that does something of its own."""
        mesh = self.context.mesh
        operands = [Memory(one, number) for number, one in enumerate(self.jaxpr.invars)]
        found = []
        for thread in range((mesh and mesh.num_threads) or 1):
            one = visitor(self.context.jaxprs, self.places, thread)
            one.run(self.jaxpr, operands)
            found.append(one)
            if not self.places.asked_for_thread:
                break
        return found


def _walk(jaxpr: Any, context: Any) -> Walk:
    walk: Walk | None = context.shared.get(Walk)
    if walk is None or walk.jaxpr is not jaxpr:
        walk = context.shared[Walk] = Walk(jaxpr, context)
    return walk


def _problems(jaxpr: Any, context: Any) -> list[Problem]:
    """What is wrong with the order of copies and barriers, found once for all passes."""
    known = context.shared.get(_problems)
    if known is not None and known[0] is jaxpr:
        return list(known[1])
    found: list[Problem] = []
    table: JaxprTable = context.jaxprs
    if any(_is_on_chip(v.aval) for inner in table.jaxprs(jaxpr) for v in inner.invars):
        found = _problems_in_order(jaxpr, context)
    context.shared[_problems] = (jaxpr, found)
    return found


def _problems_in_order(jaxpr: Any, context: Any) -> list[Problem]:
    from pallasite_std.checks.order import is_certain, problems
    from pallasite_std.checks.repeats import alike
    from pallasite_std.checks.traces import MOST_EQUATIONS, Trace

    mesh = context.mesh
    count = (mesh and mesh.num_threads) or 1
    places = Places(mesh)
    walk = context.shared.get(Walk)
    if walk is not None:
        places.steps = walk.places.steps
    operands = [Memory(one, number) for number, one in enumerate(jaxpr.invars)]
    fences = _fences_itself(context)

    def traces_of(places: Places) -> list[Trace]:
        traces = []
        for thread in range(count):
            trace = Trace(context, places, thread, MOST_EQUATIONS // count)
            trace.follow(jaxpr, operands)
            traces.append(trace)
        return traces

    traces = traces_of(places)
    found = problems(traces, context.barriers, fences=fences)
    if found or is_certain(traces):
        return found
    followed = [traces]
    for position in _some_blocks(places, jaxpr, context):
        traces = traces_of(places.of_block(position))
        if any(alike(traces, others) for others in followed):
            if len(followed) == 1:
                break  # What is not known does not depend on the block.
            continue
        followed.append(traces)
        found = problems(traces, context.barriers, fences=fences)
        if found:
            return found
    return []


def _some_blocks(places: Places, jaxpr: Any, context: Any) -> list[dict[Any, int]]:
    """Positions of blocks that differ most, where blocks do not do all the same."""
    names = [name for name in places.axes if name != places.thread_name]
    if places.cluster or not any(places.sizes[name] > 1 for name in names):
        return []  # Blocks of a cluster do not run by themselves.
    equations = context.jaxprs.equations(jaxpr)
    if any(one.primitive is cluster_launch.try_cluster_cancel_p for one in equations):
        return []  # Nor does every block run.
    found: list[dict[Any, int]] = []
    for place in (lambda size: 0, lambda size: size - 1, lambda size: size // 2):
        position = {name: place(places.sizes[name]) for name in names}
        if position not in found:
            found.append(position)
    return found


def _is_on_chip(aval: Any) -> bool:
    if is_barrier(aval):
        return True
    space = memory_space_of(aval)
    return isinstance(space, MemorySpace) and space.is_shared


def _fences_itself(context: Any) -> bool:
    """Whether the program has to make its stores visible to copies, and not layout inference."""
    options = context.options
    semantics = getattr(options, "semantics", Semantics.LANE)
    inferred = semantics.extends(Semantics.WARPGROUP)
    return not inferred or bool(getattr(options, "unsafe_no_auto_barriers", False))


def _error(problem: Problem) -> InvalidValueError:
    from pallasite_std.checks.messages import error_of

    return error_of(problem)


def _checks(kind: str) -> Callable[[Any, Any], None]:
    def check(jaxpr: Any, context: Any) -> None:
        for problem in _problems(jaxpr, context):
            if problem.kind == kind:
                raise _error(problem)

    return check


run_check_transfers = _checks("transfers")
"""Raises if the bytes that a phase expects are not those that its copies bring."""


def _warns(kind: str) -> Callable[[Any, Any], None]:
    def check(jaxpr: Any, context: Any) -> None:
        for problem in _problems(jaxpr, context):
            # Nobody can change a kernel of a library that fits problems of all sizes.
            if problem.kind == kind and (kind != "stages" or problem.event.location):
                warnings.warn(str(_error(problem)), KernelCheckWarning, stacklevel=2)

    return check


run_check_copies = _warns("copies")
"""Warns of copies that lack a commit or a wait: it may go well, most of the time."""

run_check_stages = _warns("stages")
"""Warns of pipelines with more stages than steps."""

run_check_reuse = _checks("reuse")
"""Raises if shared memory is read before its copy is waited for, or written again too early."""

run_check_arrivals = _checks("arrivals")
"""Raises if a wait needs arrivals that can never come, in loops, too."""


def run_check_indices(jaxpr: Any, context: Any) -> None:
    """Raises if an index certainly leaves an array for some block; see :func:`check_indices`."""
    walk = _walk(jaxpr, context)
    if walk.complete and walk.all_blocks_run:
        check_indices(walk.uses, walk.places)


def run_check_outputs(jaxpr: Any, context: Any) -> None:
    """Raises if something is added to an output that nobody has written before; see
    :func:`check_early_reads`."""
    spec = context.spec
    walk = _walk(jaxpr, context)
    if spec is None or not walk.complete:
        return
    first = len(spec.in_avals)
    aliased = {output for _, output in spec.input_output_aliases}
    count = len(spec.out_avals)
    own = jaxpr.invars[first : first + count]
    outputs = {first + n: one for n, one in enumerate(own) if n not in aliased}
    if any(use.memory.number in outputs for use in walk.uses):
        table: JaxprTable = context.jaxprs
        check_early_reads(walk.uses, walk.opaque, outputs, first, jaxpr, table)


def run_check_contents(jaxpr: Any, context: Any) -> None:
    """Raises if shared memory certainly does not hold any more what is read; see
    :func:`check_contents`."""
    walk = _walk(jaxpr, context)
    if walk.complete:
        threads = (context.mesh and context.mesh.num_threads) or 1
        check_contents(walk.uses, walk.opaque, threads)


def run_check_grid(jaxpr: Any, context: Any) -> None:
    """Warns if the grid covers an output in part, or if blocks certainly write other data to the
    same elements."""
    spec = context.spec
    walk = _walk(jaxpr, context)
    if spec is None or not (walk.complete and walk.all_blocks_run):
        return
    first = len(spec.in_avals)
    outputs = dict(enumerate(jaxpr.invars[first:], first))
    windows = windows_of(walk.uses, walk.opaque, outputs)
    aliased = {output for _, output in spec.input_output_aliases}
    for number, found in windows.items():
        shape = jaxpr.invars[number].aval.shape
        gap = None if number - first in aliased else uncovered(found, shape, walk.places)
        if gap is not None:
            dimension, index = gap
            last = found[-1].use.location
            warnings.warn(
                f"{last or spec.location}: the grid covers output {number - first} in part: no"
                f" block writes index {index} of dimension {dimension}, which has"
                f" {shape[dimension]}; it is left undefined. Expected a grid whose blocks cover the"
                " output, or input_output_aliases",
                KernelCheckWarning,
                stacklevel=2,
            )
    _check_repeated(walk, windows, first, spec)


def _check_repeated(walk: Walk, windows: Any, first: int, spec: Any) -> None:
    table: JaxprTable = walk.context.jaxprs
    equations = table.equations(walk.jaxpr)
    if any(one.primitive in _BETWEEN_BLOCKS for one in equations):
        return  # Blocks may write one after the other.
    candidates = []
    for number, found in windows.items():
        for window in found:
            symbol = repeated(window, walk.places)
            if symbol is not None:
                candidates.append((number, window, symbol))
    if not candidates:
        return
    from pallasite_std.checks.dependences import Dependences

    written: dict[int, Any] = {}
    for visitor in walk.visit(Dependences):
        for key, data in visitor.written.items():
            written[key] = written.get(key, frozenset()) | data
    for number, window, symbol in candidates:
        if symbol in written.get(id(window.use.equation), ()):
            warnings.warn(
                f"{window.use.location or spec.location}: the grid covers output {number - first}"
                f" twice: blocks with another {symbol.name} write other data to the same elements."
                " Expected windows that depend on each axis of the grid",
                KernelCheckWarning,
                stacklevel=2,
            )
