"""Compile times of this checkout against those of another one, such as of an earlier commit.

Each checkout compiles in a process of its own; the two take turns, kernel by kernel, so that both
meet the same machine. What is compared is the processor time of a compilation up to PTX, with
empty caches, which other programs on the machine change least. Both compile the kernels of this
checkout.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent

Made = tuple[Callable[..., Any], Sequence[Any]]
"""A function and its arguments."""


@dataclasses.dataclass
class Comparison:
    """Processor time of one kernel, up to PTX.

    Attributes:
      kernel: its name.
      theirs_ms: milliseconds that the other checkout takes, the median.
      ours_ms: those of this one.
      ratio: how many times as long the other one takes, the median over pairs.
      note: why there are no numbers.
    """

    kernel: str
    theirs_ms: float | None = None
    ours_ms: float | None = None
    ratio: float | None = None
    note: str = ""


def processor_time() -> float:
    """Seconds that this process, and those that it started and that have ended, used processors."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def compare(
    other: pathlib.Path, groups: Sequence[str], wanted: Callable[[str], bool], repeats: int
) -> list[Comparison]:
    """Compiles all wanted kernels with both checkouts, ``repeats`` times each.

    Args:
      other: the root of the other checkout.
      groups: the names of groups of kernels, as in ``compile_time.STAGES``, beside the usual ones.
      wanted: says by its name whether a kernel counts.
      repeats: how often it counts; a first time does not.

    Raises:
      SystemExit: there is no checkout at ``other``.
    """
    if not (other / "framework" / "pallasite").is_dir():
        raise SystemExit(f"--against {other}: there is no framework/pallasite in that folder")
    with tempfile.TemporaryDirectory() as folder:
        theirs = _Worker(other.resolve(), pathlib.Path(folder) / "theirs", groups)
        ours = _Worker(ROOT.resolve(), pathlib.Path(folder) / "ours", groups)
        try:
            names = [name for name in ours.kernels if wanted(name)]
            return [_compare(name, theirs, ours, repeats) for name in names]
        finally:
            theirs.close()
            ours.close()


def _compare(name: str, theirs: _Worker, ours: _Worker, repeats: int) -> Comparison:
    found: dict[_Worker, list[float]] = {theirs: [], ours: []}
    for repeat in range(repeats + 1):
        for worker in (theirs, ours) if repeat % 2 else (ours, theirs):
            answer = worker.ask(name, repeat)
            if "error" in answer:
                return Comparison(name, note=f"{worker.root}: {answer['error']}")
            if repeat:
                found[worker].append(answer["milliseconds"])
    pairs = zip(found[theirs], found[ours], strict=True)
    return Comparison(
        name,
        statistics.median(found[theirs]),
        statistics.median(found[ours]),
        statistics.median(a / b for a, b in pairs),
    )


class _Worker:
    """A process that compiles with one checkout."""

    def __init__(self, root: pathlib.Path, folder: pathlib.Path, groups: Sequence[str]):
        self.root = root
        _describe(root, folder)
        sources = [folder, root / "framework", *sorted(root.glob("plugins/*/src"))]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
            "PALLASITE_CACHE": "off",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(root), *groups],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.kernels: list[str] = self._answer()

    def ask(self, kernel: str, repeat: int) -> Any:
        """Compiles a kernel once."""
        assert self._process.stdin is not None
        print(json.dumps([kernel, repeat]), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"compiling with {self.root} ended the process")
        return json.loads(line)


def _describe(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the metadata of a checkout's distributions, which are found before installed ones."""
    for file in [root / "pyproject.toml", *sorted(root.glob("plugins/*/pyproject.toml"))]:
        project = tomllib.loads(file.read_text())["project"]
        version = project.get("version", "0")  # It may be made when it is installed.
        info = folder / f"{project['name'].replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = [f"Requires-Dist: {one}" for one in project.get("dependencies", ())]
        head = ["Metadata-Version: 2.1", f"Name: {project['name']}"]
        (info / "METADATA").write_text("\n".join([*head, f"Version: {version}", *needs, ""]))
        points = [
            line
            for group, entries in project.get("entry-points", {}).items()
            for line in [f"[{group}]", *(f"{name} = {where}" for name, where in entries.items())]
        ]
        (info / "entry_points.txt").write_text("\n".join([*points, ""]))


def _kernels(groups: Sequence[str]) -> Iterator[tuple[str, Callable[[int], Made]]]:
    """Kernels by name; each is made by the number of a repetition, in which a constant differs."""
    import compile_time
    import jax

    from pallasite import gpu as plgpu

    def small(build: Any) -> Callable[[int], Made]:
        def make(repeat: int) -> Made:
            function, types = build(plgpu, 1.5 + 0.125 * repeat)
            return function, [jax.ShapeDtypeStruct(one[:-1], one[-1]) for one in types]

        return make

    for name, build in compile_time.KERNELS.items():
        yield name, small(build)
    for group in groups:
        for name, other in compile_time.STAGES[group]().items():
            yield name, lambda repeat, other=other: other()


def _work(root: pathlib.Path, groups: Sequence[str]) -> None:
    """Answers requests on the standard input until it ends, with the plugins of a checkout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What compilers print is no answer.
    import harness
    import jax
    import stage_times

    from pallasite.runtime import compiler

    harness.ROOT = root
    kernels = dict(_kernels(groups))
    print(json.dumps(list(kernels)), file=answers, flush=True)
    for line in sys.stdin:
        name, repeat = json.loads(line)
        try:
            function, args = kernels[name](repeat)
            jax.clear_caches()
            compiler.clear_memory()
            gc.collect()
            start = processor_time()
            stage_times.once(function, args, "sm_90a", False)
            answer = {"milliseconds": (processor_time() - start) * 1e3}
        except Exception as failure:
            lines = str(failure).splitlines()
            answer = {"error": f"{type(failure).__name__}: {lines[0] if lines else ''}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _work(pathlib.Path(sys.argv[1]), sys.argv[2:])
