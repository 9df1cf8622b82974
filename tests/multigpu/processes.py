"""Programs of several processes: each is one of the devices of a mesh."""

from __future__ import annotations

import pathlib
import socket
import subprocess
import sys
import textwrap

FOLDER = pathlib.Path(__file__).parent

START = """
    import os, sys, time
    RANK, COUNT, PORT = (int(one) for one in sys.argv[1:4])
    import jax, jax.numpy as jnp, numpy as np
    jax.distributed.initialize(
        f"127.0.0.1:{PORT}", COUNT, RANK, local_device_ids=LOCAL, heartbeat_timeout_seconds=100
    )
"""


def start(program: str, rank: int, count: int, port: int, local: str = "None"):
    """Starts one process of a program; its variables are RANK, COUNT and what START imports."""
    text = textwrap.dedent(START).replace("LOCAL", local) + textwrap.dedent(program)
    return subprocess.Popen(
        [sys.executable, "-c", text, str(rank), str(count), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run(program: str, count: int = 2, local: str = "None", timeout: float = 120):
    """Runs a program by several processes; returns code, output and errors of each."""
    port = free_port()
    running = [start(program, rank, count, port, local) for rank in range(count)]
    found = []
    for one in running:
        try:
            out, told = one.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for other in running:
                other.kill()
            out, told = one.communicate()
            told += "\n(killed: it did not end)"
        found.append((one.returncode, out, told))
    return found
