"""PTX to machine code with ``ptxas``, and machine code to text with ``nvdisasm``.

Both are optional: a kernel can be compiled to PTX and run without them. What the assembler says
about registers and spills goes into the resource report, and what it complains about is shown at
the line of the kernel's source that the PTX comes from.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import tempfile
import warnings

from pallasite.codegen.tools import Tool, find_tool
from pallasite.errors import CompilationError, SourceLocation
from pallasite.launch import ResourceReport


class PallasiteSpillWarning(UserWarning):
    """A kernel needs more registers than it may have, and spills some to memory."""


class PallasiteSerializationWarning(UserWarning):
    """The assembler serializes asynchronous matrix instructions, which makes them slow."""


@dataclasses.dataclass(frozen=True)
class Assembly:
    """What the assembler returns for one kernel: machine code, its figures, and its messages."""

    cubin: bytes
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_memory_bytes: int
    constant_bytes: int
    messages: tuple[str, ...] = ()

    def add_to(self, report: ResourceReport) -> ResourceReport:
        """The report with the assembler's figures filled in."""
        return dataclasses.replace(
            report,
            registers=self.registers,
            spill_store_bytes=self.spill_store_bytes,
            spill_load_bytes=self.spill_load_bytes,
            stack_bytes=self.stack_bytes,
            constant_bytes=self.constant_bytes,
        )


def assemble(ptx: str, name: str, *, line_info: bool = True) -> Assembly:
    """Assembles the PTX of one kernel for the target that it names.

    Warns with :class:`PallasiteSpillWarning` and :class:`PallasiteSerializationWarning`.

    Raises:
      CompilationError: there is no assembler, or it refuses the PTX; in this case with the source
        line of the kernel.
    """
    program = find_assembler()
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if target is None:
        raise CompilationError("PTX without a .target directive")
    with tempfile.TemporaryDirectory(prefix="pallasite-") as folder:
        source, output = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [str(program), f"-arch={target[1]}", "-v", "--warn-on-spills"]
        if line_info and "\t.loc\t" in ptx:
            command.append("-lineinfo")
        done = _run([*command, "-o", str(output), str(source)])
        messages = done.stderr + done.stdout
        if done.returncode != 0:
            raise refusal(messages, ptx, name)
        if not output.is_file():
            raise CompilationError(
                f"{program} made no machine code of kernel {name!r}",
                hint="PALLASITE_PTXAS=auto, or the path of NVIDIA's ptxas",
            )
        cubin = output.read_bytes()
    result = read_figures(messages, cubin)
    _warn(result, ptx, name)
    return result


def refusal(messages: str, ptx: str, name: str) -> CompilationError:
    """The error that says what ``ptxas`` refused, at the source line of the kernel."""
    for line in messages.splitlines():
        match = _MESSAGE.search(line)
        if match is None or match["kind"] not in ("error", "fatal"):
            continue
        number = int(match["line"]) if match["line"] else 0
        lines = ptx.splitlines()
        shown = lines[number - 1].strip() if 0 < number <= len(lines) else None
        return CompilationError(
            f"ptxas refused kernel {name!r}: {match['text'].strip()}",
            got=f"PTX line {number}: {shown}" if shown else None,
            location=source_of(ptx, number),
        )
    return CompilationError(
        f"ptxas failed on kernel {name!r}: {messages.strip() or 'it gave no reason'}"
    )


def source_of(ptx: str, line: int) -> SourceLocation | None:
    """The source position of a line of PTX, by the nearest ``.loc`` before it."""
    if line <= 0:
        return None
    for text in reversed(ptx.splitlines()[:line]):
        match = _LOC.match(text)
        if match is not None and match[2] != "0":
            path = re.search(rf'^\s*\.file\s+{match[1]}\s+"([^"]*)"', ptx, re.MULTILINE)
            if path is not None:
                return SourceLocation(path[1], int(match[2]), int(match[3]))
    return None


def read_figures(messages: str, cubin: bytes = b"") -> Assembly:
    """Reads what ``ptxas -v`` prints about one kernel."""

    def number(pattern: str) -> int:
        return sum(int(one) for one in re.findall(pattern, messages))

    return Assembly(
        cubin=cubin,
        registers=max(map(int, re.findall(r"Used (\d+) registers", messages)), default=0),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_memory_bytes=number(r"(\d+) bytes smem"),
        constant_bytes=number(r"(\d+) bytes cmem\[\d+\]"),
        messages=tuple(
            line.strip()
            for line in messages.splitlines()
            if ((match := _MESSAGE.search(line)) is not None and match["kind"] == "warning")
            or "(C75" in line
        ),  # fmt: skip
    )


def disassemble(cubin: bytes) -> str:
    """The machine code of a cubin as text.

    Raises:
      CompilationError: neither ``nvdisasm`` nor ``cuobjdump`` is installed, or both fail.
    """
    tools = [find_tool("nvdisasm"), find_tool("cuobjdump")]
    programs = [tool for tool in tools if tool.path is not None]
    if not programs:
        _require(tools[0], "disassemble")
    failure = ""
    with tempfile.TemporaryDirectory(prefix="pallasite-") as folder:
        source = pathlib.Path(folder, "kernel.cubin")
        source.write_bytes(cubin)
        for tool in programs:
            flags = ["-c"] if tool.name == "nvdisasm" else ["-sass"]
            done = _run([str(tool.path), *flags, str(source)])
            if done.returncode == 0:
                return done.stdout
            failure = done.stderr.strip()
    raise CompilationError(f"the machine code cannot be disassembled: {failure}")


def find_assembler() -> pathlib.Path:
    """Where ``ptxas`` is; raises CompilationError if it was not found."""
    return _require(find_tool("ptxas"), "assemble")


def _require(tool: Tool, verb: str) -> pathlib.Path:
    if tool.path is None:
        raise CompilationError(
            f"cannot {verb}: {tool.name} was not found ({tool.reason})", hint=tool.install
        )
    return tool.path


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # A heap that grows by huge pages, where the system lends them, has a third of the page faults.
    tunables = "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864"
    environment = {"GLIBC_TUNABLES": tunables, **os.environ}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _warn(result: Assembly, ptx: str, name: str) -> None:
    if result.spill_store_bytes or result.spill_load_bytes:
        warnings.warn(
            f"kernel {name!r} spills registers: {result.spill_store_bytes} bytes of stores and"
            f" {result.spill_load_bytes} bytes of loads per thread ({result.registers} registers)",
            PallasiteSpillWarning,
            stacklevel=3,
        )
    for message in result.messages:
        # ptxas says where it waits after every asynchronous matrix instruction of a function.
        if "serializ" in message.lower() or "(C75" in message:
            match = _MESSAGE.search(message)
            where = source_of(ptx, int(match["line"])) if match and match["line"] else None
            place = f" at {where}" if where is not None else ""
            warnings.warn(
                f"kernel {name!r}{place}: {message}", PallasiteSerializationWarning, stacklevel=3
            )


_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_MESSAGE = re.compile(
    r"(?:, line (?P<line>\d+);)?\s*(?P<kind>error|fatal|warning|info)\s*:\s*(?P<text>.*)"
)
