"""Runs traced kernels on NumPy arrays, with asynchronous copies as late as they may be.

A load poisons its destination when it is issued and fills it when its barrier is waited for; a
store reads its source when its group is waited for. So a missing or early wait shows up as wrong
numbers. Each block runs on its own, one after the other; there is one thread per block.
"""

from __future__ import annotations

import collections
import itertools
from typing import Any

import jax
import numpy as np

from pallasite import _jax
from pallasite.language import transforms as tr
from pallasite_std.barriers.types import BarrierType
from pallasite_std.primitives import arrays, barriers, copies


class Memory:
    def __init__(self, array: np.ndarray):
        self.array = array


class Barriers:
    def __init__(self, shape: tuple[int, ...], num_arrivals: int):
        self.num_arrivals = num_arrivals
        self.shape = shape
        self.pending: dict[tuple[int, ...], list[Any]] = {}
        self.arrivals: collections.Counter[tuple[int, ...]] = collections.Counter()


def _slices(indexer: Any) -> tuple[Any, ...]:
    result = []
    for index in indexer.indices:
        if isinstance(index, _jax.Slice):
            assert index.stride == 1
            result.append(slice(int(index.start), int(index.start) + index.size))
        else:
            result.append(int(index))
    return tuple(result)


def _clipped(slices: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[tuple[Any, ...], Any]:
    """The part of a window that is inside, and where it lies in the window."""
    inside, within = [], []
    for part, size in zip(slices, shape, strict=True):
        if isinstance(part, int):
            inside.append(part)
        else:
            stop = max(part.start, min(part.stop, size))
            inside.append(slice(part.start, stop))
            within.append(slice(0, stop - part.start))
    return tuple(inside), tuple(within)


def _view(array: np.ndarray, transform: Any) -> np.ndarray:
    match transform:
        case _jax.NDIndexer():
            slices = _slices(transform)
            inside, within = _clipped(slices, array.shape)
            window = np.zeros(
                [s.stop - s.start for s in slices if isinstance(s, slice)], array.dtype
            )
            window[within] = array[inside]
            return window
        case tr.UntilingTransform(tiling):
            rank = len(tiling)
            lead = array.ndim - 2 * rank
            order = [
                *range(lead),
                *itertools.chain(*((lead + i, lead + rank + i) for i in range(rank))),
            ]
            counts = array.shape[lead : lead + rank]
            shape = (*array.shape[:lead], *(c * t for c, t in zip(counts, tiling, strict=True)))
            return array.transpose(order).reshape(shape)
        case tr.UnswizzleTransform():
            return array
        case _jax.TransposeTransform():
            return array.transpose(transform.permutation)
    raise NotImplementedError(transform)


def _put(array: np.ndarray, transform: Any, value: np.ndarray) -> np.ndarray:
    match transform:
        case _jax.NDIndexer():
            inside, within = _clipped(_slices(transform), array.shape)
            result = array.copy()
            result[inside] = value[within]
            return result
        case tr.UntilingTransform(tiling):
            rank = len(tiling)
            lead = array.ndim - 2 * rank
            split = [*value.shape[:lead]]
            for size, tile in zip(value.shape[lead:], tiling, strict=True):
                split += [size // tile, tile]
            order = [*range(lead), *range(lead, array.ndim, 2), *range(lead + 1, array.ndim, 2)]
            return value.reshape(split).transpose(order)
        case tr.UnswizzleTransform():
            return value
        case _jax.TransposeTransform():
            return value.transpose(np.argsort(transform.permutation))
    raise NotImplementedError(transform)


def _read(array: np.ndarray, transforms: Any) -> np.ndarray:
    for transform in transforms:
        array = _view(array, transform)
    return array


def _written(array: np.ndarray, transforms: Any, value: np.ndarray) -> np.ndarray:
    if not transforms:
        return np.broadcast_to(value, array.shape).astype(array.dtype)
    first, *rest = transforms
    return _put(array, first, _written(_view(array, first), rest, value))


class _Block:
    def __init__(self, indices: dict[Any, int], order: list[Any]):
        self.indices = indices
        self.order = order
        self.open_group: list[Any] = []
        self.groups: list[list[Any]] = []
        self.stores = 0
        self.loads = 0

    def run(self, jaxpr: Any, consts: Any, args: Any) -> list[Any]:
        environment: dict[Any, Any] = dict(zip(jaxpr.all_invars, [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else environment[atom]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(v) for v in equation.invars])
            environment.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, equation: Any, args: list[Any]) -> list[Any]:
        primitive, params = equation.primitive, equation.params
        if primitive is _jax.run_scoped_p:
            jaxpr = params["jaxpr"]
            scoped = [_allocate(v.aval) for v in jaxpr.invars]
            return self.run(jaxpr, args, scoped)
        if primitive is _jax.scan_p:
            return self.scan(params, args)
        if primitive is _jax.while_p:
            return self.loop(params, args)
        if primitive is _jax.cond_p:
            branch = params["branches"][int(args[0])]
            return self.run(branch, branch.consts, args[1:])
        if primitive is _jax.jit_p:
            return self.run(params["jaxpr"], params["jaxpr"].consts, args)
        if primitive is _jax.axis_index_p:
            name = params["axis_name"]
            return [np.int32(self.indices[name])]
        if primitive is _jax.program_id_p:
            return [np.int32(self.indices[self.order[params["axis"]]])]
        if primitive is _jax.get_p:
            return [_read(args[0].array, params["tree"].unflatten(args[1:]))]
        if primitive is _jax.swap_p:
            memory, value = args[:2]
            transforms = params["tree"].unflatten(args[2:])
            old = _read(memory.array, transforms)
            memory.array = _written(memory.array, transforms, np.asarray(value))
            return [old]
        if "args_tree" in params:
            return self.ours(primitive, params, params["args_tree"].unflatten(args))
        if primitive is copies.commit_group_p:
            self.groups.append(self.open_group)
            self.open_group = []
            return []
        if primitive is copies.wait_smem_to_gmem_p:
            # The reads of shared memory are what a wait is for here, so both kinds are the same.
            while len(self.groups) > params["n"]:
                for store in self.groups.pop(0):
                    store()
            return []
        if primitive is barriers.commit_smem_p:
            return []
        result = primitive.bind(*args, **primitive.get_bind_params(params))
        return list(result) if primitive.multiple_results else [result]

    def ours(self, primitive: Any, params: Any, args: Any) -> list[Any]:
        if primitive is copies.copy_gmem_to_smem_p:
            src, dst, barrier, predicate = args
            if predicate is None or predicate:
                value = _read(src.ref.array, src.transforms)
                poison = np.full(value.shape, np.nan if value.dtype.kind == "f" else -77)
                dst.ref.array = _written(dst.ref.array, dst.transforms, poison)
                key = _barrier_key(barrier)
                barrier.ref.pending.setdefault(key, []).append((dst, value))
                self.loads += 1
                if params["arrive"]:
                    barrier.ref.arrivals[key] += 1
            return []
        if primitive is copies.barrier_expect_p:
            barrier, predicate = args
            if predicate is None or predicate:
                barrier.ref.arrivals[_barrier_key(barrier)] += 1
            return []
        if primitive is copies.copy_smem_to_gmem_p:
            src, dst, predicate = args
            if predicate is None or predicate:
                self.stores += 1

                def store() -> None:
                    value = _read(src.ref.array, src.transforms)
                    dst.ref.array = _written(dst.ref.array, dst.transforms, value)

                self.open_group.append(store)
                if params["commit_group"]:
                    self.groups.append(self.open_group)
                    self.open_group = []
            return []
        if primitive is barriers.barrier_wait_p:
            (barrier,) = args
            key = _barrier_key(barrier)
            pending = barrier.ref.pending.pop(key, [])
            arrivals = barrier.ref.arrivals.pop(key, 0)
            assert arrivals == barrier.ref.num_arrivals, "the barrier would not complete"
            for dst, value in pending:
                dst.ref.array = _written(dst.ref.array, dst.transforms, value)
            return []
        if primitive is arrays.load_p:
            return [_read(args[0].ref.array, args[0].transforms)]
        raise NotImplementedError(primitive)

    def scan(self, params: Any, args: list[Any]) -> list[Any]:
        num_consts, num_carry, num_scanned = _jax.scan_operand_counts(params)
        assert num_scanned == 0
        consts, carry = args[:num_consts], args[num_consts:]
        for _ in range(params["length"]):
            carry = self.run(params["jaxpr"], params["jaxpr"].consts, [*consts, *carry])
            assert len(carry) == num_carry
        return carry

    def loop(self, params: Any, args: list[Any]) -> list[Any]:
        conditions, bodies = params["cond_nconsts"], params["body_nconsts"]
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        carry = args[conditions + bodies :]
        while self.run(condition, condition.consts, [*args[:conditions], *carry])[0]:
            consts = args[conditions : conditions + bodies]
            carry = self.run(body, body.consts, [*consts, *carry])
        return carry


def _barrier_key(barrier: Any) -> tuple[int, ...]:
    key: tuple[int, ...] = ()
    for transform in barrier.transforms:
        key += tuple(int(i) for i in transform.indices)
    return key


def _allocate(aval: Any) -> Any:
    if isinstance(aval.dtype, BarrierType):
        return Barriers(aval.shape, aval.dtype.num_arrivals)
    poison = np.nan if np.dtype(aval.dtype).kind == "f" else -77
    return Memory(np.full(aval.shape, poison, aval.dtype))


def run_kernel(spec: Any, *operands: Any) -> tuple[list[np.ndarray], list[_Block]]:
    """The outputs of a kernel (poisoned first), and the blocks that ran."""
    refs = [Memory(np.array(operand)) for operand in operands]
    outs = [_allocate(aval) for aval in spec.out_avals]
    shape = spec.mesh.shape
    blocks = []
    for position in itertools.product(*map(range, shape.values())):
        block = _Block(dict(zip(shape, position, strict=True)), list(shape))
        block.run(spec.jaxpr, [], [*refs, *outs])
        assert not block.open_group and not block.groups, "copies are not waited for"
        blocks.append(block)
    return [out.array for out in outs], blocks


def spec_of(function: Any, *operands: Any) -> Any:
    """The only kernel that a JAX function calls."""
    jaxpr = jax.make_jaxpr(function)(*operands)
    (spec,) = (e.params["spec"] for e in jaxpr.eqns if e.primitive.name == "pallasite_kernel")
    return spec
