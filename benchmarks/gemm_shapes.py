"""Shapes of GEMMs as programs have them, drawn by a seed.

Four of five are projections of published models, with a number of tokens that is log-uniform from
1 to 16384; the others have sizes that are multiples of nothing in particular.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

MOST_TOKENS = 16384
ODD_SHARE = 0.2
DRAWN_AT_MOST = 20000
"""Shapes among which those within boxes are looked for."""


@dataclasses.dataclass(frozen=True)
class Model:
    """What the sizes of a transformer's projections follow from.

    Attributes:
      hidden: size of the residual stream.
      query, key_value: columns of the projections to queries, and to keys and values together.
      feed_forward: size of the inner layer.
      gated: whether the inner layer has a gate, computed in the same GEMM.
      vocabulary: columns of the last projection.
      further: projections that follow no such rule, as (n, k).
    """

    hidden: int
    query: int
    key_value: int
    feed_forward: int
    gated: bool
    vocabulary: int
    further: tuple[tuple[int, int], ...] = ()

    def projections(self) -> list[tuple[int, int]]:
        """All (n, k)."""
        inner = self.feed_forward * (2 if self.gated else 1)
        return [
            (self.query + self.key_value, self.hidden),
            (self.hidden, self.query),
            (inner, self.hidden),
            (self.hidden, self.feed_forward),
            (self.vocabulary, self.hidden),
            *self.further,
        ]


MODELS = {
    "BERT large": Model(1024, 1024, 2048, 4096, False, 30522),
    "DeepSeek V3": Model(
        7168, 16384, 576, 18432, True, 129280,
        ((1536, 7168), (24576, 1536), (32768, 512), (4096, 7168), (7168, 2048), (256, 7168)),
    ),
    "Falcon 7B": Model(4544, 4544, 128, 18176, False, 65024),
    "Gemma 2 9B": Model(3584, 4096, 4096, 14336, True, 256000),
    "GPT-2": Model(768, 768, 1536, 3072, False, 50257),
    "GPT-NeoX 20B": Model(6144, 6144, 12288, 24576, False, 50432),
    "Llama 2 13B": Model(5120, 5120, 10240, 13824, True, 32000),
    "Llama 3 8B": Model(4096, 4096, 2048, 14336, True, 128256),
    "Llama 3 70B": Model(8192, 8192, 2048, 28672, True, 128256),
    "Mixtral 8x22B": Model(6144, 6144, 2048, 16384, True, 32768),
    "Phi-3 mini": Model(3072, 3072, 6144, 8192, True, 32064),
    "Qwen2.5 7B": Model(3584, 3584, 1024, 18944, True, 152064),
    "Qwen2.5 32B": Model(5120, 5120, 2048, 27648, True, 152064),
    "Whisper large": Model(1280, 1280, 2560, 5120, False, 51866),
}  # fmt: skip


def draw(
    seed: int, count: int, most_flops: float = math.inf, most_rows: int = MOST_TOKENS
) -> list[tuple[int, int, int]]:
    """A sample of shapes (m, n, k).

    Args:
      most_flops: larger ones are drawn again.
      most_rows: m is that at most.
    """
    generator = np.random.default_rng(seed)
    projections = [one for model in MODELS.values() for one in model.projections()]
    shapes = []
    while len(shapes) < count:
        m = _log_uniform(generator, 1, most_rows)
        if generator.random() < ODD_SHARE:
            n, k = (_log_uniform(generator, 64, 16384) for _ in range(2))
        else:
            n, k = projections[generator.integers(len(projections))]
        if 2 * m * n * k <= most_flops:
            shapes.append((m, n, k))
    return shapes


def draw_within(
    seed: int, count: int, boxes: Sequence[Sequence[range]], most_flops: float = math.inf
) -> list[tuple[int, int, int]]:
    """The first shapes of a sample whose m, n and k are within one of the boxes, those of all boxes
    in turn; n and k are multiples of 8.

    Args:
      boxes: ranges of m, n and k.
      most_flops: larger ones are drawn again.
    """
    found: list[list[tuple[int, int, int]]] = [[] for _ in boxes]
    each = -(-count // len(boxes))
    for shape in draw(seed, DRAWN_AT_MOST, most_flops):
        for there, box in zip(found, boxes, strict=True):
            inside = all(one in extent for one, extent in zip(shape, box, strict=True))
            if inside and len(there) < each and not (shape[1] % 8 or shape[2] % 8):
                there.append(shape)
                break
    in_turn = (one for several in itertools.zip_longest(*found) for one in several)
    return [one for one in in_turn if one is not None][:count]


def box(text: str) -> list[range]:
    """Ranges of m, n and k."""
    ends = [tuple(map(int, one.split("-"))) for one in text.split("x")]
    return [range(low, high + 1) for low, high in ends]


def draw_few_tiles(seed: int, count: int) -> list[tuple[int, int, int]]:
    """A sample of shapes of so few tiles that one or two rounds of them do not fill a GPU; n and k
    are multiples of 64."""
    generator = np.random.default_rng(seed)
    shapes = []
    while len(shapes) < count:
        m = _log_uniform(generator, 128, 8192)
        n, k = (_log_uniform(generator, low, 8192) // 64 * 64 for low in (256, 1024))
        if 16 <= -(-m // 128) * -(-n // 128) <= 264:
            shapes.append((m, n, k))
    return shapes


def draw_odd(
    seed: int, count: int, most_flops: float = math.inf, most_rows: int = MOST_TOKENS
) -> list[tuple[int, int, int]]:
    """A sample of shapes (m, n, k) of which n or k, or both, are no multiples of 8.

    Args:
      most_flops: larger ones are drawn again.
      most_rows: m is that at most.
    """
    generator = np.random.default_rng(seed)
    shapes: list[tuple[int, int, int]] = []
    while len(shapes) < count:
        m = _log_uniform(generator, 1, most_rows)
        n, k = (_log_uniform(generator, 64, 16384) for _ in range(2))
        if (n % 8 or k % 8) and 2 * m * n * k <= most_flops:
            shapes.append((m, n, k))
    return shapes


def draw_small(
    seed: int, count: int, most_rows: int = MOST_TOKENS, most: int = 1 << 20
) -> list[tuple[int, int, int]]:
    """A sample of shapes (m, n, k) of which n or k, or both, are no multiples of 8, and no operand
    or result has more than so many elements; n and k are at most 8192 and 1024."""
    generator = np.random.default_rng(seed)
    shapes: list[tuple[int, int, int]] = []
    while len(shapes) < count:
        m = _log_uniform(generator, 1, min(most_rows, 4096))
        n, k = _log_uniform(generator, 64, 8192), _log_uniform(generator, 64, 1024)
        if (n % 8 or k % 8) and max(m * n, m * k, n * k) <= most:
            shapes.append((m, n, k))
    return shapes


def _log_uniform(generator: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(generator.uniform(math.log(low), math.log(high + 1))))
