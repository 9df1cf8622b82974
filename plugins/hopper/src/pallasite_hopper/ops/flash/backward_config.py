"""What the backward of attention computes, and how it is cut into tiles."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite.plugin import InvalidValueError
from pallasite_hopper.ops.flash.config import MULTIPROCESSORS
from pallasite_hopper.ops.flash.terms import Terms

LOG2_E = math.log2(math.e)

DEPTH = 64
"""Elements of heads that are multiplied are whole lines of the widest swizzle."""

ROWS = 64
"""Keys of one consumer warpgroup: the rows of one instruction."""

_SHARED_BYTES = 208 * 1024
"""Shared memory for tiles of large heads; scores, their gradients and barriers have the rest."""

_ONE_ROUND = 192
"""Elements of heads up to which gradients of queries leave at once."""

_VALUES = 128
"""Elements of values whose gradients two warpgroups share are whole parts of so many: each has
whole swizzled columns."""

_SMALL = 96
"""Heads whose gradients one warpgroup computes in its registers, with matmuls in flight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """A way of computing the gradients of attention.

    Attributes:
      block_q: queries of one step, a multiple of 16 from 16 to 128.
      warpgroups: consumer warpgroups of a block; each owns 64 of its keys.
      q_stages, d_out_stages: buffers for tiles of queries and of the gradient of the output.
      ds_stages: buffers for the gradient of the scores, 1 or 2. With 2, warpgroups wait for each
        other once instead of twice in each step.
      shared_keys: for large heads: the warpgroups share 64 keys and divide the head's dimensions.
      transposed_dq: compute the gradient of the queries as its transpose, which permits a
        ``block_q`` that is no multiple of 64.
      ahead: what a step starts before it is over: ``"nothing"``; ``"dk"`` leaves its last matmul
        running while the next step begins; ``"scores"`` also starts the scores of the next step.
      values_first: start the matmul for the values before the gradients of the scores, which are
        then computed from probabilities that were rounded for that matmul.
      heads_per_section: blocks go through the tiles of so many heads before they go on to the next
        ones, so that what they share stays in the L2 cache; None chooses by its size.
      stagger: blocks of one head begin at different queries, so that they do not add to the same
        gradients at once. Without causal mask only.
      parts: blocks that share a tile of keys, of which each goes through a part of the queries;
        what they have for keys and values is added up afterwards.
      own_keys: heads of queries that share keys have blocks of their own, whose gradients of these
        are added up afterwards.
      dq_rounds: rounds in which a warpgroup's part of the gradient of the queries leaves through
        the same shared memory.
      registers: of a lane of a consumer warpgroup.
    """

    block_q: int = 64
    warpgroups: int = 2
    q_stages: int = 2
    d_out_stages: int = 2
    ds_stages: int = 1
    shared_keys: bool = False
    transposed_dq: bool = False
    ahead: str = "nothing"
    values_first: bool = False
    heads_per_section: int | None = None
    stagger: bool = False
    parts: int = 1
    own_keys: bool = False
    dq_rounds: int = 1
    registers: int = 240

    def __post_init__(self) -> None:
        if self.block_q % 16 or not 16 <= self.block_q <= 128:
            raise InvalidValueError(
                "BackwardConfig.block_q", got=self.block_q, expected="a multiple of 16 up to 128"
            )
        if self.block_q % ROWS and not self.transposed_dq:
            raise InvalidValueError(
                "BackwardConfig.block_q does not fit the rows of an instruction",
                got=self.block_q,
                expected="a multiple of 64",
                hint="transposed_dq=True",
            )
        if self.ahead not in ("nothing", "dk", "scores"):
            raise InvalidValueError(
                "BackwardConfig.ahead",
                got=repr(self.ahead),
                expected='"nothing", "dk" or "scores"',
            )
        if self.q_stages < 2 and self.ahead != "nothing":
            raise InvalidValueError(
                "BackwardConfig.ahead needs the queries of two steps at once",
                got=f"q_stages={self.q_stages}",
                expected="at least 2",
            )
        if self.warpgroups not in (1, 2):
            raise InvalidValueError(
                "BackwardConfig.warpgroups", got=self.warpgroups, expected="1 or 2"
            )
        if self.shared_keys and (
            self.block_q != ROWS
            or self.transposed_dq
            or self.values_first
            or self.ds_stages != 1
            or self.ahead != "nothing"
        ):
            raise InvalidValueError(
                "BackwardConfig.shared_keys goes with block_q=64 and none of the other options",
                got=self,
            )
        if self.parts < 1:
            raise InvalidValueError(
                "BackwardConfig.parts", got=self.parts, expected="a positive number"
            )
        if self.dq_rounds not in (1, 2):
            raise InvalidValueError(
                "BackwardConfig.dq_rounds", got=self.dq_rounds, expected="1 or 2"
            )
        if self.ds_stages not in (1, 2):
            raise InvalidValueError(
                "BackwardConfig.ds_stages", got=self.ds_stages, expected="1 or 2"
            )

    @property
    def block_kv(self) -> int:
        """Keys of a block."""
        return ROWS if self.shared_keys else ROWS * self.warpgroups


@dataclasses.dataclass(frozen=True)
class BackwardProblem:
    """The attention whose gradients are computed.

    Attributes:
      batch, q_heads, kv_heads, q_seq, kv_seq: extents.
      head_dim: columns of a head in shared memory and registers.
      dtype: of queries, keys, values and their gradients.
      causal: query i sees keys up to i + (number of keys) - (number of queries).
      scale: of the scores.
      soft_cap: scores are ``soft_cap * tanh(scores / soft_cap)``, if given.
      has_lengths: sequences of a batch have lengths of their own.
      left, right: keys before and after a query's own position that it sees, None for all; with
        ``causal`` none after it.
      terms: what else decides which keys are seen and what is added to scores.
      dropout: the fraction of the weights that are dropped.
      with_bias: whether the gradients of the scores are wanted, which that of a bias is made of.
      stored, v_stored: elements of a head of queries and keys, and of values and results, in
        memory, if fewer: the copy engine fills up with zeros.
      sharing: heads with gradients of their own, ``kv_heads`` of them, that read the same keys and
        values.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_seq: int
    kv_seq: int
    head_dim: int
    dtype: Any
    causal: bool
    scale: float
    soft_cap: float | None
    has_lengths: bool
    left: int | None = None
    right: int | None = None
    terms: Terms = Terms()
    dropout: float = 0.0
    with_bias: bool = False
    stored: int | None = None
    v_stored: int | None = None
    sharing: int = 1

    @property
    def stored_dim(self) -> int:
        """Elements of a head of queries and keys in memory."""
        return self.head_dim if self.stored is None else self.stored

    @property
    def value_dim(self) -> int:
        """Elements of a head of values and results in memory."""
        return self.stored_dim if self.v_stored is None else self.v_stored

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """Of the gradients of the scores: keys, and queries up to a whole vector of 16 bytes."""
        queries = self.q_seq + -self.q_seq % (16 // self.item_bytes)
        return self.batch, self.q_heads, self.kv_seq, queries

    @property
    def sees_all(self) -> bool:
        """Whether blocks go through all queries."""
        hiding = self.windowed or self.has_lengths or self.terms.segmented
        return not hiding and not self.terms.has("block_mask") and not self.terms.has("visits")

    @property
    def value_tile(self) -> int:
        """Columns of a value that warpgroups share."""
        return min(self.head_dim, -(-self.value_dim // _VALUES) * _VALUES)

    @property
    def value_depth(self) -> int:
        """Elements of a value and of the gradient of a result that are multiplied."""
        return min(self.head_dim, -(-self.value_dim // DEPTH) * DEPTH)

    @property
    def head_window(self) -> tuple[Any, ...]:
        """What a window of queries or keys in memory has in the end: columns of a whole head in
        shared memory, where those that do not exist are read as zero and not written."""
        return self._window(self.stored_dim)

    @property
    def value_window(self) -> tuple[Any, ...]:
        """The same of values or results."""
        return self._window(self.value_dim)

    def _window(self, stored: int) -> tuple[Any, ...]:
        if stored == self.head_dim:
            return ()
        # A value of the kernel, since a number would be checked.
        return (pl.ds(lax.add(jnp.int32(0), jnp.int32(0)), self.head_dim),)

    @property
    def ahead(self) -> int | None:
        """Keys after its own position that a query sees; None for all."""
        return 0 if self.causal else self.right

    @property
    def windowed(self) -> bool:
        """Whether the place of a key decides if a query sees it."""
        return self.ahead is not None or self.left is not None

    @property
    def masked_end(self) -> bool:
        """Whether some queries after those that see all keys of a tile do not."""
        return self.left is not None or self.terms.segmented

    @property
    def group(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.q_heads // self.kv_heads

    @property
    def item_bytes(self) -> int:
        """Of an element."""
        return int(np.dtype(self.dtype).itemsize)


def config_for_heads(problem: BackwardProblem, *, halves: bool = True) -> BackwardConfig:
    """A configuration that suits the head size and the mask; each block has a tile of keys.

    ``halves``: whether small heads with few tiles may have twice as many blocks of half the keys.
    """
    # More loops, or more arithmetic, leave too few registers for matmuls across steps.
    simple = problem.group == 1 and problem.soft_cap is None and not problem.dropout
    simple = simple and not problem.terms.biased
    tiles = -(-problem.kv_seq // (2 * ROWS)) * problem.batch * problem.q_heads
    if halves and problem.head_dim <= _SMALL and 2 * tiles <= MULTIPROCESSORS:
        more: dict[str, Any] = {"ahead": "dk"} if simple else {"ds_stages": 2}
        return BackwardConfig(block_q=64, warpgroups=1, **more)
    if problem.head_dim <= 64 and problem.terms.biased:
        return BackwardConfig(block_q=64, ds_stages=2)  # More queries take more registers.
    if problem.head_dim <= 64:
        ahead = simple and not problem.windowed and not problem.terms
        return BackwardConfig(block_q=128, ds_stages=2, ahead="scores" if ahead else "nothing")
    if problem.head_dim > 128:
        # As many stages as fit beside keys, values, and the gradient of the queries in float32,
        # which leaves in two rounds where this makes room for the queries of two steps.
        rounds = 1 if problem.head_dim <= _ONE_ROUND else 2
        stages = (_SHARED_BYTES // problem.head_dim - 4 * ROWS - 4 * ROWS // rounds) // (2 * ROWS)
        return BackwardConfig(
            dq_rounds=rounds,
            block_q=64,
            q_stages=min(2, max(1, stages - 1)),
            d_out_stages=min(2, max(1, stages // 2)),
            shared_keys=True,
        )
    if simple:
        return BackwardConfig(block_q=64, ahead="dk")
    return BackwardConfig(block_q=64, ds_stages=2)
