"""The order in which lanes at different places take turns."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csgraph

from pallasite_simulator.engine.flow import flow_order


def straight(*targets, falls=True):
    return (bool(targets), falls, targets)


def test_straight_code_keeps_its_order():
    assert flow_order([straight()] * 4) == [0, 1, 2, 3]


def test_a_loop_that_lies_behind_its_exit_comes_before_it():
    # 0: bra 2; 1: (exit block) end; 2: body, bra 2 if ..; 3: bra 1
    code = [(True, False, (2,)), (True, False, ()), (True, True, (2,)), (True, False, (1,))]
    rank = flow_order(code)
    assert rank[0] < rank[2] < rank[3] < rank[1]


@st.composite
def programs(draw):
    count = draw(st.integers(2, 25))
    places = st.integers(0, count - 1)
    code = []
    for _ in range(count):
        kind = draw(st.sampled_from(["plain", "plain", "branch", "jump", "table", "end"]))
        if kind == "plain":
            code.append((False, True, ()))
        elif kind == "branch":
            code.append((True, True, (draw(places),)))
        elif kind == "jump":
            code.append((True, False, (draw(places),)))
        elif kind == "table":
            code.append((True, False, tuple(draw(st.lists(places, min_size=1, max_size=3)))))
        else:
            code.append((True, False, ()))
    return code


def edges_of(code):
    found = [(place, target) for place, (_, _, targets) in enumerate(code) for target in targets]
    last = len(code) - 1
    return found + [(n, n + 1) for n, (_, falls, _) in enumerate(code) if falls and n < last]


@given(programs())
def test_loops_are_contiguous_and_come_before_what_follows_them(code):
    rank = flow_order(code)
    assert sorted(rank) == list(range(len(code)))
    graph = np.zeros((len(code), len(code)))
    for start, end in edges_of(code):
        graph[start, end] = 1
    _, component = csgraph.connected_components(graph, directed=True, connection="strong")
    for number in set(component):
        places = sorted(rank[one] for one in np.flatnonzero(component == number))
        # Blocks of one loop lie together.
        assert places == list(range(places[0], places[0] + len(places)))
    for start, end in edges_of(code):
        if component[start] != component[end]:
            assert rank[start] < rank[end]


@given(programs())
def test_instructions_of_a_block_follow_one_another(code):
    rank = flow_order(code)
    leaders = {0} | {t for _, _, targets in code for t in targets}
    leaders |= {place + 1 for place, (ends, _, _) in enumerate(code) if ends}
    for place in range(1, len(code)):
        if place not in leaders:
            assert rank[place] == rank[place - 1] + 1
