"""LLVM in a process of its own, which it may end; see :mod:`pallasite_std.llvm_process`.

It is run as a script, and imports of Python what it needs and of other packages llvmlite alone. The
first line of its input is a JSON list: the options of LLVM, the target triple and the arguments of
the target machine; it is answered by the line ``ready``. Then follow requests, each a line with a
verb and a number of bytes, and LLVM IR of this length; each is answered by a line with the length
of the result, and that:

* ``read`` parses and verifies a module; the result is what is said against it, or nothing.
* ``emit`` returns the assembly of a valid one.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

READY = b"ready\n"


def main() -> None:
    """Answers requests until there is no more input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    options, triple, arguments = json.loads(requests.readline())
    import llvmlite.binding as binding

    for option in options:
        binding.set_option("pallasite", option)
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(**arguments)
    answers.write(READY)
    answers.flush()
    while line := requests.readline():
        verb, size = line.split()
        result = answer(binding, machine, verb, requests.read(int(size)).decode()).encode()
        answers.write(b"%d\n%b" % (len(result), result))
        answers.flush()


def answer(binding: Any, machine: Any, verb: bytes, llvm: str) -> str:
    """The answer to one request."""
    with binding.create_context() as context:
        try:
            with binding.parse_assembly(llvm, context) as module:
                module.verify()
                return str(machine.emit_assembly(module)) if verb == b"emit" else ""
        except RuntimeError as error:
            if verb == b"emit":
                raise
            return str(error)


if __name__ == "__main__":
    main()
