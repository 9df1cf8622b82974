"""How portable attention against a cache is cut up."""

from __future__ import annotations

import dataclasses

from pallasite.plugin import InvalidValueError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """A way of computing attention against a cache with warp-level MMA.

    Attributes:
      tile: keys in one step, a multiple of 32 up to 256; fewer or more where pages ask for it.
      stages: steps that are in flight.
      splits: parts into which the keys of a sequence are cut, each for a block of its own; None
        fills the GPU.
    """

    tile: int = 64
    stages: int = 2
    splits: int | None = None

    def __post_init__(self) -> None:
        if self.tile % 32 or not 32 <= self.tile <= 256:
            self._refuse("tile", "a multiple of 32 up to 256")
        if self.stages < 2:
            self._refuse("stages", "at least 2")
        if self.splits is not None and self.splits < 1:
            self._refuse("splits", "at least 1, or None")

    def _refuse(self, name: str, expected: str) -> None:
        raise InvalidValueError(
            f"DecodeConfig.{name} does not fit", got=getattr(self, name), expected=expected
        )


def default_config(head_dim: int, itemsize: int) -> DecodeConfig:
    """The configuration that is used without tuning, for heads of the cache."""
    return DecodeConfig(tile=64 if head_dim * itemsize <= 256 else 32)


def decode_configs(head_dim: int, itemsize: int) -> list[DecodeConfig]:
    """Candidate configurations, the default one first.

    Args:
      head_dim: elements of a head.
      itemsize: bytes of an element of the cache.
    """
    found = [default_config(head_dim, itemsize)]
    for tile in (32, 64, 128):
        for stages in (2, 3):
            config = DecodeConfig(tile=tile, stages=stages)
            if 2 * tile * stages * head_dim * itemsize <= 80 << 10:
                found.append(config)
    return list(dict.fromkeys(found))
