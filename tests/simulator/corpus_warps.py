"""Instructions of several threads: shuffles, votes, atomics, shared memory, matrices."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from corpus import Case, generator, integers
from simulator_support import body_ptx

THREADS = 128
RESULT = "add.s64 %at, %array{last}, %offset4; st.global.b32 [%at], %d;"
LOAD = "add.s64 %at, %array{number}, %offset4; ld.global.b32 %{letter}, [%at];"


def case(
    name: str,
    code: str,
    *inputs: np.ndarray,
    registers: str = "",
    shared: int = 0,
    count: int = THREADS,
    store: bool = True,
    result: str = "u4",
    start: bool = False,
    grid: int = 1,
    variables: str = "",
    ulp: float | None = None,
    absolute: float = 0.0,
) -> Case:
    """A program in which thread n loads element n of each 32-bit input into ``%a``, ``%b``, ``%c``,
    and stores ``%d`` (unless ``store`` is false: then the code does it, through ``%array<last>``).
    """
    body = [".reg .b64 %at; .reg .b32 %d, %a, %b, %c; .reg .pred %p, %q;", registers]
    for number, (letter, array) in enumerate(zip("abc", inputs, strict=False)):
        if array.itemsize == 4:
            body.append(LOAD.format(number=number, letter=letter))
    body.append(code)
    if store:
        body.append(RESULT.format(last=len(inputs)))
    ptx = body_ptx("\n".join(body), len(inputs) + 1, shared=shared, variables=variables)
    return Case(
        name,
        ptx,
        inputs,
        (np.dtype(result), count),
        grid=grid,
        shared=shared,
        start=start,
        ulp=ulp,
        absolute=absolute,
    )


def words(name: str, count: int = THREADS) -> np.ndarray:
    return integers(name, np.uint32, count)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from shuffles()
    yield from votes()
    yield from divergence()
    yield from atomics()
    yield from shared_memory()
    yield from matrices()


def shuffles() -> Iterator[Case]:
    for mode, clamps in (
        ("idx", (31, 0x181F, 0x1C03)),
        ("bfly", (31, 0x181F)),
        ("up", (0, 0x1800)),
        ("down", (31, 0x1C1F)),
    ):
        for clamp in clamps:
            name = f"shfl.{mode} {clamp:#x}"
            code = f"""
                and.b32 %b, %b, 63;
                shfl.sync.{mode}.b32 %d|%p, %a, %b, {clamp}, -1;
                @!%p xor.b32 %d, %d, 0x5a5a5a5a;
            """
            yield case(name, code, words(name + "a"), words(name + "b"))


def votes() -> Iterator[Case]:
    def few(name: str) -> np.ndarray:
        return generator(name).integers(0, 4, THREADS).astype(np.uint32)

    for mode in ("all", "any", "uni"):
        name = f"vote.{mode}"
        code = f"""
            setp.lt.u32 %p, %a, %b;
            vote.sync.{mode}.pred %q, %p, -1;
            selp.b32 %d, 1, 0, %q;
        """
        limits = np.repeat(np.array([0, 2, 4, 1], np.uint32), 32)
        yield case(name, code, few(name), limits)
    code = "setp.lt.u32 %p, %a, %b; vote.sync.ballot.b32 %d, %p, -1;"
    yield case("vote.ballot", code, words("ballot a"), words("ballot b"))
    yield case("match.any.b32", "match.any.sync.b32 %d, %a, -1;", few("match.any"))
    code = """
        .reg .b64 %wide;
        mov.b64 %wide, {%a, %b};
        match.any.sync.b64 %d, %wide, -1;
    """
    yield case("match.any.b64", code, few("match any low"), few("match any high"))
    code = "match.all.sync.b32 %d|%p, %a, -1; @%p add.u32 %d, %d, 7;"
    same = np.repeat(np.array([5, 6, 7, 8], np.uint32), 32)
    same[70] = 1
    yield case("match.all.b32", code, same)
    for name in ("add", "min", "max"):
        for kind in ("u32", "s32"):
            code = f"redux.sync.{name}.{kind} %d, %a, -1;"
            yield case(f"redux.{name}.{kind}", code, words(f"redux {name} {kind}"))
    for name in ("and", "or", "xor"):
        yield case(
            f"redux.{name}.b32", f"redux.sync.{name}.b32 %d, %a, -1;", words(f"redux {name}")
        )
    yield case("elect", "elect.sync %d|%p, -1; @%p add.u32 %d, %d, 100;", words("elect"))
    code = "activemask.b32 %d;"
    yield case("activemask", code, words("activemask"))
    names = ("%laneid", "%lanemask_lt", "%lanemask_ge", "%lanemask_eq", "%ntid.x", "%nctaid.x")
    for special in names:
        yield case(f"mov {special}", f"mov.u32 %d, {special};", grid=2, count=2 * THREADS)


def divergence() -> Iterator[Case]:
    code = """
        mov.u32 %d, 0;
        and.b32 %b, %a, 31;
    LOOP:
        setp.ge.u32 %p, %d, %b;
        @%p bra DONE;
        add.u32 %d, %d, 1;
        mad.lo.u32 %a, %a, 1664525, 1013904223;
        bra LOOP;
    DONE:
        bar.warp.sync -1;
        shfl.sync.bfly.b32 %c, %a, 5, 31, -1;
        xor.b32 %d, %d, %c;
    """
    yield case("loop of differing length", code, words("divergent loop"))
    code = """
        and.b32 %b, %a, 3;
        setp.eq.u32 %p, %b, 0;
        @%p bra FIRST;
        setp.eq.u32 %p, %b, 1;
        @%p bra SECOND;
        xor.b32 %d, %a, 0xffff;
        bra JOIN;
    FIRST:
        add.u32 %d, %a, 1000;
        bra JOIN;
    SECOND:
        mul.lo.u32 %d, %a, 3;
    JOIN:
        shfl.sync.down.b32 %c, %d, 1, 31, -1;
        add.u32 %d, %d, %c;
    """
    yield case("nested branches", code, words("nested branches"))
    code = """
    ts: .branchtargets L0, L1, L2, L3;
        and.b32 %b, %a, 3;
        brx.idx %b, ts;
    L0: mov.u32 %d, 17; bra JOIN;
    L1: not.b32 %d, %a; bra JOIN;
    L2: shl.b32 %d, %a, 3;
    L3: mad.lo.u32 %d, %a, 5, %b;
    JOIN:
    """
    yield case("brx.idx", code, words("brx"))


def atomics() -> Iterator[Case]:
    for space in ("global", "shared"):
        for name, kinds in (
            ("add", ("u32", "s32")),
            ("min", ("u32", "s32")),
            ("max", ("u32", "s32")),
            ("and", ("b32",)),
            ("or", ("b32",)),
            ("xor", ("b32",)),
            ("inc", ("u32",)),
            ("dec", ("u32",)),
        ):
            for kind in kinds:
                yield reduction(space, f"{name}.{kind}")
    # Sums of small integers do not depend on their order.
    for kind in ("f32", "f16x2", "bf16x2"):
        for space in ("global", "shared"):
            operation = f"add.{'' if kind == 'f32' else 'noftz.'}{kind}"
            yield reduction(space, operation, kind)
    code = """
        add.s64 %at, %array2, %offset4;
        st.global.b32 [%at], %b;
        atom.global.cas.b32 %c, [%at], %b, %a;
        atom.global.exch.b32 %d, [%at], %thread;
        xor.b32 %d, %d, %c;
    """
    yield case("atom.cas and exch", code, words("cas a"), words("cas b"))


def reduction(space: str, operation: str, kind: str = "") -> Case:
    """All threads update 8 words."""
    name = f"red.{space}.{operation}"
    if kind == "f32":
        values = generator(name).integers(-50, 50, THREADS).astype(np.float32).view(np.uint32)
    elif kind:
        dtype = np.float16 if kind == "f16x2" else ml_dtypes.bfloat16
        # Partial sums stay below the largest integer that bfloat16 has exactly.
        values = generator(name).integers(-3, 4, 2 * THREADS).astype(dtype).view(np.uint32)
    elif operation[:3] in ("inc", "dec"):
        # With one limit for all, the order of the threads does not matter.
        values = np.full(THREADS, 13, np.uint32)
    else:
        values = words(name)
    if space == "global":
        code = f"""
            and.b32 %b, %thread, 7;
            mul.wide.u32 %at, %b, 4;
            add.s64 %at, %at, %array1;
            red.global.{operation} [%at], %a;
        """
        return case(name, code, values, count=8, store=False, start=True)
    code = f"""
        .reg .b32 %place;
        and.b32 %b, %thread, 7;
        shl.b32 %place, %b, 2;
        mov.u32 %c, dynamic;
        add.u32 %place, %place, %c;
        setp.lt.u32 %p, %thread, 8;
        @%p st.shared.b32 [%place], 0;
        bar.sync 0;
        red.shared.{operation} [%place], %a;
        bar.sync 0;
        ld.shared.b32 %d, [%place];
    """
    return case(name, code, values, shared=64)


def shared_memory() -> Iterator[Case]:
    code = """
        .reg .b32 %place, %w, %x, %y, %z;
        mov.u32 %c, dynamic;
        shl.b32 %place, %thread, 2;
        add.u32 %place, %place, %c;
        st.shared.b32 [%place], %a;
        bar.sync 0;
        and.b32 %b, %thread, 31;
        shl.b32 %b, %b, 4;
        add.u32 %b, %b, %c;
        ld.shared.v4.b32 {%w, %x, %y, %z}, [%b];
        mad.lo.u32 %d, %w, 3, %x;
        mad.lo.u32 %d, %d, 5, %y;
        mad.lo.u32 %d, %d, 7, %z;
    """
    yield case("shared vectors", code, words("shared vectors"), shared=512)
    code = """
        .reg .b32 %place, %from; .reg .b16 %half; .reg .b64 %source;
        mov.u32 %c, dynamic;
        shl.b32 %place, %thread, 4;
        add.u32 %place, %place, %c;
        mul.wide.u32 %source, %thread, 16;
        add.s64 %source, %source, %array0;
        and.b32 %b, %thread, 15;
        cp.async.ca.shared.global [%place], [%source], 16, %b;
        cp.async.commit_group;
        cp.async.wait_group 0;
        bar.sync 0;
        xor.b32 %from, %place, 48;
        ld.shared.b32 %d, [%from+8];
        ld.shared.u8 %half, [%from+5];
        cvt.u32.u16 %b, %half;
        add.u32 %d, %d, %b;
    """
    data = integers("cp.async", np.uint64, 2 * THREADS)
    yield case("cp.async", code, data, shared=2048)
    code = """
        setp.lt.s32 %p, %a, 0;
        barrier.cta.red.popc.aligned.u32 %d, 0, %p;
        barrier.cta.red.and.aligned.pred %q, 0, %p;
        @%q add.u32 %d, %d, 1000;
    """
    yield case("barrier.red", code, words("barrier.red"))


def matrices() -> Iterator[Case]:
    address = """
        .reg .b32 %place, %w, %x, %y, %z;
        mov.u32 %c, dynamic;
        shl.b32 %place, %thread, 4;
        add.u32 %place, %place, %c;
        mov.u32 %b, %laneid;
    """
    for trans in ("", ".trans"):
        code = (
            address
            + f"""
            mad.lo.u32 %x, %a, 3, 1; mad.lo.u32 %y, %a, 5, 2; mad.lo.u32 %z, %a, 7, 3;
            st.shared.v4.b32 [%place], {{%a, %x, %y, %z}};
            bar.sync 0;
            ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%w, %x, %y, %z}}, [%place];
            mad.lo.u32 %d, %w, 3, %x; mad.lo.u32 %d, %d, 5, %y; mad.lo.u32 %d, %d, 7, %z;
        """
        )
        yield case(f"ldmatrix.x4{trans}", code, words(f"ldmatrix{trans}"), shared=2048)
        code = (
            address
            + f"""
            mad.lo.u32 %x, %a, 3, 1; mad.lo.u32 %y, %a, 5, 2; mad.lo.u32 %z, %a, 7, 3;
            stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%place], {{%a, %x, %y, %z}};
            bar.sync 0;
            ld.shared.v4.b32 {{%w, %x, %y, %z}}, [%place];
            mad.lo.u32 %d, %w, 3, %x; mad.lo.u32 %d, %d, 5, %y; mad.lo.u32 %d, %d, 7, %z;
        """
        )
        yield case(f"stmatrix.x4{trans}", code, words(f"stmatrix{trans}"), shared=2048)
    code = "movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;"
    yield case("movmatrix", code, words("movmatrix"))
