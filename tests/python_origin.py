"""The process that those of ``python_processes`` are forked from: see there."""

import atexit
import gc
import importlib
import json
import os
import runpy
import socket
import struct
import sys
import threading
import types

IMPORTED = (
    "hypothesis",
    "jax",
    "jax.experimental.pallas",
    "jax.extend",
    *(f"jaxlib.mlir.dialects.{name}" for name in ("llvm", "math", "mhlo", "nvvm", "scf", "vector")),
    "llvmlite.binding",
    "pytest",
)
FOUND_BY_PYTHON = sys.path[1:]


def main():
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    # What runs is short, and looking through all that it traces and compiles takes a tenth of it.
    gc.set_threshold(1 << 30)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        request = serve(channel)
    end(lambda: with_room(lambda: become(**request)))


def with_room(program):
    """Runs a program where there is room for the frames of its calls: see ``room_for_calls``."""
    return program()


with_room.__code__ = with_room.__code__.replace(co_stacksize=(1 << 17) + (1 << 10))


def serve(channel):
    """Forks a process for each request; returns in that one, with the request."""
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1, 3)
        if not message:
            os._exit(0)
        process = os.fork()
        if process == 0:
            with os.fdopen(files[0]) as file:
                file.seek(0)
                request = json.load(file)
            for number, file in enumerate(files[1:], 1):
                os.dup2(file, number)
                os.close(file)
            return request
        for file in files:
            os.close(file)
        channel.sendall(struct.pack("q", process))
        _, status = os.waitpid(process, 0)
        channel.sendall(struct.pack("q", os.waitstatus_to_exitcode(status)))


def become(arguments, environment, folder):
    """Goes on as Python does that was started with arguments in an environment and a folder."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    import jax

    jax.config.update("jax_platforms", environment.get("JAX_PLATFORMS"))
    kind, *rest = arguments
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *paths, *FOUND_BY_PYTHON]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        sys.path[0] = folder
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        sys.argv[:] = arguments
        main.__file__ = kind
        with open(kind) as file:
            code = compile(file.read(), kind, "exec")
    exec(code, main.__dict__)


def end(program):
    """Runs a program and ends as Python does, but for taking apart what was imported."""
    status = 0
    try:
        program()
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if status and not isinstance(leave.code, int):
            print(leave.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
