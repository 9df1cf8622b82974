"""Fences (PTX ISA 9.7.13.4, membar and fence).

Memory is sequentially consistent here: fences change nothing, but the observer hears of them.
"""

from __future__ import annotations

from pallasite_simulator.binder import Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import SCOPES, bind_address, check_addresses
from pallasite_simulator.ptx.syntax import Immediate, Instruction

instructions = InstructionSet()

_MEMBAR_SCOPES = {"cta": "cta", "gl": "gpu", "sys": "sys"}

_RESTRICTED = {
    "acquire": "sync_restrict::shared::cluster",
    "release": "sync_restrict::shared::cta",
}

_PROXIES = ("alias", "async", "async.global", "async.shared::cta", "async.shared::cluster")

TENSOR_MAP_BYTES = 128


def _fence(semantics: str, scope: str) -> Step:
    def step(lanes: Lanes) -> None:
        if lanes.wave.observer is not None:
            lanes.wave.observer.fence(lanes.numbers, semantics, scope)

    return step


@instructions.register("fence")
def bind_fence(instruction: Instruction, binder: Binder) -> Step:
    """Fence: PTX ISA 9.7.13.4, fence{.sem}.scope; without ``.sem`` it is ``.acq_rel``.

    The forms with ``.sync_restrict``, which order less, have one way of being written each.
    """
    binder.expect_operands(0)
    *semantics, scope = instruction.modifiers or ("",)
    sense = semantics[0] if semantics else "acq_rel"
    if sense not in ("sc", "acq_rel", "acquire", "release") or scope not in SCOPES:
        raise binder.error("unknown fence", expected="fence.sem.scope")
    if len(semantics) > 1 and (semantics[1:] != [_RESTRICTED.get(sense)] or scope != "cluster"):
        raise binder.error(
            "unknown fence",
            expected="fence.acquire.sync_restrict::shared::cluster.cluster or"
            " fence.release.sync_restrict::shared::cta.cluster",
        )
    return _fence(sense, scope)


@instructions.register("fence.mbarrier_init")
def bind_barrier_fence(instruction: Instruction, binder: Binder) -> Step:
    """Fence between the initialization of mbarriers and their use by other blocks of the cluster:
    PTX ISA 9.7.13.4, fence.mbarrier_init.release.cluster.

    The observer gets the semantics ``"mbarrier_init"``.
    """
    binder.expect_operands(0)
    if instruction.modifiers != ("mbarrier_init", "release", "cluster"):
        raise binder.error("unknown fence", expected="fence.mbarrier_init.release.cluster")
    return _fence("mbarrier_init", "cluster")


@instructions.register("membar")
def bind_membar(instruction: Instruction, binder: Binder) -> Step:
    """Memory barrier: PTX ISA 9.7.13.4, membar.level, the same as fence.sc of that scope."""
    binder.expect_operands(0)
    if len(instruction.modifiers) != 1 or instruction.modifiers[0] not in _MEMBAR_SCOPES:
        raise binder.error("unknown memory barrier", expected=".cta, .gl or .sys")
    return _fence("sc", _MEMBAR_SCOPES[instruction.modifiers[0]])


@instructions.register("fence.proxy", "membar.proxy")
def bind_proxy_fence(instruction: Instruction, binder: Binder) -> Step:
    """Fence between the generic proxy and another one: PTX ISA 9.7.13.4, fence.proxy.kind.

    The observer gets what follows ``proxy`` without order and scope (``"async.shared::cta"``,
    ``"tensormap::generic"``); fences that acquire or release are told of as such before.
    """
    kind = ".".join(instruction.modifiers[1:])
    if instruction.opcode == "membar" and kind != "alias":
        raise binder.error("unknown memory barrier", expected="membar.proxy.alias")
    if kind not in _PROXIES:
        return _bind_directed_fence(instruction, binder)
    binder.expect_operands(0)

    def step(lanes: Lanes) -> None:
        if lanes.wave.observer is not None:
            lanes.wave.observer.proxy_fence(lanes.numbers, kind)

    return step


def _bind_directed_fence(instruction: Instruction, binder: Binder) -> Step:
    """PTX ISA 9.7.13.4: unidirectional proxy fences, with an order and a scope."""
    pair, sense, *rest = (*instruction.modifiers[1:], "", "")
    scope = [one for one in rest if one]
    ordered = sense in _RESTRICTED
    if pair == "async::generic":
        known = ordered and scope == [_RESTRICTED[sense], "cluster"]
    else:
        known = pair == "tensormap::generic" and ordered and len(scope) == 1 and scope[0] in SCOPES
    if not known:
        raise binder.error(
            "unknown proxy fence",
            expected="fence.proxy." + ", ".join(_PROXIES) + ", or one with .acquire or .release",
        )
    address = None
    if pair == "tensormap::generic" and sense == "acquire":
        binder.expect_operands(2)
        if binder.operand(1) != Immediate(TENSOR_MAP_BYTES):
            raise binder.error("the size must be that of a tensor map", expected="128")
        _, address = bind_address(binder, 0, "")
    else:
        binder.expect_operands(0)

    def step(lanes: Lanes) -> None:
        if address is not None:
            check_addresses(
                lanes, "generic", address(lanes), TENSOR_MAP_BYTES, instruction, alignment=64
            )
        observer = lanes.wave.observer
        if observer is not None:
            observer.fence(lanes.numbers, sense, scope[-1])
            observer.proxy_fence(lanes.numbers, pair)

    return step
