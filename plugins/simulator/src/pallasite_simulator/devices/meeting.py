"""Where the calls of one kernel on several devices meet: each comes on a thread of its own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pallasite.plugin import ExecutionError, PallasiteError
from pallasite_simulator.types import Array

PATIENCE = 30.0
"""After how many seconds a device that has not come is an error."""

type Run[Result] = Callable[[Sequence[Sequence[Array]]], Sequence[Result]]
"""From the inputs on each device, what comes out on each."""


@dataclasses.dataclass
class _Group[Result]:
    """One call of all devices.

    Attributes:
      inputs: of those that have come, by rank.
      outputs: what came out on each device, when the kernel has run.
      error: why it has not.
    """

    inputs: dict[int, Sequence[Array]] = dataclasses.field(default_factory=dict)
    outputs: Sequence[Result] | None = None
    error: Exception | None = None
    running: bool = False
    left: int = 0


class Meeting[Result]:
    """Where the devices of one call of a kernel in a program meet, each time the program runs.

    The first call of a device meets the first calls of the others, the second one the second ones,
    and so on: on each device, calls come in their order.

    Attributes:
      count: how many devices there are.
    """

    def __init__(self, name: str, count: int, location: str = ""):
        """Of a kernel of this name, which ``count`` devices run, and the user's line of it."""
        self._name = name
        self.count = count
        self._where = f"{location}: " if location else ""
        self._condition = threading.Condition()
        self._come = [0] * count
        self._groups: dict[int, _Group[Result]] = {}

    def run(self, rank: int, inputs: Sequence[Array], run: Run[Result]) -> Result:
        """Waits for the other devices; the last one to come runs the kernel on all of them.

        Args:
          rank: of the device that comes.
          inputs: its inputs.
          run: runs the kernel.

        Returns:
          What came out on this device.

        Raises:
          ExecutionError: another device did not come in time.
          PallasiteError: what running the kernel raised, on each device.
        """
        with self._condition:
            number = self._come[rank]
            self._come[rank] += 1
            group = self._groups.setdefault(number, _Group())
            group.inputs[rank] = inputs
            if len(group.inputs) == self.count and group.error is None:
                group.running = True
                inputs_of_all = [group.inputs[one] for one in range(self.count)]
            else:
                return self._wait(number, group, rank)
        try:
            group.outputs = run(inputs_of_all)
        except Exception as error:
            group.error = error
        with self._condition:
            self._condition.notify_all()
            return self._leave(number, group, rank)

    def _wait(self, number: int, group: _Group[Result], rank: int) -> Result:
        if group.error is None and not self._condition.wait_for(
            lambda: group.running or group.error is not None, PATIENCE
        ):
            group.error = self._missing(group)
            self._condition.notify_all()
        self._condition.wait_for(lambda: group.outputs is not None or group.error is not None)
        return self._leave(number, group, rank)

    def _leave(self, number: int, group: _Group[Result], rank: int) -> Result:
        group.left += 1
        if group.left == self.count:
            del self._groups[number]
        if group.error is not None:
            raise _copy(group.error)
        assert group.outputs is not None
        return group.outputs[rank]

    def _missing(self, group: _Group[Result]) -> ExecutionError:
        come = sorted(group.inputs)
        missing = [rank for rank in range(self.count) if rank not in group.inputs]
        return ExecutionError(
            f"{self._where}kernel {self._name!r} communicates, but not all devices of its mesh have"
            f" called it within {PATIENCE:g} s",
            got=f"{_devices(come)} came, {_devices(missing)} did not",
            expected=f"a call on each of the {self.count} devices",
            hint="call it on all devices, in the same order: not in a branch that only some take",
        )


def _devices(ranks: Sequence[int]) -> str:
    return f"device{'s' * (len(ranks) > 1)} " + ", ".join(map(str, ranks))


def _copy(error: Exception) -> Exception:
    """The error for one of several threads, each of which raises it."""
    if not isinstance(error, PallasiteError):
        return error
    made: Any = error.__class__.__new__(error.__class__)
    made.__dict__.update(error.__dict__)
    made.args = error.args
    return made  # type: ignore[no-any-return]
