"""Attention, forward and backward, against cuDNN, JAX's own kernels for Hopper, and PyTorch.

All contenders of a row are checked, tuned and timed in the same run; docs/benchmarks.md says how.

    python benchmarks/attention.py --json attention.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import contest
import contest_tables
import harness
import jax
import jax.numpy as jnp
import operands
import program
import rates
import timing
from contest import Candidate, Candidates, Contender, Row, RowResult
from jax import lax

import upstream

RIVALS = ("cudnn", "upstream", "torch")
TOKENS, HEADS = 16384, 16
LIMITS = {
    False: {"whole": 1.5e-2, "chunk": 4e-2},
    True: {"whole": 2.5e-2, "chunk": 8e-2},
}
"""Largest errors that are right, forward and backward: relative, in the Euclidean norm, of the
whole result and of any 128 positions of one head."""

CHUNK = 128

OUR_FORWARD_FIELDS: dict[str, Sequence[Any]] = {
    "block_kv": (64, 80, 96, 112, 128, 144, 160, 176, 192),
    "warpgroups": (2, 3),
    "stages": (2, 3),
    "ping_pong": (True, False),
    "persistent": (True, False),
    "cluster": (1, 2),
    "separate_out": (True, False),
    "polynomial": (0, 8),
}
OUR_BACKWARD_FIELDS: dict[str, Sequence[Any]] = {
    "block_q": (64, 80, 96, 112, 128),
    "warpgroups": (2, 3),
    "q_stages": (2, 3),
    "d_out_stages": (1, 2, 3),
    "ds_stages": (1, 2),
    "transposed_dq": (True, False),
    "ahead": ("nothing", "dk", "scores"),
    "values_first": (True, False),
    "stagger": (True, False),
}
"""What ``--tune`` tries for the fields of our configurations."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Attention of a number of heads to as many keys as there are queries, in bfloat16."""

    batch: int
    sequence: int
    heads: int
    head_dim: int
    causal: bool
    backward: bool

    @property
    def name(self) -> str:
        """Unique among the rows."""
        kind = "backward" if self.backward else "forward"
        causal = "_causal" if self.causal else ""
        return f"{kind}{causal}_s{self.sequence}_d{self.head_dim}"

    @property
    def group(self) -> str:
        """The group over which a mean is taken."""
        kind = "backward" if self.backward else "forward"
        return f"{kind} causal" if self.causal else kind

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the queries, keys, values and results."""
        return self.batch, self.sequence, self.heads, self.head_dim

    @property
    def flops(self) -> int:
        """Two products of each query with each key that it sees; five in the gradient."""
        forward = 4 * self.batch * self.heads * self.sequence**2 * self.head_dim
        forward = forward // 2 if self.causal else forward
        return forward * 5 // 2 if self.backward else forward

    @property
    def elements(self) -> int:
        """Of one array."""
        return self.batch * self.sequence * self.heads * self.head_dim


def make_row(problem: Problem) -> Row:
    """The row of a problem; the last input of a backward one is the gradient of the result."""

    def inputs(seed: int) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 4 if problem.backward else 3)
        return tuple(operands.normal(key, problem.shape, jnp.bfloat16) for key in keys)

    arrays = 8 if problem.backward else 4
    return Row(
        name=problem.name,
        group=problem.group,
        flops=problem.flops,
        bytes=arrays * problem.elements * 2,
        input_bytes=(arrays // 2 + (not problem.backward)) * problem.elements * 2,
        inputs=inputs,
        reference=functools.partial(_reference, problem),
        errors=errors,
        limits=LIMITS[problem.backward],
        metric="elapsed",  # gradients are summed up in memory that is filled with zeros before
    )


def _reference(problem: Problem, *inputs: jax.Array) -> Any:
    """The result, or the gradients with respect to queries, keys and values, in float32."""
    scale = problem.head_dim**-0.5
    dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)

    def one_head(arrays):
        q, k, v, *rest = (x.astype(jnp.float32) for x in arrays)
        logits = dot(q, k.T) * scale
        if problem.causal:
            position = jnp.arange(problem.sequence)
            logits = jnp.where(position[:, None] >= position[None, :], logits, -jnp.inf)
        p = jax.nn.softmax(logits, axis=-1)
        if not problem.backward:
            return dot(p, v)
        (do,) = rest
        dp = dot(do, v.T)
        ds = p * (dp - jnp.sum(p * dp, axis=-1, keepdims=True)) * scale
        return dot(ds, k), dot(ds.T, q), dot(p.T, do)

    def all_heads(*arrays):
        b, s, h, d = problem.shape
        heads = [x.transpose(0, 2, 1, 3).reshape(b * h, s, d) for x in arrays]
        results = lax.map(one_head, heads)
        return jax.tree.map(lambda x: x.reshape(b, h, s, d).transpose(0, 2, 1, 3), results)

    return jax.jit(all_heads, **timing.reference_options())(*inputs)


@jax.jit
def errors(results: Any, references: Any) -> dict[str, jax.Array]:
    """The errors of :data:`LIMITS`, of arrays (batch, sequence, heads, head_dim)."""
    whole, chunk = [], []
    results, references = jax.tree.leaves(results), jax.tree.leaves(references)
    for result, reference in zip(results, references, strict=True):
        if result.shape != reference.shape:
            raise contest.WrongResultError(f"the result is {result.dtype}{list(result.shape)}")
        b, s, h, d = reference.shape
        parts = (b, s // min(CHUNK, s), min(CHUNK, s), h, d)
        difference = (result.astype(jnp.float32) - reference).reshape(parts)
        square, wanted = (
            jnp.sum(x**2, axis=(2, 4)) for x in (difference, reference.reshape(parts))
        )
        whole.append(jnp.sqrt(jnp.sum(square) / jnp.sum(wanted)))
        chunk.append(jnp.max(jnp.sqrt(square / wanted)))
    return {"whole": jnp.max(jnp.stack(whole)), "chunk": jnp.max(jnp.stack(chunk))}


def contenders(problem: Problem, arguments: argparse.Namespace) -> list[Contender]:
    """All contenders of a row."""
    search = arguments.upstream_configs
    theirs = (
        upstream.attention_gradient_candidates
        if problem.backward
        else upstream.attention_candidates
    )
    result = [
        Contender("ours", "jax", lambda: ours(problem, arguments)),
        Contender(
            "cudnn", "jax", lambda: operands.only(candidate(problem, "cuDNN", cudnn(problem)))
        ),
        Contender(
            "upstream",
            "jax",
            lambda: theirs(problem.sequence, problem.head_dim, problem.causal, search),
        ),
        Contender("torch", "torch", lambda: torch_candidates(problem)),
    ]
    return operands.able(result)


def candidate(problem: Problem, label: str, function: Callable[..., Any]) -> Candidate:
    """A function of JAX arrays q, k and v: it, or what its gradient does after the forward pass.

    The latter gets what the forward pass saved, so only the backward pass is timed.
    """
    if not problem.backward:
        return Candidate(label, jax.jit(function))
    forward = jax.jit(lambda q, k, v: jax.vjp(function, q, k, v))

    def prepare(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        _, pull = forward(q, k, v)
        return pull, do

    return Candidate(label, jax.jit(lambda pull, do: pull(do)), prepare)


def cudnn(problem: Problem) -> Callable[..., Any]:
    """cuDNN's attention through JAX."""
    return functools.partial(
        jax.nn.dot_product_attention, is_causal=problem.causal, implementation="cudnn"
    )


def our_attention(problem: Problem, config: Any) -> Callable[..., Any]:
    """Our attention."""
    options = {} if config is None else {"config": config}
    return functools.partial(program.our_operation("attention"), causal=problem.causal, **options)


def ours(problem: Problem, arguments: argparse.Namespace) -> Candidates:
    """Our kernels."""
    if arguments.tune or arguments.config:
        yield from our_tuned_candidates(problem, arguments)
    else:
        yield candidate(problem, "default", our_attention(problem, None))


def our_tuned_candidates(problem: Problem, arguments: argparse.Namespace) -> Candidates:
    """Our kernels with other configurations: one field after the other is changed."""
    from pallasite_hopper.ops.flash import (
        backward,
        backward_choice,
        backward_config,
        forward_choice,
    )

    if not problem.backward:
        forward_default = forward_choice.default_config(
            problem.head_dim, problem.causal, problem.sequence
        )
        steps = [lambda best: program.variants(best, **OUR_FORWARD_FIELDS)] * 2
        return program.our_candidates(
            lambda label, config: candidate(problem, label, our_attention(problem, config)),
            [forward_default],
            arguments,
            *steps,
        )

    scale = problem.head_dim**-0.5
    attend = program.our_operation("attention_forward")
    forward = jax.jit(functools.partial(attend, causal=problem.causal))

    def make(label: str, config: Any) -> Candidate:
        function = functools.partial(
            backward.attention_backward, causal=problem.causal, scale=scale, config=config
        )
        return Candidate(
            label, jax.jit(function), lambda q, k, v, do: (q, k, v, *forward(q, k, v), do)
        )

    b, s, h, d = problem.shape
    described = backward_config.BackwardProblem(
        b, h, h, s, s, d, jnp.dtype(jnp.bfloat16), problem.causal, scale, None, False
    )
    backward_default = backward_choice.default_config(described)
    steps = [lambda best: program.variants(best, **OUR_BACKWARD_FIELDS)] * 2
    return program.our_candidates(make, [backward_default], arguments, *steps)


def torch_candidates(problem: Problem) -> Candidates:
    """PyTorch's attention with each of its fused implementations."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def heads_first(*arrays: jax.Array) -> list[Any]:
        tensors = [torch.from_dlpack(jax.block_until_ready(x)) for x in arrays]
        return [t.transpose(1, 2) for t in tensors]

    def attend(backend: Any, q: Any, k: Any, v: Any) -> Any:
        chosen = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
        with chosen:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal
            )

    def forward(backend: Any) -> Callable[..., Any]:
        def call(q: Any, k: Any, v: Any) -> Any:
            with torch.no_grad():
                return attend(backend, q, k, v)

        return call

    def saved(backend: Any) -> Callable[..., tuple[Any, ...]]:
        def prepare(*arrays: jax.Array) -> tuple[Any, ...]:
            *inputs, do = heads_first(*arrays)
            inputs = [t.detach().requires_grad_() for t in inputs]
            return attend(backend, *inputs), tuple(inputs), do

        return prepare

    def gradient(out: Any, inputs: Any, do: Any) -> Any:
        return torch.autograd.grad(out, inputs, do, retain_graph=True)

    def output(results: Any) -> Any:
        results = results if isinstance(results, tuple) else (results,)
        arrays = [jnp.from_dlpack(t.detach().transpose(1, 2).contiguous()) for t in results]
        return jax.block_until_ready(arrays if problem.backward else arrays[0])

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    if not torch.cuda.is_available():
        backends = {"any": None}
    for name, backend in backends.items():
        if problem.backward:
            yield Candidate(name, gradient, saved(backend), output)
        else:
            yield Candidate(name, forward(backend), lambda *a: tuple(heads_first(*a)), output)


COMPILED = {
    "forward d128": (128, False, False),
    "forward causal d128": (128, True, False),
    "forward and backward d128": (128, False, True),
}
"""The kernels whose compilation is timed: head dimension, whether causal, whether backward."""


def kernels(
    arguments: argparse.Namespace, kinds: dict[str, tuple[int, bool, bool]]
) -> dict[str, Any]:
    """Kernels whose compilation is timed, as in :data:`COMPILED`.

    Every repetition has another sequence.
    """
    longest, step = (512, 128) if arguments.rehearse else (4096, 512)

    def kernel(name: str, head_dim: int, causal: bool, backward: bool) -> Any:
        def problem(repetition: int) -> Problem:
            sequence = longest - step * (repetition % (longest // step - 1) + 1)
            return Problem(1, sequence, 2, head_dim, causal, backward)

        def whole(function: Callable[..., Any]) -> Callable[..., Any]:
            if not backward:
                return function

            def forward_and_backward(q, k, v, do):
                _, pull = jax.vjp(function, q, k, v)
                return pull(do)

            return forward_and_backward

        def ours(repetition: int) -> Any:
            this = problem(repetition)
            return whole(our_attention(this, None)), make_row(this).inputs(repetition)

        def theirs(repetition: int) -> Any:
            config = upstream.attention_configs(head_dim, causal, backward, "one")[0]
            args = make_row(problem(repetition)).inputs(repetition)
            return whole(upstream.attention(config)), upstream.as_float16(*args, scale=1.0)

        return program.compilers(name, arguments, ours=ours, upstream=theirs)

    return {name: kernel(name, *kind) for name, kind in kinds.items()}


def print_table(rows: list[RowResult], facts: dict[str, Any]) -> dict[str, Any]:
    """Prints the table; returns shares of the matrix rate and geometric means."""
    names = ("ours", *RIVALS)
    lines, shares = [], {}
    peak = facts.get("matrix_rate")
    for row in rows:
        taken, rate = row.milliseconds("ours"), row.rate("ours")
        microseconds = "-" if taken is None else f"{taken * 1e3:.1f}"
        shares[row.name] = rate / peak if rate and peak else None
        cells = [microseconds, *contest_tables.rates(row, names)]
        cells.append(contest_tables.percent(shares[row.name]))
        lines.append((row.name, *cells, contest_tables.ratio_text(row.ratio())))
    print("TFLOP/s; upstream in float16, the others in bfloat16")
    harness.print_table(("row", "ours us", *names, "ours of peak", "ours / best rival"), lines)
    means = contest_tables.group_means(rows)
    if peak:
        print(f"\npeak: {peak / 1e12:.1f} TFLOP/s (a matrix product of 8192 x 8192 x 16384 by XLA)")
    print("ours / best rival, geometric means: ", end="")
    print(", ".join(f"{group} {contest_tables.ratio_text(mean)}" for group, mean in means.items()))
    return {"ours_of_peak": shares, "geometric_means": means}


def problems(rehearse: bool) -> Iterable[Problem]:
    """All rows, by direction, mask, sequence and head dimension."""
    tokens, heads = (256, 2) if rehearse else (TOKENS, HEADS)
    for backward in (False, True):
        for causal in (False, True):
            for sequence in (128, 256) if rehearse else (4096, 16384):
                for head_dim in (64, 128):
                    yield Problem(tokens // sequence, sequence, heads, head_dim, causal, backward)


def benchmark(arguments: argparse.Namespace) -> program.Benchmark:
    """What this program measures."""
    listed = {problem.name: problem for problem in problems(arguments.rehearse)}
    rows = [make_row(problem) for problem in listed.values()]
    return program.Benchmark(
        name="attention",
        script=__file__,
        rows={row.name: row for row in rows},
        quick=[row.name for row in rows if arguments.rehearse or row.name.endswith("s4096_d128")],
        contenders=lambda row: contenders(listed[row.name], arguments),
        kernels=kernels(arguments, COMPILED),
        facts=lambda timer: rates.product(timer, arguments.rehearse),
        print_table=print_table,
    )


def main(argv: Sequence[str]) -> int:
    """Measures, prints tables and writes JSON; 1 if one of ours failed."""
    return program.main(benchmark, program.parser(__doc__.splitlines()[0]), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
