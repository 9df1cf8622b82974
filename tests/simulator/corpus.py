"""Programs whose results on hardware are recorded, for the simulator to be held against.

A case is a kernel in PTX, its inputs (made from a seed, so that only results need to be kept), and
how closely the results must agree. ``record_corpus.py`` runs all of them on a GPU and writes
``recorded.npz``; ``test_differential.py`` replays them.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib

import numpy as np

POISON = 0xCD

SAMPLES = 512
"""How many elements of an example's output are kept."""


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One program.

    Attributes:
      name: unique.
      ptx: a module with one kernel, whose parameters point to the inputs and then to the result.
      inputs: arrays; the kernel may change them, but only the result is compared.
      result: dtype and number of elements of the result, which is poisoned before.
      grid, block, cluster, shared: how to launch it; the PTX names the cluster, too.
      ulp: how many units in the last place a float may differ (the sign of zero and any NaN agree);
        None for bit for bit.
      absolute: a difference that is always accepted.
      start: whether the result starts as zeros, not poisoned.
    """

    name: str
    ptx: str
    inputs: tuple[np.ndarray, ...]
    result: tuple[np.dtype, int]
    grid: int = 1
    block: int = 128
    cluster: int = 1
    shared: int = 0
    ulp: float | None = None
    absolute: float = 0.0
    start: bool = False

    def output(self) -> np.ndarray:
        """The result's memory before the kernel runs."""
        dtype, count = self.result
        byte = 0 if self.start else POISON
        return np.full(count * dtype.itemsize, byte, np.uint8).view(dtype)


@functools.cache
def all_cases() -> dict[str, Case]:
    """All cases by name."""
    import corpus_atomics
    import corpus_copies
    import corpus_floats
    import corpus_integers
    import corpus_matrices
    import corpus_random
    import corpus_warps
    import corpus_wgmma

    found: dict[str, Case] = {}
    for module in (
        corpus_integers,
        corpus_floats,
        corpus_warps,
        corpus_wgmma,
        corpus_atomics,
        corpus_copies,
        corpus_matrices,
        corpus_random,
    ):
        for case in module.cases():
            assert case.name not in found, case.name
            found[case.name] = case
    return found


def generator(name: str) -> np.random.Generator:
    """Random numbers of a case, the same everywhere."""
    return np.random.default_rng(zlib.crc32(name.encode()))


EDGES = (0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, -1, -2, -3, -32)


def integers(name: str, dtype: np.dtype | type, count: int = 256) -> np.ndarray:
    """Random integers of all magnitudes, with edges among them."""
    dtype, random = np.dtype(dtype), generator(name)
    bits = 8 * dtype.itemsize
    value = random.integers(0, 2**64, count, np.uint64) >> random.integers(
        64 - bits, 64, count
    ).astype(np.uint64)
    value = np.where(random.random(count) < 0.3, ~value, value)
    special = [*EDGES, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << bits) - 1]
    chosen = random.choice(np.array([one % 2**64 for one in special], np.uint64), count)
    value = np.where(random.random(count) < 0.3, chosen, value)
    return value.astype(f"u{dtype.itemsize}").view(dtype)


_FLOATS = {
    "f16": (np.uint16, 5, 10),
    "bf16": (np.uint16, 8, 7),
    "f32": (np.uint32, 8, 23),
    "f64": (np.uint64, 11, 52),
}


def floats(name: str, kind: str, count: int = 256, spread: float = 0.5) -> np.ndarray:
    """Bits of random floats (as unsigned integers).

    Args:
      name: seeds them.
      kind: ``"f16"``, ``"bf16"``, ``"f32"`` or ``"f64"``.
      count: how many.
      spread: the part that are any bit pattern; the others are within a few powers of two of 1,
        and a tenth are special values.
    """
    dtype, exponent, mantissa = _FLOATS[kind]
    random = generator(name)
    width = 1 + exponent + mantissa
    anything = random.integers(0, 2**64, count, np.uint64) >> np.uint64(64 - width)
    bias = 2 ** (exponent - 1) - 1
    near = (
        (random.integers(0, 2, count, np.uint64) << np.uint64(width - 1))
        | (random.integers(bias - 4, bias + 5, count).astype(np.uint64) << np.uint64(mantissa))
        | (random.integers(0, 2**mantissa, count, np.uint64))
    )
    value = np.where(random.random(count) < spread, anything, near)
    infinity = (2**exponent - 1) << mantissa
    sign = 1 << (width - 1)
    special = np.array(
        [0, sign, infinity, infinity | sign, infinity | 1 << (mantissa - 1), infinity | 1]
        + [1, sign | 1, (1 << mantissa) - 1, 1 << mantissa, infinity - 1, bias << mantissa]
        + [bias << mantissa | sign, (bias - 1) << mantissa, (bias + 1) << mantissa | sign],
        np.uint64,
    )
    value = np.where(random.random(count) < 0.1, random.choice(special, count), value)
    return value.astype(dtype)


def sample(name: str, output: int, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Some places of an example's output, and what is there."""
    flat = np.asarray(array).reshape(-1)
    random = np.random.default_rng([len(name), output])
    places = random.choice(flat.size, min(SAMPLES, flat.size), replace=False)
    bits = flat.view(np.dtype(f"u{flat.itemsize}")) if flat.dtype != bool else flat
    return places, bits[places]
