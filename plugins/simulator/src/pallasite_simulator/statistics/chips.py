"""Figures of chips, for estimates: how much of everything they can do in a second.

The figures are those that NVIDIA publishes:

- peak rates, bandwidths (of NVLink, half of the sum of both directions) and numbers of
  multiprocessors: "NVIDIA H100 Tensor Core GPU Architecture" (whitepaper), the datasheets of H200,
  HGX B200 and HGX B300 (an eighth of the figures for eight GPUs), "NVIDIA RTX Blackwell GPU
  Architecture" and "NVIDIA RTX PRO Blackwell GPU Architecture" (whitepapers). All tensor rates are
  without sparsity, and accumulate in 32 bits.
- results per clock of a multiprocessor: "CUDA C++ Programming Guide", table "Throughput of Native
  Arithmetic Instructions" (special functions of B300: "Inside NVIDIA Blackwell Ultra", NVIDIA
  Technical Blog); 128 bytes of shared memory and 4 warp instructions per clock.

The clock is the one that the published FP32 rate implies: rate / (multiprocessors * 128 * 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pallasite_simulator.errors import SimulationError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What one chip can do.

    Attributes:
      name: as sold.
      compute_capability: major, minor.
      multiprocessors: how many there are.
      clock: in Hz.
      memory_bandwidth: of the memory outside of the chip, in bytes per second.
      tensor_rates: by type of the multiplicands (``"f16"`` for bf16 too, ``"tf32"``, ``"f64"``,
        ``"f8"``, ``"f6"``, ``"f4"``, ``"i8"``): operations per second of the tensor cores, counting
        multiplications and additions.
      pipes: by pipe (``"float32"``, ``"float64"``, ``"integer"``, ``"special"``,
        ``"conversion"``): results per clock of one multiprocessor.
      issue: warp instructions per clock of one multiprocessor.
      shared_bandwidth: bytes of shared memory per clock of one multiprocessor.
      link_bandwidth: of NVLink, in bytes per second in each direction; 0 without it.
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    clock: float
    memory_bandwidth: float
    tensor_rates: Mapping[str, float]
    pipes: Mapping[str, int]
    issue: int = 4
    shared_bandwidth: int = 128
    link_bandwidth: float = 0.0


_HOPPER_PIPES = {"float32": 128, "float64": 64, "integer": 64, "special": 16, "conversion": 64}
_HOPPER_TENSOR = {
    "f16": 989.4e12, "tf32": 494.7e12, "f64": 66.9e12, "f8": 1978.9e12, "i8": 1978.9e12,
}  # fmt: skip
_WORKSTATION_PIPES = {"float32": 128, "float64": 2, "integer": 128, "special": 16, "conversion": 64}

CHIPS: dict[str, Chip] = {}
"""All chips by name; the first of a compute capability stands for it."""


def add_chip(chip: Chip) -> None:
    """Makes a chip known, in place of another one of its name.

    Plugins for further hardware call it where their module of instructions is imported.
    """
    CHIPS[chip.name] = chip


def find_chip(name: str) -> Chip:
    """The chip of a name.

    Raises:
      SimulationError: none is known.
    """
    if name not in CHIPS:
        raise SimulationError(f"no chip named {name!r} is known", expected=", ".join(CHIPS))
    return CHIPS[name]


def chip_for(compute_capability: tuple[int, int]) -> Chip | None:
    """The chip that stands for a compute capability, or None."""
    for chip in CHIPS.values():
        if chip.compute_capability == compute_capability:
            return chip
    return None


for _chip in (
    Chip(
        name="H100 SXM",
        compute_capability=(9, 0),
        multiprocessors=132,
        clock=1.98e9,
        memory_bandwidth=3.35e12,
        tensor_rates=_HOPPER_TENSOR,
        link_bandwidth=450e9,
        pipes=_HOPPER_PIPES,
    ),
    Chip(
        name="H200 SXM",
        compute_capability=(9, 0),
        multiprocessors=132,
        clock=1.98e9,
        memory_bandwidth=4.8e12,
        tensor_rates=_HOPPER_TENSOR,
        link_bandwidth=450e9,
        pipes=_HOPPER_PIPES,
    ),
    Chip(
        name="B200",
        compute_capability=(10, 0),
        multiprocessors=148,
        clock=1.98e9,
        memory_bandwidth=8e12,
        tensor_rates={
            "f16": 2250e12, "tf32": 1125e12, "f64": 37e12, "f8": 4500e12, "f6": 4500e12,
            "f4": 9000e12, "i8": 4500e12,
        },
        link_bandwidth=900e9,
        pipes=_HOPPER_PIPES,
    ),
    Chip(
        name="B300",
        compute_capability=(10, 3),
        multiprocessors=148,
        clock=1.98e9,
        memory_bandwidth=8e12,
        tensor_rates={
            "f16": 2250e12, "tf32": 1125e12, "f64": 1.25e12, "f8": 4500e12, "f6": 4500e12,
            "f4": 13500e12, "i8": 125e12,
        },
        link_bandwidth=900e9,
        pipes={**_HOPPER_PIPES, "float64": 2, "special": 32},
    ),
    Chip(
        name="RTX PRO 6000 Blackwell",
        compute_capability=(12, 0),
        multiprocessors=188,
        clock=2.6e9,
        memory_bandwidth=1.792e12,
        tensor_rates={
            "f16": 503.8e12, "tf32": 251.9e12, "f8": 1007.6e12, "f4": 2015.2e12, "i8": 1007.6e12,
        },
        pipes=_WORKSTATION_PIPES,
    ),
    Chip(
        name="GeForce RTX 5090",
        compute_capability=(12, 0),
        multiprocessors=170,
        clock=2.407e9,
        memory_bandwidth=1.792e12,
        tensor_rates={
            "f16": 209.5e12, "tf32": 104.8e12, "f8": 419e12, "f4": 1676e12, "i8": 838e12,
        },
        pipes=_WORKSTATION_PIPES,
    ),
):  # fmt: skip
    add_chip(_chip)
