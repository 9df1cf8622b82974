"""Words of profiles made by hand, and the regions of a trace."""

from __future__ import annotations

import collections
import json

import numpy as np

from pallasite_std.profiler.profile import Profile

END = 1 << 31
PROFILE = Profile(0, ("outer", "inner"), "warpgroup", recorders=2, events=4, directory="unused")


def slot(*events, start=1000, clock=0, length=1000, cycles=None, sm=3, room=4, count=None):
    """The words of one recorder; events are pairs of a word and cycles since the start."""
    end = start + length
    last = clock + (length if cycles is None else cycles)
    words = [len(events) if count is None else count, sm, start, start >> 32]
    words += [clock, last, end, end >> 32]
    for word, after in events[:room]:
        words += [word, clock + after]
    words += [0xDEADBEEF] * (8 + 2 * room - len(words))
    return np.array([word % 2**32 for word in words], np.uint32)


NESTED = ((0, 10), (1, 20), (1 | END, 30), (END, 40))


def matched(trace):
    """The regions of each thread of a trace as (name, begin, end); fails unless all are matched."""
    open_ = collections.defaultdict(list)
    found = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        where = event["pid"], event["tid"]
        if event["ph"] == "B":
            open_[where].append((event["name"], event["ts"], len(found[where])))
            found[where].append(None)
        elif event["ph"] == "E":
            name, begin, place = open_[where].pop()
            assert name == event["name"] and begin <= event["ts"]
            found[where][place] = (name, begin, event["ts"])
    assert not any(open_.values())
    return dict(found)


def read_all(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*-trace.json"))]
