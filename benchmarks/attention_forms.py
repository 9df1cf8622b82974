"""Attention of the forms that models have beside plain self-attention, drawn by a seed.

Decoding with few and many keys, groups and head sizes of many kinds, a few queries at a time,
pages, caches of 8 bits and windows; cross attention with few queries or few keys; short sequences
of vision; many short documents; masks of blocks; ALiBi, a dense bias and its gradient; dropout;
values of another size than keys; calls under ``jax.vmap``. ``pallasite.ops`` without a
configuration is compared with cuDNN (``jax.nn.dot_product_attention``), PyTorch's
``scaled_dot_product_attention`` by each of its implementations, and XLA, whichever take the form.
Where pages or sliding windows would keep a rival from it, it gets keys and values that were
gathered or cut before the clock starts. Results and gradients for the last head of keys are
compared with those in float32, with dropout for the weights that ours keeps.

    python benchmarks/attention_forms.py --seed 1 --count 60 --json attention_forms.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import attention_shapes
import harness
import jax
import jax.numpy as jnp
import numpy as np
import side_by_side
import timing

from pallasite import ops

DECODING = ("decode", "tokens", "paged", "narrow")
KINDS = (
    *DECODING,
    "decode_window",
    "cross",
    "vision",
    "documents",
    "alibi",
    "bias",
    "dropout",
    "mla",
    "vmap",
    "blocks",
)
HEADS = (64, 64, 80, 96, 112, 128, 128, 128, 192, 256)
MOST_CACHE = 1 << 27
"""Elements of the keys."""
MOST_SCORES, MOST_FLOPS = 1 << 27, 4e11
XLA_SCORES = 1 << 29
"""Scores beyond which XLA is no rival, and takes too much memory."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One problem.

    Attributes:
      kind: one of :data:`KINDS`.
      lengths: whether sequences have different numbers of keys.
      page_size: rows of a page, or 0.
      window: keys before its own position that a query sees, or None.
      documents: sequences that are packed into each, or 0.
      bias: ``"alibi"``, ``"one"`` (the same for each batch), ``"each"``, or ``""``.
      dropout: the fraction that is dropped.
      seen: the fraction of blocks of 128 queries and keys that are seen, or 0 without such a mask.
    """

    kind: str
    batch: int
    q_len: int
    kv_len: int
    kv_heads: int
    group: int
    head_dim: int
    v_dim: int
    causal: bool = False
    lengths: bool = False
    page_size: int = 0
    window: int | None = None
    documents: int = 0
    bias: str = ""
    dropout: float = 0.0
    seen: float = 0.0
    dtype: str = "bfloat16"

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.kv_heads * self.group

    @property
    def decoding(self) -> bool:
        """Whether it is an operation on a cache."""
        return self.kind in DECODING

    @property
    def scores(self) -> int:
        """How many there are, without masks."""
        return self.batch * self.heads * self.q_len * self.kv_len

    def fits(self) -> bool:
        """Whether it is small enough to be measured."""
        group = self.q_len * self.kv_len * self.group
        cache = self.batch * self.kv_len * self.kv_heads * max(self.head_dim, self.v_dim)
        queries = self.batch * self.q_len * self.heads * max(self.head_dim, self.v_dim)
        biases = self.scores // (self.batch if self.bias == "one" else 1) * bool(self.bias)
        return (
            max(cache, queries) <= MOST_CACHE
            and max(group, biases) <= MOST_SCORES
            and self.scores * 4 * self.head_dim <= MOST_FLOPS
            and self.heads <= 128
        )


def draw(seed: int, count: int, kinds: tuple[str, ...] = KINDS) -> list[Form]:
    """Forms of a seed, of one kind after the other; each depends on its number alone."""
    found = []
    for number in range(count):
        dice = random.Random(f"forms/{seed}/{number}")
        kind = kinds[number % len(kinds)]
        while not (form := _drawn(kind, dice)).fits():
            pass
        found.append(form)
    return found


def _log(dice: random.Random, low: float, high: float) -> int:
    return round(2 ** dice.uniform(math.log2(low), math.log2(high)))


def _drawn(kind: str, dice: random.Random) -> Form:
    head_dim, kv_heads = dice.choice(HEADS), dice.choice((1, 2, 4, 8, 16))
    group = dice.choice((1, 3, 4, 5, 7, 8, 16))
    dtype = dice.choice(("bfloat16", "bfloat16", "float16"))
    make = functools.partial(Form, kind, dtype=dtype)
    if kind in DECODING or kind == "decode_window":
        tokens = dice.choice((2, 3, 4, 5, 8, 12, 16)) if kind == "tokens" else 1
        batch, keys = _log(dice, 1, 256), _log(dice, 128, 131072)
        page = dice.choice((16, 32, 64, 128)) if kind == "paged" else 0
        keys = -(-keys // max(page, 8)) * max(page, 8)
        window = dice.choice((128, 512, 1024, 4096)) if kind == "decode_window" else None
        lengths = page > 0 or (window is None and dice.random() < 0.5)
        return make(
            batch, tokens, keys, kv_heads, group, head_dim, head_dim,
            causal=tokens > 1 or window is not None, lengths=lengths, page_size=page, window=window,
        )  # fmt: skip
    small = dice.choice((1, 1, 2, 4, 8))
    if kind == "cross":
        queries, keys = _log(dice, 16, 8192), dice.choice((77, 197, 257, 577))
        if dice.random() < 0.5:
            queries, keys = _log(dice, 4, 512), _log(dice, 1024, 65536)
        batch = dice.choice((1, 1, 2, 4, 16, 64))
        return make(batch, queries, keys, kv_heads, small, head_dim, head_dim)
    if kind in ("vision", "vmap"):
        length = dice.choice((49, 64, 77, 144, 196, 197, 256, 257, 576, 577, 1024, 1025))
        heads, size = dice.choice((3, 4, 6, 8, 12, 16, 24)), dice.choice((32, 64, 64, 72, 80, 88))
        batch = max(1, _log(dice, 256, 1 << 18) // length)
        return make(batch, length, length, heads, 1, size, size)
    length = _log(dice, 256, 8192)
    batch = max(1, _log(dice, 256, 1 << 15) // length)
    made = functools.partial(make, batch, length, length, kv_heads, small, head_dim)
    if kind == "documents":
        length = _log(dice, 2048, 32768)
        documents = max(2, length // _log(dice, 24, 1024))
        return make(
            1, length, length, kv_heads, small, head_dim, head_dim, causal=dice.random() < 0.5,
            documents=documents,
        )  # fmt: skip
    if kind == "blocks":
        return made(head_dim, causal=dice.random() < 0.5, seen=dice.choice((0.1, 0.25, 0.5)))
    if kind == "bias":
        return made(head_dim, bias=dice.choice(("one", "each")))
    if kind == "mla":
        size, v_dim = dice.choice(((192, 128), (96, 64), (128, 64)))
        return make(batch, length, length, kv_heads, 1, size, v_dim, causal=True)
    options = {"bias": "alibi"} if kind == "alibi" else {"dropout": 0.1}
    return made(head_dim, causal=kind == "alibi" or dice.random() < 0.5, **options)


# The operands -------------------------------------------------------------------------------------


def shapes(form: Form) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Of the arrays that are drawn."""
    dtype = jnp.dtype(form.dtype)
    kv = (form.batch, form.kv_len, form.kv_heads)
    found = {
        "q": ((form.batch, form.q_len, form.heads, form.head_dim), dtype),
        "k": ((*kv, form.head_dim), dtype),
        "v": ((*kv, form.v_dim), dtype),
        "d": ((form.batch, form.q_len, form.heads, form.v_dim), dtype),
    }
    if form.bias in ("one", "each"):
        batch = form.batch if form.bias == "each" else 1
        found["bias"] = ((batch, form.heads, form.q_len, form.kv_len), dtype)
    return found


def host_arrays(form: Form) -> dict[str, Any]:
    """Lengths, the page table, numbers of documents, slopes."""
    generator = np.random.default_rng(form.kv_len)
    found: dict[str, Any] = {}
    if form.lengths:
        low = max(form.q_len, form.kv_len // 2)
        lengths = generator.integers(low, form.kv_len + 1, form.batch)
        lengths[0] = form.kv_len
        found["lengths"] = lengths.astype(np.int32)
    if form.page_size:
        count = form.batch * form.kv_len // form.page_size
        table = generator.permutation(count).reshape(form.batch, -1)
        found["pages"] = table.astype(np.int32)
    if form.documents:
        ends = generator.choice(np.arange(1, form.kv_len), form.documents - 1, replace=False)
        numbers = np.searchsorted(np.sort(ends), np.arange(form.kv_len), side="right")
        found["segments"] = numbers.astype(np.int32)[None]
    if form.seen:
        blocks = -(-form.q_len // 128), -(-form.kv_len // 128)
        mask = generator.random((1, 1, *blocks)) < form.seen
        found["blocks"] = mask | np.eye(*blocks, dtype=bool)
    if form.bias == "alibi":
        found["slopes"] = (0.5 ** (1 + np.arange(form.heads) % 8)).astype(np.float32)
    return {name: jnp.asarray(one) for name, one in found.items()}


def drawn(form: Form, key: jax.Array) -> dict[str, jax.Array]:
    """Random arrays."""
    wanted = shapes(form)
    keys = jax.random.split(key, len(wanted))
    return {
        name: jax.random.normal(one, *given)
        for one, (name, given) in zip(keys, wanted.items(), strict=True)
    }


def as_pages(form: Form, array: Any, table: Any) -> Any:
    """A cache (kv_heads, pages, page_size, head_dim) that holds the rows of an array."""
    rows = array.reshape(-1, form.page_size, form.kv_heads, array.shape[3])
    paged = jnp.zeros_like(rows).at[table.reshape(-1)].set(rows)
    return jnp.transpose(paged, (2, 0, 1, 3))


def prepared(form: Form, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays as our operation takes them."""
    found = dict(arrays)
    if form.page_size:
        found |= {name: as_pages(form, arrays[name], arrays["pages"]) for name in "kv"}
    if form.kind == "narrow":
        found |= {name: arrays[name].astype(jnp.float8_e4m3fn) for name in "kv"}
    return found


# The contenders: functions of arrays and the operands that gradients are taken of -----------------

NAMES = ("q", "k", "v", "bias")
SEED = 7
"""Of dropout."""


def ours(form: Form) -> Callable[..., Any]:
    """Our operation."""

    def call(rest: dict[str, Any], q: Any, k: Any, v: Any, *bias: Any) -> Any:
        if form.decoding:
            queries = q if form.q_len > 1 else q[:, 0]
            lengths = rest.get("lengths")
            if form.page_size:
                out = ops.paged_attention(queries, k, v, lengths, rest["pages"])
            else:
                scale = {"k_scale": 1.0, "v_scale": 1.0} if form.kind == "narrow" else {}
                out = ops.decode_attention(queries, k, v, kv_lengths=lengths, **scale)
            return out.reshape(q.shape)
        options: dict[str, Any] = {"causal": form.causal}
        if form.window is not None:
            options["window"] = (form.window, None)
        if bias:
            options["bias"] = bias[0]
        if form.bias == "alibi":
            options["alibi_slopes"] = rest["slopes"]
        if form.documents:
            options |= {"q_segments": rest["segments"], "kv_segments": rest["segments"]}
        if form.seen:
            options["block_mask"] = rest["blocks"]
        if form.dropout:
            options |= {"dropout_rate": form.dropout, "dropout_seed": SEED}
        if form.kind == "vmap":
            one = functools.partial(ops.attention, **options)
            return jax.vmap(lambda *given: one(*(x[None] for x in given))[0])(q, k, v)
        return ops.attention(q, k, v, **options)

    return call


def cut(form: Form, rest: dict[str, Any], k: Any, v: Any) -> tuple[Any, Any]:
    """Keys and values that a window leaves."""
    if form.window is None:
        return k, v
    return k[:, -(form.window + 1) :], v[:, -(form.window + 1) :]


def added(form: Form, rest: dict[str, Any], bias: Any, dtype: Any) -> Any:
    """What is added to scores for a rival that has no such option: (batch, heads, q, kv)."""
    own = jnp.arange(form.q_len)[:, None] + (form.kv_len - form.q_len)
    keys = jnp.arange(form.kv_len)
    if form.bias == "alibi":
        distance = jnp.abs(own - keys).astype(jnp.float32)
        return (-rest["slopes"][:, None, None] * distance).astype(dtype)[None]
    if form.q_len > 1 and form.decoding and form.lengths:
        own = rest["lengths"][:, None, None, None] - form.q_len + jnp.arange(form.q_len)[:, None]
    if form.q_len > 1 and form.decoding:
        shape = (form.batch if form.lengths else 1, 1, form.q_len, form.kv_len)
        return jnp.broadcast_to(jnp.where(keys <= own, 0.0, -jnp.inf), shape).astype(dtype)
    return bias


def cudnn(form: Form) -> Callable[..., Any]:
    """cuDNN's attention by JAX."""

    def call(rest: dict[str, Any], q: Any, k: Any, v: Any, *bias: Any) -> Any:
        if form.documents or form.dropout or form.seen or form.kind == "narrow":
            raise NotImplementedError
        options: dict[str, Any] = {"is_causal": form.causal and form.q_len == form.kv_len}
        if form.lengths and form.q_len == 1:
            options["key_value_seq_lengths"] = rest["lengths"]
        given = rest.get("added", bias[0] if bias else None)
        return jax.nn.dot_product_attention(q, k, v, bias=given, implementation="cudnn", **options)

    return call


def composed(form: Form, precision: Any = None) -> Callable[..., Any]:
    """Products and softmax of XLA."""

    def call(rest: dict[str, Any], q: Any, k: Any, v: Any, *bias: Any) -> Any:
        batch, q_len, heads, size = q.shape
        kv_len, kv_heads = k.shape[1:3]
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        grouped = q.reshape(batch, q_len, kv_heads, heads // kv_heads, size)
        dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
        scores = dot("bqhgd,bkhd->bhgqk", grouped, k) * size**-0.5
        if bias:
            shape = (bias[0].shape[0], kv_heads, -1, q_len, kv_len)
            scores = scores + bias[0].astype(jnp.float32).reshape(shape)
        lengths = rest.get("lengths", jnp.full((batch,), kv_len, jnp.int32))
        keys = jnp.arange(kv_len)
        own = lengths[:, None, None] - q_len + jnp.arange(q_len)[:, None]
        shown = keys < lengths[:, None, None]
        if form.causal:
            shown = shown & (keys <= own)
        if form.window is not None:
            shown = shown & (keys >= own - form.window)
        if form.documents:
            shown = shown & (rest["segments"][:, :, None] == rest["segments"][:, None])
        if form.seen:
            mask = jnp.repeat(jnp.repeat(rest["blocks"][0], 128, 1), 128, 2)
            shown = shown & mask[:, :q_len, :kv_len]
        if form.bias == "alibi":
            slopes = rest["slopes"].reshape(1, kv_heads, -1, 1, 1)
            scores = scores - slopes * jnp.abs(own - keys)[:, None, None].astype(jnp.float32)
        scores = jnp.where(shown[:, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        if form.dropout:
            drawn = jax.random.key(7, impl="rbg")
            keep = (
                rest["kept"].reshape(scores.shape)
                if "kept" in rest
                else jax.random.bernoulli(drawn, 1 - form.dropout, scores.shape)
            )
            weights = jnp.where(keep, weights / (1 - form.dropout), 0)
        out = dot("bhgqk,bkhd->bqhgd", weights.astype(q.dtype), v)
        return out.astype(q.dtype).reshape(batch, q_len, heads, v.shape[3])

    return call


TORCH = ("flash", "cudnn", "efficient")


def torch_call(
    form: Form, backend: str, arrays: dict[str, Any], backward: bool
) -> Callable[[], Any]:
    """A call of PyTorch's attention by one of its implementations."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if form.kind == "narrow" or form.seen or (form.lengths and form.q_len == 1):
        raise NotImplementedError
    if form.documents:
        if backend != "flash":
            raise NotImplementedError
        ends = np.flatnonzero(np.diff(np.asarray(arrays["segments"][0]), append=-1)) + 1
        case = attention_shapes.Case(
            1, form.q_len, form.heads, form.kv_heads, form.head_dim, form.causal, None,
            tuple(ends.tolist()),
        )  # fmt: skip
        given = tuple(arrays[name] for name in "qkvd")
        return attention_shapes.torch_call(case, given, backward)
    chosen = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }[backend]
    names = [name for name in NAMES if name in arrays]
    wanted = form.kind == "bias"
    tensors = {name: torch.from_dlpack(arrays[name]).detach() for name in [*names, "d"]}
    for name in names:
        tensors[name].requires_grad_(backward)
    mask = tensors.get("bias")
    if "added" in arrays:
        mask = torch.from_dlpack(arrays["added"])
    heads = {name: tensors[name].transpose(1, 2) for name in "qkv"}
    grouped = form.q_len == 1 and form.group > 1
    if grouped:  # Heads that share keys are queries.
        heads["q"] = heads["q"].reshape(form.batch, form.kv_heads, form.group, form.head_dim)
    causal = form.causal and form.q_len == form.kv_len and mask is None
    if mask is not None and form.causal and form.bias == "alibi":
        raise NotImplementedError
    if mask is not None:
        mask = mask.expand(form.batch, heads["q"].shape[1], *mask.shape[2:])
    share = {"enable_gqa": True} if form.group > 1 and not grouped else {}

    def call() -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(sdpa_kernel(chosen))
            if not backward:
                stack.enter_context(torch.no_grad())
            out = torch.nn.functional.scaled_dot_product_attention(
                heads["q"], heads["k"], heads["v"], mask, form.dropout, causal, **share
            )
            if not backward:
                return out
            leaves = [tensors[n] for n in names if n != "bias" or wanted]
            return torch.autograd.grad(out, leaves, tensors["d"].transpose(1, 2))

    return call


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays, the cotangent and the operands: the result, and the gradients."""

    def call(rest: dict[str, Any], d: Any, *operands: Any) -> Any:
        out, pull_back = jax.vjp(functools.partial(function, rest), *operands)
        return (out, *pull_back(d))

    return call


# Results ------------------------------------------------------------------------------------------

ROWS = 256
"""Queries whose results are compared."""


def errors(form: Form, backward: bool, arrays: dict[str, Any], results: Any) -> Any:
    """Relative errors of the result and gradients for the first batch and the last head of keys: an
    array."""
    head, group = form.kv_heads - 1, form.group
    own = slice(head * group, (head + 1) * group)
    part = {name: arrays[name][:1, :, own] for name in "qd"}
    part |= {name: arrays[name][:1, :, head : head + 1] for name in "kv"}
    rest = {name: arrays[name][:1] for name in ("lengths", "segments") if name in arrays}
    if "blocks" in arrays:
        rest["blocks"] = arrays["blocks"]
    if "slopes" in arrays:
        rest["slopes"] = arrays["slopes"][own]
    if form.kind == "narrow":
        part |= {n: part[n].astype(jnp.float8_e4m3fn).astype(jnp.float32) for n in "kv"}
    if form.dropout:
        shape = (1, form.heads, form.q_len, form.kv_len)
        rest["kept"] = ops.attention_dropout_mask(SEED, shape, form.dropout)[:, own]
    bias = [arrays["bias"][:1, own].astype(jnp.float32)] if "bias" in arrays else []
    part = {name: one.astype(jnp.float32) for name, one in part.items()}
    exact = composed(form, precision="highest")
    operands = [part["q"], part["k"], part["v"], *bias]
    found = [results[0][:1, :, own]]
    if backward:
        wanted = with_gradients(exact)(rest, part["d"], *operands)
        found += [results[1][:1, :, own]]
        found += [one[:1, :, head : head + 1] for one in results[2:4]]
        if bias and (form.bias == "each" or form.batch == 1):
            found += [results[4][:1, own]]
    else:
        wanted = [exact(rest, *operands)]
    differences = []
    for one, other in zip(found, wanted, strict=False):
        size = jnp.maximum(jnp.linalg.norm(other), 1e-3 * float(other.size) ** 0.5)
        differences.append(jnp.linalg.norm(one.astype(jnp.float32) - other) / size)
    return jnp.stack(differences)


# Measuring ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """One measurement; times in milliseconds."""

    form: dict[str, Any]
    backward: bool
    pallasite_ms: float
    rivals_ms: dict[str, float]
    relative_error: float
    kernels: list[tuple[str, float]]

    @property
    def ratio(self) -> float | None:
        """The fastest rival's time by ours."""
        return min(self.rivals_ms.values()) / self.pallasite_ms if self.rivals_ms else None


@dataclasses.dataclass(frozen=True)
class Task:
    """A form of a seed, and how it is measured."""

    number: int
    form: Form
    backward: bool
    repeats: int


def prepare(task: Task) -> Callable[[], Row]:
    """Compiles everything; what it returns measures."""
    form, backward = task.form, task.backward and not task.form.decoding
    attention_shapes.start_torch()
    key = jax.random.key(task.number)
    rest = host_arrays(form)
    make = jax.jit(functools.partial(drawn, form)).lower(key).compile()
    given = {name: jax.ShapeDtypeStruct(*one) for name, one in shapes(form).items()}
    for_us = jax.eval_shape(functools.partial(prepared, form), given | rest)
    for_rivals = dict(given | rest)
    for_rivals["k"], for_rivals["v"] = jax.eval_shape(
        functools.partial(cut, form, rest), given["k"], given["v"]
    )
    extra = jax.eval_shape(
        lambda: added(form, rest, None, jnp.dtype(form.dtype))  # None where nothing is added.
    )
    if extra is not None:
        for_rivals["added"] = extra
    rival_form = dataclasses.replace(form, window=None, page_size=0)
    wrap = with_gradients if backward else lambda function: function

    def compiled(function: Callable[..., Any], arrays: dict[str, Any]) -> Any:
        return jax.jit(wrap(function)).lower(*_arguments(arrays, backward)).compile()

    arrange = jax.jit(functools.partial(prepared, form)).lower(given | rest).compile()
    program = compiled(ours(form), for_us)
    results = jax.eval_shape(wrap(ours(form)), *_arguments(for_us, backward))
    comparison = jax.jit(functools.partial(errors, form, backward), **timing.reference_options())
    compare = comparison.lower(given | rest, results if backward else [results]).compile()
    rivals = {}
    for name, function in (("cudnn", cudnn(rival_form)), ("xla", composed(rival_form))):
        if name == "xla" and form.scores > XLA_SCORES:
            continue
        with contextlib.suppress(Exception):  # There is no kernel for the form.
            rivals[name] = compiled(function, for_rivals)
    attention_shapes.timer()
    return functools.partial(measure, task, backward, make, arrange, program, compare, rivals)


def _arguments(arrays: dict[str, Any], backward: bool) -> list[Any]:
    """Of a compiled contender."""
    operands = [arrays[name] for name in NAMES if name in arrays]
    rest = {n: one for n, one in arrays.items() if n not in (*NAMES, "d")}
    return [rest, *([arrays["d"]] if backward else []), *operands]


def measure(
    task: Task,
    backward: bool,
    make: Any,
    arrange: Any,
    program: Any,
    compare: Any,
    rivals: dict[str, Any],
) -> Row:
    """One row, of compiled programs; what is compiled here, others wait for."""
    form = task.form
    arrays = {**make(jax.random.key(task.number)), **host_arrays(form)}
    own = arrange(arrays)
    results = program(*_arguments(own, backward))
    error = float(compare(arrays, results if backward else [results]).max())
    if not error < 2e-2:
        raise ValueError(f"wrong result, relative error {error}")
    del results
    theirs = dict(arrays)
    theirs["k"], theirs["v"] = cut(form, arrays, arrays["k"], arrays["v"])
    extra = added(form, arrays, None, jnp.dtype(form.dtype))
    if extra is not None:
        theirs["added"] = jnp.array(extra)
    jax_framework, torch_framework = timing.FRAMEWORKS["jax"], timing.FRAMEWORKS["torch"]
    calls: dict[str, Any] = {
        "ours": (jax_framework, functools.partial(program, *_arguments(own, backward)))
    }
    for name, rival in rivals.items():
        with contextlib.suppress(Exception):
            call = functools.partial(rival, *_arguments(theirs, backward))
            jax.block_until_ready(call())
            calls[name] = (jax_framework, call)
    rival_form = dataclasses.replace(form, window=None, page_size=0)
    for backend in TORCH:
        with contextlib.suppress(ImportError, RuntimeError, TypeError, NotImplementedError):
            call = torch_call(rival_form, backend, theirs, backward)
            torch_framework.wait(call())
            calls["torch_" + backend] = (torch_framework, call)
    kernels: dict[str, Any] = {}
    dice = random.Random(task.number)
    times = timing.interleaved(
        attention_shapes.timer(), calls, task.repeats, dice, kernels_of=kernels
    )
    calls.clear()
    with contextlib.suppress(ImportError, RuntimeError):
        attention_shapes.torch_memory().empty_cache()
    mine = times.pop("ours")
    return Row(dataclasses.asdict(form), backward, mine, times, error, kernels.get("ours", []))


def main() -> int:
    """Measures, prints lines and writes JSON; 1 if a form failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=60)
    side_by_side.hold_option(parser)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of forms")
    parser.add_argument("--backward", action="store_true", help="forward and gradients together")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"it needs a GPU, and JAX is on {jax.default_backend()!r}")
    print(harness.machine())
    tasks = [
        Task(number, form, arguments.backward, arguments.repeats)
        for number, form in enumerate(draw(arguments.seed, arguments.count, (*arguments.kinds,)))
        if arguments.only is None or number in arguments.only
    ]

    def name(task: Task) -> str:
        default = Form("", 0, 0, 0, 0, 0, 0, 0)
        given = dataclasses.asdict(task.form).items()
        return f"{task.number}: " + " ".join(
            f"{key}={one}" for key, one in given if one != getattr(default, key)
        )

    def show(task: Task, row: Row) -> str:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        rivals = " ".join(f"{key} {one:.4f}" for key, one in row.rivals_ms.items())
        return f"{name(task)}: {row.pallasite_ms:.4f} ms, {ratio} ({rivals})"

    outcomes = side_by_side.prepared(
        prepare, tasks, arguments.processes, arguments.seconds, arguments.hold
    )
    rows, failed = side_by_side.collected(outcomes, name, show)
    ratios = sorted(row.ratio for row in rows if row.ratio is not None)
    below = sum(one < 0.95 for one in ratios)
    print(f"geometric mean {harness.geometric_mean(ratios)} of {len(ratios)}, {below} below 0.95")
    harness.write_json(arguments.json, "attention_forms", rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
