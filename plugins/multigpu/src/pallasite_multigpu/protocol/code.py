"""The PTX with which communicating kernels begin and end: the exchange, the barriers, the traps.

Entry. One thread of each block takes a ticket, which also tells the epoch. The first block writes
the addresses of the kernel's buffers, as that peer has them mapped, into the slots that each peer
has for this device, and the epoch, with the kernel's fingerprint, into its flag there. A fence
comes before all of these stores, none between them, which would take as long as a store takes to
the peer and back: each word of a slot has the epoch, too. The last block begins the next epoch.
Each block waits for the flags of all devices (acquire), and until their slots are of this epoch,
which it keeps in shared memory if the kernel leaves room for them.
There are two parities of slots: who is at epoch e + 2 has seen this device at e + 1, where kernel e
had ended.

Exit. The last block to come tells all peers, and waits until they say the same.

Orders of memory: PTX ISA, section 8; ``%globaltimer``, 10.28; ``barrier.red``, 9.7.13.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from pallasite_multigpu.protocol import layout
from pallasite_multigpu.protocol.layout import Trap

POLLS_BETWEEN_CHECKS = 4096
"""How often a flag or a semaphore is read, which takes some milliseconds, before the time and what
the host says are: both may take longer than what most kernels wait for."""

SLOTS_AT_ONCE = 4
"""How many slots are on their way to a thread at the same time."""

_TABLE = [
    f"ld.global.nc.b64 {register}, [$TABLE+{word * layout.WORD}];"
    for register, word in (
        ("rank", layout.RANK),
        ("own", layout.MAILBOX),
        ("limit", layout.TIMEOUT),
        ("record", layout.RECORD),
    )
]

_REGISTERS = [
    ".reg .pred p, q, first, last, active, pending;",
    ".reg .b64 rank, own, limit, record, word, peer, place, flag, seen, began, now, value;",
    ".reg .b64 printed, offset;",
    ".reg .b32 thread, low, high, ticket, next, parity, distance, missing, polls, narrow;",
    ".reg .pred told, mine;",
    f".reg .b64 front<{SLOTS_AT_ONCE}>, back<{SLOTS_AT_ONCE}>;",
    ".reg .pred stale;",
    ".reg .b32 stamp, half, rest, row;",
]


def _peer(devices: int) -> list[str]:
    """Each lane of the warp serves the device of its number, if there is one."""
    return [
        f"setp.lt.u32 active, thread, {devices};",
        "mov.b64 peer, 0;",
        "mov.b64 offset, 0;",
        f"mad.wide.u32 place, thread, {layout.WORDS_OF_DEVICE * layout.WORD}, $TABLE;",
        f"@active ld.global.nc.v2.b64 {{peer, offset}}, [place+{layout.MAILBOXES * layout.WORD}];",
    ]


def entry(
    fingerprint: int,
    devices: int,
    blocks: int,
    buffers: int,
    cleared: Sequence[int] = (),
    *,
    kept: bool = False,
) -> tuple[str, str]:
    """The entry barrier with the exchange; see :func:`entry_begin`, :func:`entry_end`.

    With ``kept``, its last operand is the 32-bit address of shared memory, where it leaves a row of
    addresses for each device. Its result is the address of the slots of this epoch.

    Returns:
      The text, and constraints.
    """
    begin = _entry_begin(fingerprint, devices, blocks, buffers, cleared)
    operands = 2 + buffers + len(cleared)
    end = _entry_end(fingerprint, blocks, buffers, f"${1 + operands}" if kept else None)
    lines = ["{", *_REGISTERS, *_TABLE, *begin, *end, "}"]
    return _text(lines, 1), ",".join(["=&l", *["l"] * operands, *["r"] * kept, "~{memory}"])


def entry_begin(
    fingerprint: int, devices: int, blocks: int, buffers: int, cleared: Sequence[int]
) -> tuple[str, str]:
    """The first part of the entry barrier of a kernel that tells far devices by itself.

    Its operands are those of :func:`entry`. Its result has the epoch in its low half, and in its
    high half whether this thread has to tell the device of its number.

    Returns:
      The text, and constraints.
    """
    begin = _entry_begin(fingerprint, devices, blocks, buffers, cleared, far=True)
    lines = [
        "{",
        *_REGISTERS,
        *_TABLE,
        "mov.b64 $0, 0;",
        *begin,
        "setp.eq.and.u32 first, ticket, 0, active;",
        "selp.b32 high, 1, 0, first;",
        "mov.b64 $0, {next, high};",
        "READY_${:uid}:",
        "}",
    ]
    operands = 2 + buffers + len(cleared)
    return _text(lines, 1), ",".join(["=&l", *["l"] * operands, "~{memory}"])


def entry_end(
    fingerprint: int, devices: int, blocks: int, buffers: int, *, kept: bool = False
) -> tuple[str, str]:
    """The second part: its operands are the first two of the first part, and that one's result;
    with ``kept``, also that of :func:`entry`.

    Returns:
      The text, and constraints.
    """
    lines = [
        "{",
        *_REGISTERS,
        *_TABLE,
        "mov.u32 thread, %tid.x;",
        "mov.b32 parity, 0;",
        "setp.ge.u32 p, thread, 32;",
        "@p bra.uni READY_${:uid};",
        "mov.b64 {next, high}, $3;",
        "and.b32 parity, next, 1;",
        f"setp.lt.u32 active, thread, {devices};",
        *_entry_end(fingerprint, blocks, buffers, "$4" if kept else None),
        "}",
    ]
    return _text(lines, 1), ",".join(["=&l,l,l,l", *["r"] * kept, "~{memory}"])


def _entry_begin(
    fingerprint: int,
    devices: int,
    blocks: int,
    buffers: int,
    cleared: Sequence[int],
    *,
    far: bool = False,
) -> list[str]:
    """The entry barrier with the exchange; all threads of all blocks execute it.

    Its operands are the table's address, an address that no other launch has at the same time,
    those of the buffers that peers reach, and those of memory that the first block fills with zeros
    before any other block, here or on another device, goes on. Its result is the address of the
    slots of this epoch.

    Args:
      fingerprint: of the kernel.
      devices: of the group.
      blocks: of the kernel.
      buffers: how many of them peers reach.
      cleared: words of 32 bits of each piece of memory that is filled with zeros.
      far: whether devices may be far, which are not told here.
    """
    # Addresses are told to each peer as it has them mapped.
    stores = [
        line
        for number in range(1 + buffers)
        for line in (
            f"add.s64 word, offset, ${2 + number};" if number else "mov.b64 word, $2;",
            "mov.b64 {half, rest}, word;",
            "mov.b64 front0, {next, half};",
            "mov.b64 back0, {next, rest};",
            f"@{'first' if number else 'mine'} st.relaxed.sys.global.v2.b64"
            f" [place+{number * layout.SLOT}], {{front0, back0}};",
        )
    ]
    clear = [
        line
        for place, words in enumerate(cleared)
        for line in _clear(3 + buffers + place, words, blocks)
    ]
    # What this device did before, the zeros of all lanes too, comes before all that is told. The
    # fence takes as long as the ticket, and need not wait for it where only one block clears.
    fence = ["bar.warp.sync 0xffffffff;", "@active fence.acq_rel.sys;"]
    waits = bool(clear) and blocks > 1
    return [
        "setp.lt.s64 p, rank, 0;",
        "@p exit;",
        "mov.u32 thread, %tid.x;",
        "mov.b32 parity, 0;",
        "setp.ge.u32 p, thread, 32;",
        "@p bra.uni READY_${:uid};",
        *_peer(devices),
        # The only block need not wait for its ticket.
        *([] if waits else clear),
        # The ticket, in all lanes. It orders nothing: flags do.
        "setp.eq.u32 p, thread, 0;",
        "mov.b64 word, 0;",
        f"@p atom.relaxed.gpu.global.add.u64 word, [own+{layout.TICKETS}], 1;",
        *([] if waits else fence),
        "mov.b64 {ticket, next}, word;",
        "shfl.sync.idx.b32 ticket, ticket, 0, 31, 0xffffffff;",
        "shfl.sync.idx.b32 next, next, 0, 31, 0xffffffff;",
        "add.u32 next, next, 1;",
        "and.b32 parity, next, 1;",
        f"setp.ge.u32 q, ticket, {blocks};",
        "mov.b64 value, 0;",
        *_trap("q", Trap.OVERLAP, fingerprint, "OVERTAKEN"),
        *([*clear, *fence] if waits else []),
        # The first block publishes.
        "setp.eq.and.u32 first, ticket, 0, active;",
        *(_NEAR if far else ()),
        f"mul.wide.u32 place, parity, {layout.SLOTS_OF_PARITY};",
        "add.s64 place, place, peer;",
        "cvt.u32.u64 narrow, rank;",
        f"mad.wide.u32 place, narrow, {layout.SLOTS_OF_DEVICE}, place;",
        f"add.s64 place, place, {layout.SLOTS};",
        # Only this device's own blocks ask which launch it is.
        "setp.eq.and.u32 mine, thread, narrow, first;",
        *stores,
        f"mov.b64 word, {{next, {_hexadecimal(fingerprint)}}};",
        f"mad.wide.u32 flag, narrow, {layout.LINE}, peer;",
        f"@first st.relaxed.sys.global.b64 [flag+{layout.ENTRY_FLAGS}], word;",
        # The last block begins the next epoch.
        f"setp.eq.u32 last, ticket, {blocks - 1};",
        "setp.eq.and.u32 last, thread, 0, last;",
        "mov.b64 word, {0, next};",
        f"@last st.relaxed.gpu.global.b64 [own+{layout.TICKETS}], word;",
    ]


def _entry_end(fingerprint: int, blocks: int, buffers: int, kept: str | None) -> list[str]:
    before, look = _read_slots(buffers, kept is not None)
    told = [one.replace("{fingerprint}", _hexadecimal(fingerprint)) for one in _SLOTS_ARE_TOLD]
    return [
        f"mad.wide.u32 flag, thread, {layout.LINE}, own;",
        f"add.s64 flag, flag, {layout.ENTRY_FLAGS};",
        f"mul.wide.u32 place, parity, {layout.SLOTS_OF_PARITY};",
        "add.s64 place, place, own;",
        f"mad.wide.u32 place, thread, {layout.SLOTS_OF_DEVICE}, place;",
        f"add.s64 place, place, {layout.SLOTS};",
        *([f"mad.lo.u32 row, thread, {buffers * layout.WORD}, {kept};"] if kept else []),
        *_wait("b64", fingerprint, Trap.NOT_BEGUN, "BEGIN", before, [*look, *told]),
        # A peer at this epoch must run this kernel; one that is ahead has met us before.
        "setp.eq.and.s32 q, distance, 0, active;",
        f"setp.ne.and.b32 q, high, {_hexadecimal(fingerprint)}, q;",
        "cvt.u64.u32 value, high;",
        *_trap("q", Trap.OTHER_KERNEL, fingerprint, "MISMATCH"),
        "bar.warp.sync 0xffffffff;",
        *(_announced(fingerprint) if blocks > 1 else ()),
        "READY_${:uid}:",
        "setp.ne.b32 p, parity, 0;",
        "barrier.cta.red.or.pred p, 0, p;",
        "selp.b32 parity, 1, 0, p;",
        f"mad.wide.u32 $0, parity, {layout.SLOTS_OF_PARITY}, own;",
        f"add.s64 $0, $0, {layout.SLOTS};",
    ]


def _read_slots(buffers: int, kept: bool) -> tuple[list[str], list[str]]:
    """Loads the slots of each lane's device, and of the own device also what tells launches apart,
    which is left in the first registers; ``stale`` if they are not all of this epoch.

    Args:
      buffers: how many of the kernel's peers reach.
      kept: whether the addresses go to this lane's ``row`` of shared memory.

    Returns:
      What comes before the flag is read, so that all of this is on its way at the same time, and
      what looks at what has come.
    """
    begin = [
        "cvt.u32.u64 narrow, rank;",
        "setp.eq.and.u32 mine, thread, narrow, active;",
        "setp.ne.and.b32 stale, 1, 1, active;",
    ]
    look: list[str] = []
    first = range(0, 1 + buffers, SLOTS_AT_ONCE)
    for chunk in (range(one, min(one + SLOTS_AT_ONCE, 1 + buffers)) for one in reversed(first)):
        begin += look
        begin += [
            f"@{'active' if number else 'mine'} ld.relaxed.sys.global.v2.b64"
            f" {{front{register}, back{register}}}, [place+{number * layout.SLOT}];"
            for register, number in enumerate(chunk)
        ]
        look = [
            line
            for register, number in enumerate(chunk)
            for line in (
                *_look_at_slot(register, "active" if number else "mine"),
                *([_keep_slot(number)] if kept and number else []),
            )
        ]
    return begin, look


def _look_at_slot(register: int, who: str) -> list[str]:
    return [
        line
        for word, half in ((f"front{register}", "half"), (f"back{register}", "rest"))
        for line in (
            f"mov.b64 {{stamp, {half}}}, {word};",
            f"setp.ne.and.b32 p, stamp, next, {who};",
            "or.pred stale, stale, p;",
        )
    ]


def _keep_slot(number: int) -> str:
    place = (number - 1) * layout.WORD
    return f"@active st.shared.v2.b32 [row+{place}], {{half, rest}};"


_SLOTS_ARE_TOLD = (
    # One that runs another kernel may have fewer of them, and is found out afterwards.
    "setp.eq.b32 told, high, {fingerprint};",
    "setp.gt.or.s32 told, distance, 0, told;",
    "setp.ge.and.s32 told, distance, 0, told;",
    "and.pred told, told, stale;",
    "or.pred pending, pending, told;",
)
"""Lanes whose device has begun this kernel wait until its slots are of this epoch, too."""


def _announced(fingerprint: int) -> list[str]:
    """The launch must be the one that the first block has announced: of the slots of this device,
    the lane of its number has the first one."""
    return [
        "mov.b64 {stamp, half}, front0;",
        "mov.b64 {stamp, rest}, back0;",
        "mov.b64 value, {half, rest};",
        "setp.ne.and.b64 q, value, $2, mine;",
        *_trap("q", Trap.OVERLAP, fingerprint, "ANOTHER"),
    ]


def _clear(operand: int, words: int, blocks: int) -> list[str]:
    """The first warp of the first block fills memory with zeros."""
    again, done = (f"{name}_{operand}_${{:uid}}" for name in ("CLEAR", "CLEARED"))
    return [
        "mov.b32 low, thread;",
        "mov.b32 high, 0;",
        f"{again}:",
        f"setp.lt.u32 p, low, {words};",
        *(["setp.eq.and.u32 p, ticket, 0, p;"] if blocks > 1 else []),
        f"@!p bra {done};",
        f"mad.wide.u32 value, low, 4, ${operand};",
        "st.global.b32 [value], high;",
        "add.u32 low, low, 32;",
        f"bra {again};",
        f"{done}:",
    ]


_NEAR = [
    f"and.b64 value, peer, {layout.FAR};",
    "setp.eq.and.b64 first, value, 0, first;",
    "mov.b64 value, 0;",
]
"""Far devices have a mailbox, but not for stores."""


def exit_(fingerprint: int, devices: int, blocks: int) -> tuple[str, str]:
    """The exit barrier; all threads of all blocks execute it. Its operand is the table's address.

    Args:
      fingerprint: of the kernel.
      devices: of the group.
      blocks: of the kernel.

    Returns:
      The text, and constraints.
    """
    begin = _exit_begin(devices, blocks)
    lines = ["{", *_REGISTERS, *_TABLE, *begin, *_exit_end(fingerprint), "}"]
    return _text(lines, 0), "l,~{memory}"


def exit_begin(devices: int, blocks: int) -> tuple[str, str]:
    """The first part of the exit barrier of a kernel that tells far devices by itself.

    Its operand is the table's address. Its result has the epoch in its low half, and in its high
    half whether this thread has to tell the device of its number; 2 or 3 in all threads that have
    to wait.

    Returns:
      The text, and constraints.
    """
    lines = [
        "{",
        *_REGISTERS,
        *_TABLE,
        "mov.b64 $0, 0;",
        *_exit_begin(devices, blocks, far=True),
        "selp.b32 high, 3, 2, active;",
        "mov.b64 $0, {next, high};",
        "LEAVE_${:uid}:",
        "}",
    ]
    return _text(lines, 1), "=&l,l,~{memory}"


def exit_end(fingerprint: int, devices: int) -> tuple[str, str]:
    """The second part: its operands are the table's address, and the first part's result.

    Returns:
      The text, and constraints.
    """
    lines = [
        "{",
        *_REGISTERS,
        *_TABLE,
        "mov.u32 thread, %tid.x;",
        "mov.b64 {next, high}, $1;",
        "setp.lt.u32 p, high, 2;",
        "@p bra LEAVE_${:uid};",
        f"setp.lt.u32 active, thread, {devices};",
        *_exit_end(fingerprint),
        "}",
    ]
    return _text(lines, 0), "l,l,~{memory}"


def _exit_begin(devices: int, blocks: int, *, far: bool = False) -> list[str]:
    return [
        "barrier.cta.sync 0;",
        "mov.u32 thread, %tid.x;",
        "setp.ge.u32 p, thread, 32;",
        "@p bra.uni LEAVE_${:uid};",
        "setp.eq.u32 p, thread, 0;",
        "mov.b32 ticket, 0;",
        *_peer(devices),
        # What the threads of the block have done comes before, for the whole system.
        f"@p atom.acq_rel.sys.global.add.u32 ticket, [own+{layout.EXITS}], 1;",
        "shfl.sync.idx.b32 ticket, ticket, 0, 31, 0xffffffff;",
        f"setp.ne.u32 q, ticket, {blocks - 1};",
        "@q bra.uni LEAVE_${:uid};",
        # What the first lane knows of the other blocks, all lanes tell the peers.
        "bar.warp.sync 0xffffffff;",
        f"@p st.relaxed.gpu.global.b32 [own+{layout.EXITS}], 0;",
        # All blocks have begun: the epoch is that of this kernel.
        f"ld.relaxed.gpu.global.b64 word, [own+{layout.TICKETS}];",
        "mov.b64 {low, next}, word;",
        "cvt.u32.u64 narrow, rank;",
        f"mad.wide.u32 flag, narrow, {layout.LINE}, peer;",
        *(("mov.pred first, active;", *_NEAR) if far else ()),
        f"@{'first' if far else 'active'} st.release.sys.global.b32"
        f" [flag+{layout.EXIT_FLAGS}], next;",
    ]


def _exit_end(fingerprint: int) -> list[str]:
    return [
        f"mad.wide.u32 flag, thread, {layout.LINE}, own;",
        f"add.s64 flag, flag, {layout.EXIT_FLAGS};",
        *_wait("b32", fingerprint, Trap.NOT_ENDED, "END"),
        "LEAVE_${:uid}:",
    ]


def trap(code: int, fingerprint: int) -> tuple[str, str]:
    """Records an error and ends the kernel, in whichever threads execute it.

    Its operands are the table's address and a value of 64 bits.

    Returns:
      The text, and constraints.
    """
    lines = [
        "{",
        *_REGISTERS,
        *_TABLE,
        "mov.b32 next, 0;",
        "mov.b64 value, $1;",
        "setp.eq.b64 q, own, own;",
        *_trap("q", code, fingerprint, "GIVE_UP"),
        "}",
    ]
    return _text(lines, 0), "l,l,~{memory}"


def wait(fingerprint: int, decrement: bool, alone: bool = False) -> tuple[str, str]:
    """One thread waits until a semaphore has reached an amount, and subtracts it if ``decrement``;
    nobody else does so if it is ``alone``, and it need not know what it has subtracted from.

    Its operands are the table's address, that of the semaphore, and the amount.

    Returns:
      The text, and constraints.
    """
    if decrement and not alone:
        poll = [
            "ld.relaxed.sys.global.s32 low, [$1];",
            "setp.lt.s32 pending, low, $2;",
            "@pending bra SLOW_${:uid};",
            "sub.s32 high, low, $2;",
            "atom.acquire.sys.global.cas.b32 narrow, [$1], low, high;",
            "setp.eq.s32 p, narrow, low;",
            "@p bra SIGNALLED_${:uid};",
            "bra POLL_${:uid};",
        ]
    else:
        poll = [
            "ld.acquire.sys.global.s32 low, [$1];",
            "setp.ge.s32 p, low, $2;",
            "@p bra SIGNALLED_${:uid};",
        ]
    lines = [
        "{",
        *_REGISTERS,
        "mov.b32 polls, 0;",
        "mov.b64 began, 0;",
        "mov.b64 limit, 0;",
        "mov.b64 record, 0;",
        "mov.b64 rank, 0;",
        "mov.b64 own, 0;",
        "POLL_${:uid}:",
        *poll,
        "SLOW_${:uid}:",
        "add.u32 polls, polls, 1;",
        f"and.b32 narrow, polls, {POLLS_BETWEEN_CHECKS - 1};",
        "setp.ne.b32 p, narrow, 0;",
        "@p bra POLL_${:uid};",
        f"setp.ne.b32 p, polls, {POLLS_BETWEEN_CHECKS};",
        "@p bra LOADED_${:uid};",
        *_TABLE,
        "mov.u64 began, %globaltimer;",
        "LOADED_${:uid}:",
        "setp.eq.b64 p, limit, 0;",
        "@p bra HOST_${:uid};",
        "mov.u64 now, %globaltimer;",
        "sub.s64 now, now, began;",
        "setp.lt.u64 q, limit, now;",
        "@!q bra HOST_${:uid};",
        "mov.b32 high, $2;",
        "mov.b64 value, {high, low};",
        "mov.b32 next, 0;",
        *_trap("q", Trap.NOT_SIGNALLED, fingerprint, "UNSIGNALLED"),
        "HOST_${:uid}:",
        *_look_at_host("POLL_${:uid}"),
        "bra POLL_${:uid};",
        "SIGNALLED_${:uid}:",
        *(_TAKE if decrement and alone else []),
        "}",
    ]
    return _text(lines, 0), "l,l,r,~{memory}"


_TAKE = ["neg.s32 high, $2;", "red.relaxed.sys.global.add.s32 [$1], high;"]


def _look_at_host(otherwise: str) -> list[str]:
    """What the host has to say to a kernel that waits: give up at once, or after a last look."""
    return [
        "setp.eq.b64 p, record, 0;",
        f"@p bra {otherwise};",
        f"ld.relaxed.sys.global.b64 value, [record+{layout.RECORD_ABORT * layout.WORD}];",
        f"setp.eq.b64 p, value, {layout.ABORT_NOW};",
        "@p trap;",
        f"setp.eq.b64 p, value, {layout.ABORT_SOON};",
        "@p mov.b64 limit, 1;",
    ]


def _text(lines: Sequence[str], table: int) -> str:
    return "\n\t".join(lines).replace("$TABLE", f"${table}")


def _hexadecimal(fingerprint: int) -> str:
    return f"{fingerprint:#010x}"


def _wait(
    kind: str,
    fingerprint: int,
    code: Trap,
    name: str,
    before: Sequence[str] = (),
    also: Sequence[str] = (),
) -> list[str]:
    """The warp waits until the flags of all active lanes have reached the epoch ``next``, and none
    is made ``pending`` by what is loaded ``before`` the flag and ``also`` looked at behind it."""
    load = {
        "b64": ["@pending ld.acquire.sys.global.b64 seen, [flag];", "mov.b64 {low, high}, seen;"],
        "b32": ["@pending ld.acquire.sys.global.b32 low, [flag];"],
    }[kind]
    return [
        "mov.b64 seen, 0;",
        *(f"mov.b64 {name}{at}, 0;" for name in ("front", "back") for at in range(SLOTS_AT_ONCE)),
        "mov.b32 high, 0;",
        "mov.b32 polls, 0;",
        "mov.b32 distance, 0;",
        "setp.ne.and.b32 pending, 1, 0, active;",
        "mov.u64 began, %globaltimer;",
        f"POLL_{name}_${{:uid}}:",
        *before,
        *load,
        "@pending sub.s32 distance, low, next;",
        "setp.lt.and.s32 pending, distance, 0, active;",
        *also,
        "vote.sync.ballot.b32 missing, pending, 0xffffffff;",
        "setp.eq.b32 p, missing, 0;",
        f"@p bra.uni MET_{name}_${{:uid}};",
        "add.u32 polls, polls, 1;",
        f"and.b32 narrow, polls, {POLLS_BETWEEN_CHECKS - 1};",
        "setp.ne.b32 p, narrow, 0;",
        f"@p bra.uni POLL_{name}_${{:uid}};",
        # Has the time passed, or has the host given up?
        "setp.eq.b64 p, limit, 0;",
        f"@p bra.uni HOST_{name}_${{:uid}};",
        "mov.u64 now, %globaltimer;",
        "sub.s64 now, now, began;",
        "setp.lt.u64 q, limit, now;",
        "vote.sync.any.pred q, q, 0xffffffff;",
        f"@!q bra.uni HOST_{name}_${{:uid}};",
        "cvt.u64.u32 value, missing;",
        "setp.eq.and.u32 q, thread, 0, q;",
        *_trap("q", code, fingerprint, f"LATE_{name}"),
        f"HOST_{name}_${{:uid}}:",
        *_look_at_host(f"POLL_{name}_${{:uid}}"),
        f"bra.uni POLL_{name}_${{:uid}};",
        f"MET_{name}_${{:uid}}:",
        "cvt.u32.u64 narrow, rank;",
    ]


def _trap(predicate: str, code: int, fingerprint: int, name: str) -> list[str]:
    """Where the predicate is true, records the error of this code and ``value``, and traps.

    Of all threads of a device one writes the record; others trap when it is complete.
    """
    words = {
        layout.RECORD_CODE: "now",
        layout.RECORD_RANK: "rank",
        layout.RECORD_VALUE: "value",
        layout.RECORD_EPOCH: "seen",
        layout.RECORD_FINGERPRINT: "printed",
    }
    return [
        f"@!{predicate} bra GOOD_{name}_${{:uid}};",
        "setp.eq.b64 p, record, 0;",
        "@p trap;",
        f"atom.acq_rel.gpu.global.cas.b32 low, [own+{layout.LOCK}], 0, 1;",
        "setp.ne.b32 p, low, 0;",
        f"@p bra KEPT_{name}_${{:uid}};",
        f"mov.b64 now, {int(code)};",
        "cvt.u64.u32 seen, next;",
        f"mov.b64 printed, {_hexadecimal(fingerprint)};",
        *(
            f"st.relaxed.sys.global.b64 [record+{word * layout.WORD}], {register};"
            for word, register in words.items()
        ),
        "mov.u32 low, %ctaid.z;",
        "mov.u32 high, %nctaid.y;",
        "mov.u32 narrow, %ctaid.y;",
        "mad.lo.u32 low, low, high, narrow;",
        "mov.u32 high, %nctaid.x;",
        "mov.u32 narrow, %ctaid.x;",
        "mad.lo.u32 low, low, high, narrow;",
        "cvt.u64.u32 now, low;",
        f"st.relaxed.sys.global.b64 [record+{layout.RECORD_BLOCK * layout.WORD}], now;",
        "mov.b64 now, 1;",
        f"st.release.sys.global.b64 [record+{layout.RECORD_STATE * layout.WORD}], now;",
        f"KEPT_{name}_${{:uid}}:",
        f"ld.acquire.sys.global.b64 now, [record+{layout.RECORD_STATE * layout.WORD}];",
        "setp.eq.b64 p, now, 0;",
        f"@p bra KEPT_{name}_${{:uid}};",
        "trap;",
        f"GOOD_{name}_${{:uid}}:",
    ]
