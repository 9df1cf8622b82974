"""Products in NVIDIA's CuTe DSL, compiled for Blackwell by its own compiler.

    python tests/upstream/cute_programs.py

where ``nvidia-cutlass-dsl`` is installed, keeps the PTX in ``recorded``.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import pathlib

RECORDED = pathlib.Path(__file__).with_name("recorded")
THREADS = 128


@dataclasses.dataclass(frozen=True)
class Program:
    """One product of one block, ``c = a @ b.T``.

    Attributes:
      kind: the DSL's name of the instruction, without ``Mma`` and ``Op``.
      dtype: of A and B, and ``result`` of D, as the DSL names them.
      m, n, k: extents.
      across: for A and B, whether rows lie across K in shared memory.
      load: the shape of loads of D.
      repeat: how often.
    """

    kind: str
    dtype: str
    m: int
    n: int
    k: int
    across: tuple[bool, bool] = (False, False)
    load: str = "32x32b"
    repeat: int = 16
    result: str = "Float32"


PROGRAMS = {
    "f16": Program("F16BF16", "Float16", 128, 128, 64),
    "bf16 across": Program("F16BF16", "BFloat16", 128, 64, 64, (True, True)),
    "a across": Program("F16BF16", "Float16", 128, 96, 32, (True, False), "16x256b", 4),
    "b across": Program("F16BF16", "Float16", 128, 64, 128, (False, True), "16x128b", 8),
    "64 rows": Program("F16BF16", "Float16", 64, 128, 64, load="16x256b", repeat=8),
    "16x64b": Program("F16BF16", "BFloat16", 128, 32, 64, load="16x64b", repeat=8),
    "tf32": Program("TF32", "TFloat32", 128, 64, 32),
    "e4m3": Program("F8", "Float8E4M3FN", 128, 64, 128),
    "e5m2": Program("F8", "Float8E5M2", 64, 64, 64, load="16x256b", repeat=4),
    "s8": Program("I8", "Int8", 128, 64, 64, result="Int32"),
}
"""By name."""


def path_of(name: str) -> pathlib.Path:
    """Where the PTX of a program is kept."""
    return RECORDED / f"cute_{name.replace(' ', '_')}.ptx.gz"


def recorded(name: str) -> str:
    """The PTX of a program."""
    return gzip.decompress(path_of(name).read_bytes()).decode()


def main() -> None:
    """Compiles and keeps all programs."""
    os.environ["CUTE_DSL_ARCH"] = "sm_100a"
    os.environ["CUTE_DSL_KEEP_PTX"] = "1"
    RECORDED.mkdir(exist_ok=True)
    from cute_kernels import compile_program

    for name, one in PROGRAMS.items():
        text = compile_program(one).replace("\0", "")
        path_of(name).write_bytes(gzip.compress(text.encode(), mtime=0))
        print(name, path_of(name).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
