"""The order in which lanes at different places of a program are scheduled.

It is a weak topological order (F. Bourdoncle, "Efficient chaotic iteration strategies with
widenings", 1993): a loop's body comes before what follows the loop, and a join after all that leads
to it. When the lanes that are earliest go first, the others wait for them where they reconverge.
"""

from __future__ import annotations

from collections.abc import Sequence

type Node = tuple[bool, bool, tuple[int, ...]]
"""Whether an instruction ends a basic block, whether it may fall through, and its targets."""


def flow_order(code: Sequence[Node]) -> list[int]:
    """A rank for each instruction."""
    count = len(code)
    leaders = {0}
    for place, (ends, _, targets) in enumerate(code):
        if ends and place + 1 < count:
            leaders.add(place + 1)
        leaders.update(targets)
    starts = sorted(leaders)
    block_of = {start: number for number, start in enumerate(starts)}
    ends_of = [*starts[1:], count]
    graph: list[list[int]] = []
    for end in ends_of:
        _, falls, targets = code[end - 1]
        onward = [block_of[target] for target in targets]
        if falls and end < count:
            onward.append(block_of[end])
        graph.append(onward)
    rank = [0] * count
    position = 0
    for block in _order(graph, list(range(len(graph)))):
        for place in range(starts[block], ends_of[block]):
            rank[place] = position
            position += 1
    return rank


def _order(graph: Sequence[Sequence[int]], nodes: list[int]) -> list[int]:
    """The nodes in weak topological order; the first is the entry."""
    result: list[int] = []
    stack = [nodes]
    while stack:
        group = stack.pop()
        if len(group) == 1:
            result.append(group[0])
            continue
        inside = set(group)
        components = _components(graph, group, inside)
        # The stack is last in, first out: push in reverse of the order wanted.
        for component in reversed(components):
            if len(component) == 1:
                stack.append(component)
                continue
            head = component[0]
            stack.append(component[1:])
            stack.append([head])
    return result


def _components(
    graph: Sequence[Sequence[int]], nodes: list[int], inside: set[int]
) -> list[list[int]]:
    """Strongly connected components in topological order (Tarjan 1972); each starts with the node
    that is reached first, its other nodes are in order of discovery."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    path: list[int] = []
    on_path: set[int] = set()
    found: list[list[int]] = []
    for root in nodes:
        if root in index:
            continue
        work: list[tuple[int, int]] = [(root, 0)]
        while work:
            node, step = work.pop()
            if step == 0:
                index[node] = low[node] = len(index)
                path.append(node)
                on_path.add(node)
            descended = False
            for number in range(step, len(graph[node])):
                onward = graph[node][number]
                if onward not in inside:
                    continue
                if onward not in index:
                    work.append((node, number + 1))
                    work.append((onward, 0))
                    descended = True
                    break
                if onward in on_path:
                    low[node] = min(low[node], index[onward])
            if descended:
                continue
            if low[node] == index[node]:
                place = path.index(node)
                component = path[place:]
                del path[place:]
                on_path.difference_update(component)
                found.append(component)
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[node])
    return found[::-1]
