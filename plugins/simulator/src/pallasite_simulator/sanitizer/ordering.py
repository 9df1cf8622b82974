"""What the threads of one wave know to have happened: the effect of synchronization."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from pallasite_simulator.distinct import distinct_inverse
from pallasite_simulator.sanitizer import entries
from pallasite_simulator.sanitizer.clocks import NOTHING
from pallasite_simulator.sanitizer.phases import PhaseRows, join_pairs
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave
    from pallasite_simulator.sanitizer.launch_state import LaunchState

_BLOCK, _CLUSTER, _CHIP, _SYSTEM = range(4)
"""Scopes, narrower ones first."""

_SCOPES = {"cta": _BLOCK, "cluster": _CLUSTER, "gpu": _CHIP, "sys": _CHIP}
"""Where there is one device."""


class Ordering:
    """Rows of clocks for all lanes of a wave.

    Attributes:
      first_domain: the number of the wave's first domain in the launch.
      width: lanes of a domain.
      column: of each lane.
      code: of each lane: domain and column as in :mod:`.entries`.
      rows: of each lane.
      fenced: for each lane: up to which event its own writes are visible to the asynchronous
        proxy.
      copied, copies_fenced: for each lane: up to which event it has waited for its own ``cp.async``
        copies, and up to which these are visible to the asynchronous proxy; None if there are none.
    """

    def __init__(self, wave: Wave, launch: LaunchState):
        self.wave = wave
        self.launch = launch
        self.clocks = launch.clocks
        self.first_domain = len(launch.domains)
        cluster = wave.cluster_size
        for start in range(0, wave.block_count, cluster):
            launch.domains.append([int(one) for one in wave.blocks[start : start + cluster]])
            launch.devices.append(wave.geometry.device)
        self._device = wave.geometry.device
        self._scopes = _SCOPES if self._device is None else {**_SCOPES, "sys": _SYSTEM}
        self.width: int = cluster * wave.lanes_per_block
        self.column: Array = wave.all_numbers % self.width
        self.domain: Array = self.first_domain + wave.all_numbers // self.width
        self.code: Array = entries.encode(0, self.domain, self.column)
        self.rows: Array = np.zeros(wave.lane_count, np.int64)
        self.fenced: Array = np.zeros(wave.lane_count, np.int32)
        self.copied: Array | None = None
        self.copies_fenced: Array | None = None
        if self.clocks.copies:
            self.copied = np.zeros(wave.lane_count, np.int32)
            self.copies_fenced = np.zeros(wave.lane_count, np.int32)
        self._uniform: int | None = NOTHING
        self._keys: dict[Hashable, int] = {}
        self._phases = PhaseRows(self.clocks)
        self._ended: dict[int, int] = {}
        # By scope: of the last fence of each lane, what it knew, when that was, and its `fenced`.
        self._at_fence: dict[int, tuple[Array, Array, Array]] = {}
        # By lane and scope: what it has read, and will know after a fence.
        self._seen: dict[int, dict[int, Mapping[int, int]]] = {}
        # By lane: what its fences for mbarriers published.
        self._initialized: dict[int, int] = {}
        # By lane: what it knew at its last fence for global memory.
        self._global: Array = np.zeros(wave.lane_count, np.int64)
        launch.hold(self.roots)

    def roots(self) -> Iterable[int]:
        """Rows in use."""
        yield from (int(row) for row in np.unique(self.rows))
        yield from self._keys.values()
        yield from self._phases.used()
        yield from self._ended.values()
        for rows, _, _ in self._at_fence.values():
            yield from (int(row) for row in np.unique(rows))
        for seen in self._seen.values():
            for known in seen.values():
                yield from known.values()
        yield from self._initialized.values()
        yield from (int(row) for row in np.unique(self._global))

    # Rows -----------------------------------------------------------------------------------------

    def whole(self, lanes: Array) -> bool:
        """Whether these are all lanes of the wave, each once: a lane may make several accesses."""
        every = self.wave.all_numbers
        return len(lanes) == len(every) and (lanes is every or np.array_equal(lanes, every))

    def rows_of(self, lanes: Array) -> Values:
        """Rows of lanes: an array, or an integer if all have the same."""
        if self._uniform is not None:
            return self._uniform
        rows = self.rows if self.whole(lanes) else self.rows[lanes]
        first = rows[0]
        if len(rows) == 1 or (rows == first).all():
            if rows is self.rows:
                self._uniform = int(first)
            return int(first)
        return rows

    def floor(self, rows: Values) -> int:
        """Up to which event everything in their domain is known to all."""
        if isinstance(rows, int):
            return int(self.clocks.floor[rows])
        return int(self.clocks.floor[rows].min())

    def _set(self, lanes: Array, row: Values) -> None:
        if self.whole(lanes):
            self.rows[:] = row
            self._uniform = row if isinstance(row, int) else None
        else:
            self.rows[lanes] = row
            if row != self._uniform if isinstance(row, int) else True:
                self._uniform = None

    def learn(self, lanes: Array, row: int) -> None:
        """Lanes of one domain get to know what a row knows."""
        if row == NOTHING:
            return
        before = self.rows_of(lanes)
        if isinstance(before, int):
            after = self.clocks.join(before, row)
            if after != before:
                self._set(lanes, after)
            return
        known, inverse = distinct_inverse(before)
        joined = np.array([self.clocks.join(one, row) for one in known.tolist()])
        self._set(lanes, joined[inverse])

    def learn_each(self, lanes: Array, rows: Array) -> None:
        """Each lane gets to know what a row knows, given for each."""
        before = self.rows_of(lanes)
        after = join_pairs(self.clocks, before, rows)
        if not (isinstance(before, int) and isinstance(after, int) and after == before):
            self._set(lanes, after)

    def publish(self, lanes: Array) -> int:
        """The row of all that lanes of one domain know and did."""
        copies = None
        if self.copied is not None and self.copies_fenced is not None:
            copies = (self.copied[lanes], self.copies_fenced[lanes])
        return self.clocks.publish(self.rows[lanes], self.column[lanes], self.fenced[lanes], copies)

    def publish_groups(self, lanes: Array, starts: Array) -> Values:
        """The same for groups of lanes, given where each begins: an array, or an integer if all
        groups get the same row, as they do where blocks run in step."""
        count = len(starts)
        each, rest = divmod(len(lanes), count)
        if count == 1:
            return self.publish(lanes)
        if not rest and (starts == np.arange(0, len(lanes), each)).all():
            whole = lanes.reshape(count, each)
            known = [self.rows, self.column, self.fenced]
            if self.copied is not None and self.copies_fenced is not None:
                known += [self.copied, self.copies_fenced]
            tables = [values[whole] for values in known]
            if all((table[1:] == table[0]).all() for table in tables):
                return self.publish(whole[0])
        copies = None
        if self.copied is not None and self.copies_fenced is not None:
            copies = (self.copied[lanes], self.copies_fenced[lanes])
        if count == len(lanes):
            rows, columns, fenced = self.rows[lanes], self.column[lanes], self.fenced[lanes]
            return self.clocks.publish_each(rows, columns, fenced, copies)
        ends = np.append(starts[1:], len(lanes))
        bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        return np.array([self.publish(lanes[start:end]) for start, end in bounds])

    def groups(self, lanes: Array, numbers: Array) -> Iterable[Array]:
        """Lanes by number."""
        if len(lanes) == 1:
            yield lanes
            return
        if (numbers[1:] < numbers[:-1]).any():
            order = np.argsort(numbers, kind="stable")
            lanes, numbers = lanes[order], numbers[order]
        ends = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        start = 0
        for end in [*ends.tolist(), len(lanes)]:
            yield lanes[start:end]
            start = end

    def by_domain(self, lanes: Array) -> Iterable[tuple[int, Array]]:
        """Lanes by domain."""
        for group in self.groups(lanes, self.domain[lanes]):
            yield int(self.domain[group[0]]), group

    # Barriers -------------------------------------------------------------------------------------

    def barrier(self, arrived: Array, left: Array) -> None:
        """All that ``arrived`` lanes did happens before what ``left`` lanes will do."""
        row = self.publish(arrived)
        if self._ended:
            block = int(self.wave.lane_block[arrived[0]])
            row = self.clocks.join(row, self._ended.get(block, NOTHING))
        if len(left) == len(arrived):
            self._set(left, row)
        elif len(left):
            self.learn(left, row)

    def barriers(self, lanes: Array, groups: Array) -> None:
        """Many barriers, each with all lanes of a number in ``groups``."""
        blocks = groups is self.wave.lane_block and self.wave.cluster_size == 1
        if blocks and self.whole(lanes) and not self._ended and self._alike():
            self._set(lanes, self.publish(lanes[: self.width]))
            return
        for group in self.groups(lanes, groups):
            self.barrier(group, group)

    def _alike(self) -> bool:
        """Whether the lanes of all domains know alike: no reason to look at each domain."""
        alike = isinstance(self.rows_of(self.wave.all_numbers), int)
        for values in (self.fenced, self.copied, self.copies_fenced):
            if alike and values is not None:
                table = values.reshape(-1, self.width)
                alike = len(table) == 1 or bool((table[1:] == table[0]).all())
        return alike

    # Keys -----------------------------------------------------------------------------------------

    def release(self, lanes: Array, key: Hashable, scope: str) -> None:
        """All that the lanes did becomes part of a key."""
        if not _is_location(key):
            for _, group in self.by_domain(lanes):
                self.add_to_key(key, self.publish(group))
            return
        for group in self.groups(lanes, self.wave.lane_block[lanes]):
            self._publish_to(int(group[0]), key, self.publish(group), self._scopes[scope])

    def _publish_to(self, lane: int, key: Hashable, row: int, scope: int) -> None:
        """What a row knows becomes part of a place in global memory, for those in the scope of a
        lane."""
        domain = int(self.domain[lane])
        for wide in self._wide_keys(key, scope):
            known = self.clocks.foreign[row]
            released = self.clocks.join_foreign(known, {domain: self.clocks.plain(row)})
            before = self.launch.locations.get(wide)
            self.launch.locations[wide] = self.clocks.join_foreign(before, released) or {}
        for level in range(min(scope, _CLUSTER) + 1):
            self.add_to_key(self._key_of(lane, key, level), row)

    def _wide_keys(self, key: Hashable, scope: int) -> list[Hashable]:
        """The keys of a place for those in a scope who may be in other clusters."""
        keys: list[Hashable] = []
        if scope >= _CHIP:
            keys.append(key if self._device is None else ("device", self._device, key))
        if scope >= _SYSTEM:
            keys.append(key)
        return keys

    def _key_of(self, lane: int, key: Hashable, scope: int) -> Hashable:
        """The key for those in the scope of a lane."""
        if scope == _BLOCK:
            return ("block", int(self.wave.lane_block[lane]), key)
        return (int(self.domain[lane]), key)

    def acquire(self, lanes: Array, key: Hashable, scope: str) -> None:
        """All that is part of a key happens before what the lanes will do."""
        if not _is_location(key):
            row = self._row_of(key)
            if self._ended and isinstance(key, tuple) and key[0] == "cluster barrier":
                first = int(self.wave.lane_cluster_block[lanes[0]])
                ended = range(first, first + self.wave.cluster_size)
                row = self.clocks.join_all([row, *(self._ended.get(b, NOTHING) for b in ended)])
            self.learn(lanes, row)
            return
        level = self._scopes[scope]
        for group in self.groups(lanes, self.wave.lane_block[lanes]):
            first = int(group[0])
            for one in range(min(level, _CLUSTER) + 1):
                self.learn(group, self._keys.get(self._key_of(first, key, one), NOTHING))
            domain = int(self.domain[first])
            for wide in self._wide_keys(key, level):
                self._learn_from(domain, group, self.launch.locations.get(wide, {}))

    def _learn_from(self, domain: int, lanes: Array, released: Mapping[int, int]) -> None:
        """Lanes of a domain learn what was released to all domains."""
        if not released or released.keys() == {domain}:
            return
        self.learn(lanes, released.get(domain, NOTHING))
        for group in self.groups(lanes, self.rows[lanes]):
            before = int(self.rows[group[0]])
            after = self.clocks.with_foreign(before, released)
            if after != before:
                self._set(group, after)

    def add_to_key(self, key: Hashable, row: int) -> None:
        """What a row knows becomes part of a key."""
        if _is_phase(key):
            place, phase = np.array([key[1]]), np.array([key[2]])
            self._phases.add(self._phases.numbers(place), phase, row)
            return
        if isinstance(key, tuple) and key[0] == "cluster barrier":
            # Phases are waited for before the next but one begins.
            self._keys.pop((*key[:-1], key[-1] - 2), None)
        self._keys[key] = self.clocks.join(self._keys.get(key, NOTHING), row)

    def _row_of(self, key: Hashable) -> int:
        """What is part of a key."""
        if _is_phase(key):
            place, phase = np.array([key[1]]), np.array([key[2]])
            return int(self._phases.get(self._phases.numbers(place), phase)[0])
        return self._keys.get(key, NOTHING)

    def releases(self, lanes: Array, places: Array, phases: Array) -> None:
        """:meth:`release` of each lane to a phase of an mbarrier at a place."""
        if len(places) > 1 and (places[1:] < places[:-1]).any():
            order = np.argsort(places, kind="stable")
            lanes, places, phases = lanes[order], places[order], phases[order]
        starts = np.append(0, np.flatnonzero(places[1:] != places[:-1]) + 1)
        rows = self.publish_groups(lanes, starts)
        self._phases.add(self._phases.numbers(places[starts]), phases[starts], rows)

    def acquires(self, lanes: Array, places: Array, phases: Array) -> None:
        """:meth:`acquire` of each lane from a phase of an mbarrier at a place."""
        self.learn_each(lanes, self._phases.get(self._phases.numbers(places), phases))

    def add_to_phases(self, places: Array, phases: Array, rows: Array) -> None:
        """What rows know becomes part of phases of mbarriers at places."""
        numbers = self._phases.numbers(places)
        while len(numbers):
            # Of several rows for one place, one after the other.
            _, first = np.unique(numbers, return_index=True)
            self._phases.add(numbers[first], phases[first], rows[first])
            if len(first) == len(numbers):
                return
            left = np.ones(len(numbers), np.bool_)
            left[first] = False
            numbers, phases, rows = numbers[left], phases[left], rows[left]

    def forget(self, key: Hashable) -> None:
        """The key will not be used again."""
        self._keys.pop(key, None)

    # Fences ---------------------------------------------------------------------------------------

    def proxy_fence(self, lanes: Array, kind: str) -> None:
        """What the lanes did and know is visible to the asynchronous proxy too; of global memory
        only, what they know is so to copies that they begin themselves."""
        self.fenced[lanes] = self.clocks.time
        if kind in ("async", "async.global"):
            self.clocks.global_fence = self.clocks.time
        if kind == "async.global":
            known, inverse = distinct_inverse(self.rows[lanes])
            self._global[lanes] = np.array([self.clocks.fence(int(one)) for one in known])[inverse]
            return
        if self.copied is not None and self.copies_fenced is not None:
            self.copies_fenced[lanes] = self.copied[lanes]
        before = self.rows_of(lanes)
        if isinstance(before, int):
            after = self.clocks.fence(before)
            if after != before:
                self._set(lanes, after)
            return
        known, inverse = distinct_inverse(before)
        self._set(lanes, np.array([self.clocks.fence(one) for one in known.tolist()])[inverse])

    def rows_of_global(self, lanes: Array, rows: Array) -> Array:
        """Rows of copies of global memory that lanes begin, with what fences made visible."""
        if not self._global[lanes].any():
            return rows
        pairs = zip(rows.tolist(), self._global[lanes].tolist(), strict=True)
        return np.array([self.clocks.join(row, known) for row, known in pairs])

    def fence(self, lanes: Array, scope: str) -> None:
        """A fence makes later relaxed writes release, and earlier relaxed reads acquire, for those
        in its scope."""
        widest = self._scopes[scope]
        for lane in [int(lane) for lane in lanes if int(lane) in self._seen]:
            seen = self._seen[lane]
            for level in [one for one in seen if one <= widest]:
                self._learn_from_all(lane, seen.pop(level))
            if not seen:
                del self._seen[lane]
        for level in range(widest + 1):
            if level not in self._at_fence:
                count = len(self.rows)
                self._at_fence[level] = (
                    np.zeros(count, np.int64),
                    np.full(count, -1, np.int64),
                    np.zeros(count, np.int32),
                )
            rows, times, fenced = self._at_fence[level]
            rows[lanes] = self.rows[lanes]
            times[lanes] = self.clocks.time
            fenced[lanes] = self.fenced[lanes]

    def initialized(self, lanes: Array, columns: Array, time: int) -> None:
        """Lanes execute a fence for mbarriers that they initialized: events of columns, one for
        each of the lanes."""
        for lane, column in zip(lanes.tolist(), columns.tolist(), strict=True):
            row = self.clocks.advance(NOTHING, column, time, fenced=True)
            self.learn(np.array([lane]), row)
            before = self._initialized.get(lane, NOTHING)
            self._initialized[lane] = self.clocks.join(before, row)

    def _fence_row(self, lane: int, scope: int) -> int:
        """What a lane knew and had done at its last fence of a scope; nothing if there was none."""
        if scope not in self._at_fence or self._at_fence[scope][1][lane] < 0:
            return NOTHING
        rows, times, fenced = self._at_fence[scope]
        one = slice(lane, lane + 1)
        return self.clocks.publish(rows[one], self.column[one], fenced[one], time=int(times[lane]))

    def _fence_rows(self, lanes: Array, scope: int) -> int:
        """What lanes knew and had done at their last fences of a scope, together."""
        if scope not in self._at_fence:
            return NOTHING
        rows, times, fenced = self._at_fence[scope]
        found = []
        for time in np.unique(times[lanes]).tolist():
            if time >= 0:
                then = lanes[times[lanes] == time]
                found.append(
                    self.clocks.publish(rows[then], self.column[then], fenced[then], time=time)
                )
        return self.clocks.join_all(found)

    def _learn_from_all(self, lane: int, released: Mapping[int, int]) -> None:
        domain = int(self.domain[lane])
        one = np.array([lane])
        self.learn(one, released.get(domain, NOTHING))
        self._learn_from(domain, one, released)

    def release_fenced(self, lanes: Array, key: Hashable, scope: str) -> None:
        """What lanes knew and had done at their last fence becomes part of a key, for those in the
        scopes of both the fence and the release."""
        if not self._at_fence and not self._initialized:
            return
        widest = self._scopes[scope]
        if not _is_location(key):
            row = self._fence_rows(lanes, widest)
            if self._initialized:
                known = (self._initialized.get(lane, NOTHING) for lane in lanes.tolist())
                row = self.clocks.join_all([row, *known])
            if row != NOTHING:
                self.add_to_key(key, row)
            return
        for lane in lanes.tolist():
            published = NOTHING
            for level in range(widest, -1, -1):
                row = self._fence_row(lane, level)
                if row not in (NOTHING, published):
                    self._publish_to(lane, key, row, level)
                    published = row

    def see(self, lanes: Array, key: Hashable, scope: str) -> None:
        """What is part of a key is known to lanes when they have executed a fence."""
        for lane in lanes.tolist():
            domain = int(self.domain[lane])
            found: dict[int, Mapping[int, int]] = {}
            if not _is_location(key):
                local = self._row_of(key)
                if local != NOTHING:
                    found[_BLOCK] = {domain: self.clocks.plain(local)}
            else:
                widest = self._scopes[scope]
                for level in range(min(widest, _CLUSTER) + 1):
                    row = self._keys.get(self._key_of(lane, key, level), NOTHING)
                    if row != NOTHING:
                        found[level] = {domain: self.clocks.plain(row)}
                for level, wide in enumerate(self._wide_keys(key, widest), _CHIP):
                    if self.launch.locations.get(wide):
                        found[level] = self.launch.locations[wide]
            if found:
                seen = self._seen.setdefault(lane, {})
                for level, released in found.items():
                    seen[level] = self.clocks.join_foreign(seen.get(level), released) or {}

    # Ends -----------------------------------------------------------------------------------------

    def exit(self, lanes: Array) -> list[tuple[int, int]]:
        """Lanes end: barriers no longer wait for them, but order what they did.

        Returns:
          Blocks of clusters that have ended as a whole, and what their threads knew.
        """
        wave, devices = self.wave, self.launch.between_devices
        if devices is not None and self._device is not None:
            for domain, group in self.by_domain(lanes):
                devices.ended(self._device, domain, self.publish(group))
        if wave.cluster_size == 1 and wave.exited.all():
            return []
        ended = []
        for group in self.groups(lanes, wave.lane_block[lanes]):
            block = int(wave.lane_block[group[0]])
            before = self._ended.get(block, NOTHING)
            row = self._ended[block] = self.clocks.join(before, self.publish(group))
            first = block * wave.lanes_per_block
            if wave.cluster_size > 1 and wave.exited[first : first + wave.lanes_per_block].all():
                ended.append((block, row))
        return ended

    def finish(self) -> None:
        """All lanes have ended."""
        self.launch.drop(self.roots)


def _is_location(key: Any) -> bool:
    """Whether the key is a place in global memory, which all waves share."""
    return isinstance(key, tuple) and key[:2] == ("location", "global")


def _is_phase(key: Any) -> TypeGuard[tuple[str, int, int]]:
    """Whether the key is a phase of an mbarrier."""
    return isinstance(key, tuple) and key[0] == "mbarrier" and len(key) == 3
