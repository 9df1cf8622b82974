"""The sanitizer finds what is missing in programs of JAX's compiler, when it is taken out."""

from __future__ import annotations

import re

import pytest
from replay import kept, replay

from pallasite_simulator.errors import SimulationError
from pallasite_simulator.sanitizer import GROUPS, LaunchState


def findings(name, edit):
    """What the sanitizer says of an edited program."""
    state = LaunchState(frozenset(GROUPS) - {"bounds"})
    try:
        replay(name, state=state, edit=edit)
    except SimulationError as error:
        return str(error)
    return str(state.findings.error()) if state.findings else ""


def without(pattern, count=0):
    def edit(ptx):
        found, number = re.subn(pattern, "", ptx, count=count)
        assert number, pattern
        return found

    return edit


def replaced(pattern, text, count=0):
    def edit(ptx):
        found, number = re.subn(pattern, text, ptx, count=count)
        assert number, pattern
        return found

    return edit


WAIT = r"mbarrier\.try_wait[^;]*;\s+@P1 bra\.uni DONE;\s+bra\.uni\s+LAB_WAIT;"
"""A wait for an mbarrier."""


def unwaited(number):
    """Without one of the waits for an mbarrier: the first is that for the operands."""

    def edit(ptx):
        places = [one.span() for one in re.finditer(WAIT, ptx)]
        start, end = places[number]
        return ptx[:start] + ptx[end:]

    return edit


CASES = {
    "stores are not waited for": (
        "a from registers", without(r"tcgen05\.wait::st\.sync\.aligned;"),
        "asynchronous operation not waited for, in tensor memory", "plgpu.commit_tmem()",
    ),
    "operands are still being copied": (
        "f16", unwaited(0), "asynchronous operation not waited for, in shared memory", "reads",
    ),
    "the result is not waited for": (
        "f16", unwaited(1), "asynchronous operation not waited for, in tensor memory",
        "tcgen05.commit",
    ),
    "the copy of scale factors is not waited for by a load": (
        "mxf8", unwaited(1), "asynchronous operation not waited for, in tensor memory",
        "tcgen05.commit",
    ),
    "D was never written": (
        "f16",
        replaced(r"(tcgen05\.mma\.cta_group::1\.kind::f16[^;]*, )[^,;]+;", r"\1 1;"),
        "read of uninitialized tensor memory", "reads lane",
    ),
    "columns are not released": (
        "f16", without(r"tcgen05\.dealloc[^;]*;"), "misuse of tcgen05", "were not released",
    ),
    "two groups of blocks": (
        "f16", replaced(r"tcgen05\.commit\.cta_group::1", "tcgen05.commit.cta_group::2"),
        "uses another group of blocks than before", "cta_group",
    ),
    "use after release": (
        "f16",
        replaced(
            r"(tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned;)",
            r"\1 { .reg .b32 at; ld.shared.b32 at, [__dynamic_shmem__0+TMEM];"
            r" tcgen05.dealloc.cta_group::1.sync.aligned.b32 at, COUNT; }",
        ),
        "not allocated", "tensor memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_finding(name):
    program, edit, kind, detail = CASES[name]
    if name == "use after release":
        edit = _released(edit, kept(program)["ptx"])
    message = findings(program, edit)
    assert kind in message
    assert detail in message


def _released(edit, ptx):
    """Fills in where the address is, and how many columns there are."""
    found = re.search(r"tcgen05\.alloc\S* \[(%r\d+)\], (%r\d+|\d+);", ptx)
    assert found is not None

    def changed(text):
        made = edit(text)
        made = made.replace("[__dynamic_shmem__0+TMEM]", f"[{found[1]}]")
        return made.replace("COUNT", found[2])

    return changed
