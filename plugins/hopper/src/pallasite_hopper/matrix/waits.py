"""A check of waits for matrix products: operands and accumulators that are touched in flight.

The equations of each thread of a block are followed in order. What is known then is which products
certainly are in flight, which parts of shared memory they read, and what was stored to shared
memory without ``commit_smem``. Loops are followed for their first iterations, with the numbers that
their counters have, so a slot of a ring is known where it comes back; of a branch on an unknown
condition, all sides are followed, and what is in flight after it is what is so after each. So only
mistakes that happen whenever the code runs are found, and nothing is said about the rest.

In warpgroup semantics, waits that are missing are added instead.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallasite.plugin import InvalidValueError, SourceLocation
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import JaxprTable, with_insertions
from pallasite.plugin.language import LoweringSemantics, tensor_core_pipeline_effect
from pallasite_hopper.matrix import products as prim
from pallasite_hopper.matrix.accumulators import AbstractAccumulatorRef
from pallasite_hopper.matrix.regions import Accumulator, Memory, Region, region_of
from pallasite_hopper.matrix.scalars import Scalars, Symbol
from pallasite_std.api import barriers, copies, inline

_MOST_EQUATIONS = 30_000
_MOST_ITERATIONS = 8
_MOST_OUTER_ITERATIONS = 2
"""Of a loop around others: enough to come from its end to its beginning."""

_CALLS = {
    _jax.jit_p: "jaxpr",
    _jax.closed_call_p: "call_jaxpr",
    _jax.custom_jvp_call_p: "call_jaxpr",
    _jax.custom_vjp_call_p: "call_jaxpr",
    _jax.remat_p: "jaxpr",
}


class UnusedAccumulatorWarning(UserWarning):
    """Products are added to an accumulator that nothing reads."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Product:
    """A product that was started.

    Attributes:
      accumulator: what it is added to.
      operands: what it reads of shared memory.
      location: where it was started.
    """

    accumulator: Accumulator
    operands: tuple[Region, ...]
    location: SourceLocation | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Store:
    region: Region
    location: SourceLocation | None


class _State:
    """What is certain at one point of a thread.

    Attributes:
      flying: products in flight; for each, how many may have been started since.
      stored: what was stored to shared memory and not committed.
    """

    def __init__(self) -> None:
        self.flying: dict[_Product, int] = {}
        self.stored: dict[_Store, None] = {}

    def copy(self) -> _State:
        new = _State()
        new.flying, new.stored = dict(self.flying), dict(self.stored)
        return new

    def forget(self) -> None:
        self.flying, self.stored = {}, {}

    def replace(self, other: _State) -> None:
        self.flying, self.stored = other.flying, other.stored

    def start(self, product: _Product) -> None:
        self.flying = {one: since + 1 for one, since in self.flying.items()}
        self.flying[product] = 0

    def wait(self, left: int) -> None:
        self.flying = {one: since for one, since in self.flying.items() if since < left}


def _join(states: Sequence[_State]) -> _State:
    """What is certain where several ways meet."""
    first, *rest = states
    joined = _State()
    for product, since in first.flying.items():
        if all(product in other.flying for other in rest):
            joined.flying[product] = max(since, *(other.flying[product] for other in states))
    for store in first.stored:
        if all(store in other.stored for other in rest):
            joined.stored[store] = None
    return joined


class _TooLong(Exception):
    """The kernel has too many equations to follow."""


def check_matrix_waits(jaxpr: Any, context: Any) -> Any:
    """Raises if something is touched that a product in flight certainly uses.

    Where the semantics imply waits, they are added instead.

    Args:
      jaxpr: the kernel.
      context: the :class:`~pallasite.passes.pipeline.PassContext`; its mesh says how many threads
        a block has.

    Returns:
      The kernel, with further waits.

    Warns with :class:`UnusedAccumulatorWarning`.

    Raises:
      InvalidValueError: at the line that touches it, or that starts a product nobody waits for.
    """
    if not _multiplies(jaxpr):
        return jaxpr
    missing: _Missing | None = _Missing() if _adds_waits(context) else None
    mesh = getattr(context, "mesh", None)
    count, name = getattr(mesh, "num_threads", None) or 1, getattr(mesh, "thread_name", None)
    accumulators: dict[Any, Accumulator] = {}
    try:
        for number in range(count):
            thread = _Thread(number, name, accumulators, missing)
            known = {variable: _argument(variable) for variable in jaxpr.invars}
            thread.run(jaxpr, known, _State())
    except _TooLong:
        return jaxpr
    for one in accumulators.values():
        if one.multiplied is not None and not one.read:
            warnings.warn(
                f"{one.multiplied}: products are added to an accumulator that nothing reads",
                UnusedAccumulatorWarning,
                stacklevel=2,
            )
    return jaxpr if missing is None else missing.added_to(jaxpr, context.jaxprs)


def _adds_waits(context: Any) -> bool:
    options = getattr(context, "options", None)
    if getattr(options, "lowering_semantics", None) is not LoweringSemantics.Warpgroup:
        return False
    return not getattr(options, "unsafe_no_auto_barriers", False)


class _Missing:
    """Waits to add: before which equations, and how many products may stay in flight."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[Any, int]] = {}

    def add(self, equation: Any, left: int) -> None:
        """Before ``equation`` at most ``left`` products may be in flight."""
        _, before = self._left.get(id(equation), (equation, left))
        self._left[id(equation)] = (equation, min(before, left))

    def added_to(self, jaxpr: Any, table: JaxprTable) -> Any:
        """The jaxpr with the waits."""
        effects = {tensor_core_pipeline_effect}
        waits = {}
        for key, (equation, left) in self._left.items():
            params = {"n": left, "before": str(equation.primitive)}
            waits[key] = [(prim.wgmma_added_wait_p, params, effects)]
        return with_insertions(table, jaxpr, waits)


def _multiplies(jaxpr: Any) -> bool:
    return any(
        equation.primitive is prim.wgmma_ref_p
        or any(_multiplies(inner) for inner in _jax.jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )


def _argument(variable: Any) -> Any:
    return Memory(variable) if isinstance(variable.aval, _jax.AbstractRef) else None


class _Thread:
    """Follows one thread of a block."""

    def __init__(
        self,
        number: int,
        name: Any,
        accumulators: dict[Any, Accumulator],
        missing: _Missing | None,
    ):
        self.missing = missing
        self.mapped: Any = None
        self.announced: Any = None
        self.scalars = Scalars(number, name)
        self.accumulators = accumulators
        self.iterations: dict[Any, int] = {}
        self.equations = 0

    def run(self, jaxpr: Any, known: Mapping[Any, Any], state: _State) -> list[Any]:
        """Follows a jaxpr; changes the state, and returns what is known of its results."""
        values = dict(known)

        def read(atom: Any) -> Any:
            if isinstance(atom, _jax.Literal):
                return self.scalars.literal(atom)
            return values.get(atom)

        for equation in jaxpr.eqns:
            self.equations += 1
            if self.equations > _MOST_EQUATIONS:
                raise _TooLong
            operands = [read(atom) for atom in equation.invars]
            results = self.equation(equation, operands, state)
            if results:
                values.update(zip(equation.outvars, results, strict=False))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """Follows one equation; returns what is known of its results, or nothing."""
        primitive = equation.primitive
        rule = _RULES.get(primitive)
        if rule is not None:
            return rule(self, equation, operands, state)
        if primitive in _CALLS:
            jaxpr = equation.params[_CALLS[primitive]]
            return self.run(jaxpr, _bind(jaxpr, operands), state)
        if self.scalars.computes(equation):
            return (self.scalars.result(equation, operands),)
        if tensor_core_pipeline_effect in equation.effects or any(
            True for _ in _jax.jaxprs_in_params(equation.params)
        ):
            self._unknown(operands, state)
        return ()

    def _unknown(self, operands: Sequence[Any], state: _State) -> None:
        """Something that may wait, or use accumulators in its own way."""
        state.forget()
        for operand in operands:
            if isinstance(operand, Accumulator):
                operand.read = True

    # Control flow ---------------------------------------------------------------------------------

    def branch(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """The branch that is taken, or all of them if that is not known."""
        branches = equation.params["branches"]
        index, *rest = operands
        if isinstance(index, int):
            chosen = branches[min(max(index, 0), len(branches) - 1)]
            return self.run(chosen, _bind(chosen, rest), state)
        ends, results = [], []
        for one in branches:
            end = state.copy()
            results.append(self.run(one, _bind(one, rest), end))
            ends.append(end)
        state.replace(_join(ends))
        return [
            same[0] if all(one is same[0] for one in same) else Symbol()
            for same in zip(*results, strict=True)
        ]

    def scan(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """A loop of known length: its first iterations, and if there are more, its last one."""
        params = equation.params
        jaxpr, length = params["jaxpr"], int(params["length"])
        constants, carried, scanned = _jax.scan_operand_counts(params)
        fixed, carry = operands[:constants], operands[constants : constants + carried]
        unknown = [None] * scanned
        most = self._iterations(jaxpr)
        for _ in range(min(length, most)):
            known = _bind(jaxpr, [*fixed, *carry, *unknown])
            carry = self.run(jaxpr, known, state)[:carried]
        if length > most:
            carry = [_kept(value) for value in carry]
            state.forget()
            carry = self.run(jaxpr, _bind(jaxpr, [*fixed, *carry, *unknown]), state)[:carried]
        return [*carry, *[None] * (len(equation.outvars) - carried)]

    def _iterations(self, body: Any) -> int:
        """How many iterations of a loop are followed."""
        found = self.iterations.get(body)
        if found is None:
            found = _MOST_OUTER_ITERATIONS if _has_loop(body) else _MOST_ITERATIONS
            self.iterations[body] = found
        return found

    def repeat(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """A loop with a condition."""
        params = equation.params
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        tests, fixed, carry = operands[:first], operands[first:second], operands[second:]
        before = state.copy()
        certain = True
        for _ in range(self._iterations(body)):
            (again,) = self.run(condition, _bind(condition, [*tests, *carry]), state)
            if again == 0 and again is not None:
                break
            certain = certain and isinstance(again, int)
            carry = self.run(body, _bind(body, [*fixed, *carry]), state)
        else:
            certain = False
        if certain:
            return carry
        # How often it runs is not known, maybe not at all.
        carry = [_kept(value) for value in carry]
        self.run(body, _bind(body, [*fixed, *carry]), _State())
        if _touches(condition) or _touches(body):
            state.forget()
        else:
            state.replace(before)
            state.stored = {}
        return [_kept(value) for value in carry]

    # Scopes ---------------------------------------------------------------------------------------

    def scope(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``run_scoped``: allocates memory and accumulators."""
        jaxpr = equation.params["jaxpr"]
        known = dict(zip(jaxpr.constvars, operands, strict=True))
        own: list[Accumulator] = []
        for variable in jaxpr.invars:
            if isinstance(variable.aval, AbstractAccumulatorRef):
                own.append(self._accumulator(variable))
                known[variable] = own[-1]
            else:
                known[variable] = Memory(variable)
        results = self.run(jaxpr, known, state)
        for product in state.flying:
            if product.accumulator in own:
                raise InvalidValueError(
                    "nobody waits for this product: the scope of its accumulator ends while it is"
                    " in flight",
                    expected="acc[...], which waits and reads it, or plgpu.wgmma_wait(0), in the"
                    " scope",
                    location=product.location,
                )
        return results

    def state_scope(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``run_state``: accumulators are read where it ends."""
        jaxpr = equation.params["jaxpr"]
        known: dict[Any, Any] = {}
        waits = False
        for variable, operand in zip(jaxpr.invars, operands, strict=True):
            if isinstance(variable.aval, AbstractAccumulatorRef):
                outer = isinstance(operand, Accumulator)
                accumulator = operand if outer else self._accumulator(variable)
                accumulator.read = waits = True
                known[variable] = accumulator
            elif isinstance(operand, Memory | Accumulator):
                known[variable] = operand
        self.run(jaxpr, known, state)
        if waits:
            state.wait(0)
        return ()

    def _accumulator(self, variable: Any) -> Accumulator:
        return self.accumulators.setdefault(variable, Accumulator())

    def warps(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """Code that runs per warp; products are not started there, but their operands written."""
        jaxprs = equation.params["jaxprs"]
        if len(jaxprs) != 1 or len(jaxprs[0].invars) != len(operands):
            self._unknown(operands, state)
            return ()
        self.mapped = equation
        self.run(jaxprs[0], _bind(jaxprs[0], operands), state)
        self.mapped = None
        return ()

    # Products -------------------------------------------------------------------------------------

    def product(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``wgmma``."""
        location = _jax.user_location(equation.source_info)
        acc, *matrices, _ = equation.params["args_tree"].unflatten(operands)
        regions = tuple(
            region
            for one in matrices
            if isinstance(one, _jax.TransformedRef) and (region := region_of(one)) is not None
        )
        accumulator = acc.ref
        if not isinstance(accumulator, Accumulator):
            state.forget()
            return ()
        accumulator.multiplied = accumulator.multiplied or location or "a kernel"
        for store in state.stored:
            if any(region.certainly_meets(store.region) for region in regions):
                if self.missing is not None:
                    break  # Layout inference adds the fence.
                raise InvalidValueError(
                    "a product reads shared memory that was stored without plgpu.commit_smem()",
                    got=_place("the store", store.location),
                    expected="plgpu.commit_smem() between the store and the product",
                    location=location,
                )
        state.start(_Product(accumulator, regions, location))
        return ()

    def wait(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``wgmma_wait``."""
        state.wait(equation.params["n"])
        return ()

    def load(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``wgmma_accumulator_load``."""
        left = equation.params["wait_n"]
        if left is not None:
            state.wait(left)
        self._use_accumulator(equation, operands[0], state, "read", f"wait_n={left}")
        if isinstance(operands[0], Accumulator):
            operands[0].read = True
        return ()

    def store(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``wgmma_accumulator_store``."""
        self._use_accumulator(equation, operands[0], state, "written", "acc[...] = value")
        return ()

    def _use_accumulator(
        self, equation: Any, accumulator: Any, state: _State, what: str, got: str
    ) -> None:
        for product, since in list(state.flying.items()):
            if product.accumulator is accumulator:
                if self.missing is not None:
                    self._wait_first(equation, since, state)
                    continue
                raise InvalidValueError(
                    f"an accumulator is {what} while a product of it is in flight",
                    got=f"{got} after {_place('the product', product.location)}",
                    expected=f"plgpu.wgmma_wait({since}) before it"
                    + (f", or wait_n={since}" if what == "read" else ""),
                    location=_jax.user_location(equation.source_info),
                )

    # Shared memory --------------------------------------------------------------------------------

    def plain_store(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``ref[...] = value``."""
        reference, _, *leaves = operands
        transforms = equation.params["tree"].unflatten(leaves)
        self._written(equation, _jax.TransformedRef(reference, transforms), state, plain=True)
        return ()

    def masked_store(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``plgpu.store`` and the like; with a mask, it is not certain what is written."""
        reference, transforms, _, mask = equation.params["args_tree"].unflatten(operands)
        if mask is None and isinstance(reference, Memory):
            target = _jax.TransformedRef(reference, tuple(transforms))
            self._written(equation, target, state, plain=True)
        return ()

    def copy(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``copy_gmem_to_smem``."""
        _, destination, *_ = equation.params["args_tree"].unflatten(operands)
        # The warps meet where the copy is announced, and one of them starts it.
        start = equation if equation.params["arrive"] else self.announced or equation
        self._written(start, destination, state, plain=False)
        return ()

    def announce(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``barrier_expect``: copies that follow belong to it."""
        self.announced = equation
        return ()

    def commit(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """``commit_smem``."""
        state.stored = {}
        return ()

    def anything(self, equation: Any, operands: list[Any], state: _State) -> Sequence[Any]:
        """Code that is not known."""
        self._unknown(operands, state)
        return ()

    def _wait_first(self, equation: Any, left: int, state: _State) -> None:
        """Adds a wait before an equation; single warps cannot wait for the others' products."""
        assert self.missing is not None
        self.missing.add(equation if self.mapped is None else self.mapped, left)
        state.wait(left)

    def _written(self, equation: Any, target: Any, state: _State, *, plain: bool) -> None:
        region = region_of(target)
        if region is None:
            return
        location = _jax.user_location(equation.source_info)
        for product, since in list(state.flying.items()):
            if any(region.certainly_meets(one) for one in product.operands):
                if self.missing is not None:
                    self._wait_first(equation, since, state)
                    continue
                raise InvalidValueError(
                    "shared memory is overwritten while a product that reads it is in flight",
                    got=_place("the product", product.location),
                    expected=f"plgpu.wgmma_wait({since}) in between"
                    + (", or a smaller number" if since else ""),
                    location=location,
                )
        if plain:
            state.stored[_Store(region, location)] = None
        else:
            kept = [store for store in state.stored if store.region.memory is not region.memory]
            state.stored = dict.fromkeys(kept)


def _place(what: str, location: SourceLocation | None) -> str:
    return what if location is None else f"{what} at {location}"


def _bind(jaxpr: Any, operands: Sequence[Any]) -> dict[Any, Any]:
    return {
        variable: operand
        for variable, operand in zip(jaxpr.invars, operands, strict=True)
        if operand is not None
    }


def _kept(value: Any) -> Any:
    """What is known of a carried value after any number of iterations."""
    return value if isinstance(value, Memory | Accumulator) else Symbol()


def _has_loop(jaxpr: Any) -> bool:
    return any(
        equation.primitive in (_jax.scan_p, _jax.while_p)
        or any(_has_loop(inner) for inner in _jax.jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )


def _touches(jaxpr: Any) -> bool:
    """Whether products may be started or waited for."""
    return any(
        tensor_core_pipeline_effect in equation.effects
        or equation.primitive is inline.inline_mgpu_p
        or any(_touches(inner) for inner in _jax.jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )


_Rule = Callable[[_Thread, Any, list[Any], _State], Sequence[Any]]

_RULES: dict[Any, _Rule] = {
    _jax.cond_p: _Thread.branch,
    _jax.scan_p: _Thread.scan,
    _jax.while_p: _Thread.repeat,
    _jax.run_scoped_p: _Thread.scope,
    _jax.run_state_p: _Thread.state_scope,
    _jax.mpmd_map_p: _Thread.warps,
    copies.barrier_expect_p: _Thread.announce,
    _jax.swap_p: _Thread.plain_store,
    _jax.addupdate_p: _Thread.plain_store,
    _jax.masked_swap_p: _Thread.masked_store,
    copies.copy_gmem_to_smem_p: _Thread.copy,
    barriers.commit_smem_p: _Thread.commit,
    inline.inline_mgpu_p: _Thread.anything,
    prim.wgmma_ref_p: _Thread.product,
    prim.wgmma_wait_p: _Thread.wait,
    prim.wgmma_added_wait_p: _Thread.wait,
    prim.wgmma_accumulator_deref_p: _Thread.load,
    prim.wgmma_accumulator_store_p: _Thread.store,
}
