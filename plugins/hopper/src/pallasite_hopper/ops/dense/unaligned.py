"""GEMM whose rows are no multiples of 16 bytes, which the copy engine cannot read or write.

The kernel with copies by that engine needs operands with longer rows, to which XLA copies them,
and stores results by words. One reads several rows of the right operand as one, without a copy of
it, and leaves partial sums, so that it pays where few rows are multiplied with a large matrix;
another one loads any rows word by word, which pays where few rows or columns are multiplied, and
one for very few rows loads vectors; XLA has kernels that read any rows, at a lower rate. Which way
takes the least time is estimated from what is calculated and moved.
"""

from __future__ import annotations

import dataclasses

from pallasite_hopper.matrix.odd_rows import WORD
from pallasite_hopper.ops.dense.choice import default_config
from pallasite_hopper.ops.dense.cost import H200, Rates, Sizes, nanoseconds
from pallasite_hopper.ops.dense.direct import DirectConfig
from pallasite_hopper.ops.dense.direct_choice import direct_config
from pallasite_hopper.ops.dense.few_rows import FewRowsConfig
from pallasite_hopper.ops.dense.few_rows_choice import few_rows_config
from pallasite_hopper.ops.dense.joined_rows import JoinedRowsConfig, joined_rows_config
from pallasite_std.api import padded_columns

type AnyRowsConfig = DirectConfig | FewRowsConfig | JoinedRowsConfig
"""Of a kernel that reads rows that begin anywhere."""

_LEAST_GAIN = 0.05
"""Of the kernel that loads words, by the estimates."""

_LEAST_GAIN_OF_JOINED = 0.05
"""Of the kernel that reads several rows as one."""

_LEAST_GAIN_BY_COPIES = 0.1
"""Of our kernel with copies over XLA's."""


def without_copies(sizes: Sizes, *, plain: bool = True, xla: bool = True) -> AnyRowsConfig | None:
    """The configuration of a kernel that reads any rows, where it takes the least time.

    Args:
      sizes: of the product, with the order of its operands.
      plain: whether there is no epilogue, for which XLA has another kernel.
      xla: whether XLA has a kernel for the operands.
    """
    if 0 in (sizes.m, sizes.n, sizes.k) or not any(_copied(sizes)):
        return None
    others = [nanoseconds_with_copies(sizes)]
    if xla:
        others.append(nanoseconds_by_xla(sizes, plain=plain))
    ways: list[tuple[float, AnyRowsConfig]] = []
    if (direct := direct_config(sizes)) is not None:
        ways.append((direct[1] / (1 - _LEAST_GAIN), direct[0]))
    if (few := few_rows_config(sizes)) is not None:
        ways.append((few[1], few[0]))
    if (joined := joined_rows_config(sizes)) is not None:
        ways.append((joined[1] / (1 - _LEAST_GAIN_OF_JOINED), joined[0]))
    if not ways:
        return None
    time, config = min(ways, key=lambda way: way[0])
    return config if time < min(others) else None


def left_to_xla(sizes: Sizes, *, plain: bool = True) -> bool:
    """Whether XLA takes less time for a product than our kernel with the copies that it needs.

    Args:
      sizes: of the product, with the order of its operands. Rates are those of 16-bit floats.
      plain: whether there is no epilogue, for which XLA has another kernel.
    """
    if 0 in (sizes.m, sizes.n, sizes.k) or not any(_copied(sizes)):
        return False
    gained = (1 - _LEAST_GAIN_BY_COPIES) * nanoseconds_by_xla(sizes, plain=plain)
    return gained < nanoseconds_with_copies(sizes)


def nanoseconds_with_copies(sizes: Sizes, rates: Rates = H200) -> float:
    """The time of our kernel and of the copies to and from rows that it can read and write."""
    aligned = _padded(sizes)
    config = default_config(aligned)
    time = nanoseconds(config, aligned, rates)
    copied_a, copied_b, copied_out = _copied(sizes)
    for copied, extent in ((copied_a, sizes.m), (copied_b, sizes.n)):
        time += (rates.copy + 2 * extent * sizes.k * sizes.size / rates.pad) * copied
    if copied_out and config.parts == 1:
        words = sizes.n * sizes.out_size % WORD == 0
        stored = rates.stored if words else rates.stored_elements
        time += rates.store + sizes.m * sizes.n * sizes.out_size / stored
    return time


def nanoseconds_by_xla(sizes: Sizes, *, plain: bool = True, rates: Rates = H200) -> float:
    """The time of XLA's product of operands of which at least one has unaligned rows."""
    m, n, k = sizes.m, sizes.n, sizes.k
    read, written = (m + n) * k * sizes.size, m * n * sizes.out_size
    # Sums are written and read.
    epilogue = 0 if plain else rates.xla_epilogue + 2 * m * n * 4 / rates.xla_memory
    if m == 1 and not sizes.transpose_b:  # Columns are summed up by loads of single elements.
        if k > rates.xla_vector_most:
            divided = rates.xla_vector_divided + read / rates.xla_vector_divided_memory
            return divided + epilogue
        vector = rates.xla_vector + rates.xla_vector_fill * k + read / rates.xla_vector_memory
        return vector + epilogue
    if m == 1 and sizes.transpose_b:  # Rows are summed up.
        return rates.xla_launch + read / rates.xla_vector_memory + epilogue
    # Where rows lie along k, all steps read, and mask, elements of unaligned rows. Of a transposed
    # left operand it has no other kernels, either.
    slow = sizes.transpose_a or _unaligned(k, sizes.size)
    if slow:
        fill = min(rates.xla_unaligned_fill * k, rates.xla_most_unaligned_fill)
        fill += rates.xla_copies * min(1.0, k / rates.xla_padded) * (m > rates.xla_several)
        short = k < rates.xla_padded or (m <= rates.xla_few and k <= rates.xla_short)
        calculated = rates.xla_unaligned
        moved = rates.xla_memory if short else rates.xla_unaligned_memory
    else:
        fill, moved = min(rates.xla_fill * k, rates.xla_most_fill), rates.xla_memory
        words = sizes.transpose_b or n * sizes.size % WORD == 0
        calculated = rates.xla if words else rates.xla_elements
        if k > rates.xla_long:
            fill += rates.copy + 2 * n * k * sizes.size / rates.pad
    time = rates.xla_launch + fill + 2 * m * n * k / calculated + read / moved
    return time + written / rates.xla_memory + epilogue


def _along_k(sizes: Sizes) -> bool:
    """Whether rows of an operand lie along k."""
    return not sizes.transpose_a or sizes.transpose_b


def _unaligned(extent: int, size: int) -> bool:
    return padded_columns(extent, size) != extent


def _copied(sizes: Sizes) -> tuple[bool, bool, bool]:
    """Whether the operands, and the result, are copied."""
    return (
        _unaligned(sizes.m if sizes.transpose_a else sizes.k, sizes.size),
        _unaligned(sizes.k if sizes.transpose_b else sizes.n, sizes.size),
        _unaligned(sizes.n, sizes.out_size),
    )


def _padded(sizes: Sizes) -> Sizes:
    """What the kernel multiplies after the copies."""
    pitch_m = padded_columns(sizes.m, sizes.size) if sizes.transpose_a else None
    pitch_n = None if sizes.transpose_b else padded_columns(sizes.n, sizes.size)
    k = padded_columns(sizes.k, sizes.size) if _along_k(sizes) else sizes.k
    return dataclasses.replace(sizes, k=k, pitch_m=pitch_m, pitch_n=pitch_n)
