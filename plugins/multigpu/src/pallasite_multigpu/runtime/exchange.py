"""How processes of one JAX program tell each other things: the store of ``jax.distributed``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallasite.plugin import ExecutionError
from pallasite.plugin import jax_internals as _jax
from pallasite_multigpu.options import peer_timeout

PREFIX = "pallasite/multigpu"
"""What keys begin with."""
_FOR_EVER = 24 * 3600.0


def several() -> bool:
    """Whether this is one of several processes of a program."""
    return _jax.distributed_state.client is not None and _jax.distributed_state.num_processes > 1


def _client() -> Any:
    client = _jax.distributed_state.client
    if client is None:
        raise ExecutionError(
            "a kernel communicates with devices of other processes, which cannot be told where"
            " memory is",
            got="several processes without jax.distributed",
            expected="jax.distributed.initialize(...) in each process, before JAX is used",
        )
    return client


def tell(key: str, content: Any) -> None:
    """Tells all processes something, by a key of its own.

    Raises:
      ExecutionError: the program was started without ``jax.distributed``.
    """
    _client().key_value_set(f"{PREFIX}/{key}", json.dumps(content), allow_overwrite=True)


def hear(key: str, seconds: float | None = None) -> Any:
    """What a process tells by a key; waits until it does.

    Args:
      key: the key.
      seconds: how long to wait; by default, as long as kernels wait for their peers.

    Raises:
      ExecutionError: the program was started without ``jax.distributed``.
      TimeoutError: it was not told in time.
    """
    wait = peer_timeout() if seconds is None else seconds
    client = _client()
    try:
        text = client.blocking_key_value_get(f"{PREFIX}/{key}", int(1000 * (wait or _FOR_EVER)))
    except Exception as error:  # JAX's own class, by name only in its message.
        if "DEADLINE_EXCEEDED" in str(error):
            raise TimeoutError(str(error)) from error
        raise ExecutionError(
            "the store of jax.distributed fails, by which processes exchange addresses",
            got=str(error).splitlines()[0],
        ) from error
    return json.loads(text)


def heard(key: str) -> Any | None:
    """What was told by a key; None if nothing was."""
    try:
        text = _client().key_value_try_get(f"{PREFIX}/{key}")
    except Exception:  # It says so by an exception.
        return None
    return json.loads(text)


def meet(
    key: str,
    rank: int,
    processes: Sequence[int],
    make: Callable[[], Mapping[str, Any]],
) -> list[Any]:
    """Each process of a group makes something and tells the others; returns what all have made.

    If one cannot make it, all get its error, and none waits for it in vain.

    Args:
      key: of the group and the occasion.
      rank: the place of this process in the group.
      processes: numbers of all processes of the group.
      make: what this process makes.

    Raises:
      ExecutionError: a process does not come, or could not make it.
    """
    try:
        tell(f"{key}/{rank}", make())
    except Exception as error:
        tell(f"{key}/{rank}", {"error": str(error)})
        raise
    found = []
    missing: list[int] = []
    for place, process in enumerate(processes):
        try:
            found.append(hear(f"{key}/{place}", 0.001 if missing else None))
        except TimeoutError:
            missing.append(process)
    if missing:
        raise ExecutionError(
            "a kernel communicates with devices of processes that do not come",
            got=f"nothing from {_named(missing)} in {peer_timeout():g} seconds",
            expected="that all processes lower the same programs, in the same order",
            hint="the option peer_timeout says how long to wait",
        )
    for process, one in zip(processes, found, strict=True):
        if "error" in one:
            raise ExecutionError(
                f"process {process} cannot share memory with others", got=one["error"]
            )
    return found


def _named(processes: Sequence[int]) -> str:
    numbers = ", ".join(map(str, processes))
    return f"process {numbers}" if len(processes) == 1 else f"processes {numbers}"
