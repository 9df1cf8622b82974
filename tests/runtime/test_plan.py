"""The order of kernel parameters, and which buffer each gets."""

from __future__ import annotations

import dataclasses

import pytest
from fake_kernels import inputs, outputs, scratch, tensor_map
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.errors import InternalError, SourceLocation, UnsupportedError
from pallasite.launch import ArrayParameter, BufferKind, LaunchParameters
from pallasite.launch_plan import canonical_order, plan_launch


def launch_of(parameters, ins=(), outs=(), scratches=(), aliases=(), order=True):
    return LaunchParameters(
        grid=(1, 1, 1),
        block=(128, 1, 1),
        cluster=(1, 1, 1),
        shared_memory_bytes=0,
        parameters=canonical_order(parameters, aliases) if order else tuple(parameters),
        inputs=tuple(ins),
        outputs=tuple(outs),
        scratch=tuple(scratches),
        aliases=tuple(aliases),
    )


def memory_of(buffer, aliases):
    """Which memory a buffer is: an aliased output is its input."""
    input_of = {output: input_ for input_, output in aliases}
    if buffer.kind is BufferKind.OUTPUT and buffer.index in input_of:
        return (BufferKind.INPUT, input_of[buffer.index])
    return (buffer.kind, buffer.index)


def check(launch):
    """What the launcher and XLA do with a plan must give each parameter its own memory."""
    plan = plan_launch(launch)
    call = [*plan.operands, *plan.results]
    assert len(launch.parameters) <= len(call)
    assert len(launch.parameters) >= len(plan.operands)
    for parameter, buffer in zip(launch.parameters, call, strict=False):
        assert memory_of(parameter.buffer, launch.aliases) == memory_of(buffer, launch.aliases)
    # Outputs and scratch: every operand is aliased with its one result.
    results = [memory_of(buffer, launch.aliases) for buffer in plan.results]
    assert len(set(results)) == len(results)
    shared = dict(plan.aliases)
    for position, buffer in enumerate(plan.operands):
        memory = memory_of(buffer, launch.aliases)
        read_only = memory[0] is BufferKind.INPUT and memory[1] not in dict(launch.aliases)
        assert (position in shared) == (not read_only)
        if not read_only:
            assert results[shared[position]] == memory
            assert sum(memory_of(other, launch.aliases) == memory for other in plan.operands) == 1
            assert (buffer.shape, buffer.dtype) == (
                plan.results[shared[position]].shape,
                plan.results[shared[position]].dtype,
            )
    for output, position in enumerate(plan.output_positions):
        touched = any(
            memory_of(p.buffer, launch.aliases) == memory_of(launch.outputs[output], launch.aliases)
            for p in launch.parameters
        )
        assert (position is not None) == touched
        if position is not None:
            assert plan.results[position] == launch.outputs[output]
    # An aliased pair has its result only together with its operand.
    for input_, _ in launch.aliases:
        memory = (BufferKind.INPUT, input_)
        assert (memory in results) == (memory in [memory_of(b, ()) for b in plan.operands])
    return plan


@st.composite
def launches(draw):
    shape = (64, 64)
    ins = inputs(*[shape] * draw(st.integers(0, 4)))
    outs = outputs(*[shape] * draw(st.integers(0, 4)))
    temporary = scratch(*[shape] * draw(st.integers(0, 3)), zeroed=draw(st.booleans()))
    pairs = list(zip(range(len(ins)), draw(st.permutations(range(len(outs)))), strict=False))
    aliases = tuple(pair for pair in pairs if draw(st.booleans()))
    parameters = []
    for buffer in (*ins, *outs, *temporary):
        choices = [ArrayParameter(buffer)]
        choices += [tensor_map(buffer, (box, 32)) for box in (8, 16, 32)]
        is_plain_input = buffer.kind is BufferKind.INPUT and buffer.index not in dict(aliases)
        limit = 4 if is_plain_input else 2
        if memory_of(buffer, aliases) != (buffer.kind, buffer.index) or (
            buffer.kind is BufferKind.INPUT and not is_plain_input
        ):
            limit = 1
        count = draw(st.integers(0, limit))
        first = draw(st.integers(0, 1)) if not buffer.zeroed else 0
        parameters += choices[first : first + count]
    return launch_of(draw(st.permutations(parameters)), ins, outs, temporary, aliases)


@settings(max_examples=400, deadline=None)
@given(launches())
def test_every_parameter_gets_its_memory(launch):
    check(launch)
    assert canonical_order(launch.parameters, launch.aliases) == launch.parameters


@settings(max_examples=100, deadline=None)
@given(launches())
def test_zeroed_scratch_has_one_clearing_parameter(launch):
    plan = plan_launch(launch)
    cleared = [launch.parameters[position].buffer for position in plan.zeroed]
    used = {p.buffer for p in launch.parameters if p.buffer.zeroed}
    assert len(cleared) == len(set(cleared))
    assert set(cleared) == used


def test_order_of_a_plain_kernel():
    a, b = inputs((64, 64), (64, 64))
    (c,) = outputs((64, 64))
    maps = [tensor_map(a, (8, 32)), tensor_map(a, (16, 32))]
    order = canonical_order([ArrayParameter(c), maps[0], ArrayParameter(b), maps[1]])
    assert order == (maps[0], maps[1], ArrayParameter(b), ArrayParameter(c))
    plan = plan_launch(launch_of(order, [a, b], [c]))
    assert plan.operands == (a, a, b)
    assert plan.results == (c,)
    assert plan.aliases == ()


def test_output_with_two_parameters_gets_an_uninitialised_operand():
    (a,), (c, d) = inputs((64, 64)), outputs((64, 64), (64, 64))
    order = canonical_order(
        [tensor_map(c, (8, 32)), ArrayParameter(c), ArrayParameter(d), ArrayParameter(a)]
    )
    assert [type(p).__name__[:5] + str(p.buffer.index) for p in order] == [
        "Array0", "Array0", "Tenso0", "Array1",
    ]  # fmt: skip
    plan = check(launch_of(order, [a], [c, d]))
    assert plan.operands == (a, c)
    assert plan.results == (c, d)
    assert plan.aliases == ((1, 0),)


def test_aliased_input_that_only_its_output_uses():
    a, b = inputs((64, 64), (64, 64))
    outs = outputs((64, 64), (64, 64))
    launch = launch_of(
        [ArrayParameter(outs[0]), ArrayParameter(outs[1]), ArrayParameter(b)],
        [a, b],
        outs,
        aliases=[(0, 1)],
    )
    plan = check(launch)
    assert plan.operands == (a, b)
    assert plan.results == (outs[0], outs[1])
    assert plan.aliases == ((0, 1),)


def test_inputs_and_outputs_without_parameters_are_not_passed():
    a, b = inputs((8,), (8,))
    c, d = outputs((8,), (8,))
    plan = plan_launch(launch_of([ArrayParameter(b), ArrayParameter(d)], [a, b], [c, d]))
    assert plan.operands == (b,)
    assert plan.results == (d,)
    assert plan.output_positions == (None, 0)


def test_orders_other_than_the_canonical_one_are_served_if_possible():
    (a,), (c, d) = inputs((8,)), outputs((8,), (8,))
    order = [ArrayParameter(d), ArrayParameter(c), ArrayParameter(a)]
    launch = launch_of(order, [a], [c, d], order=False)
    plan = check(launch)
    assert plan.operands == (d, c, a)
    assert plan.aliases == ((0, 0), (1, 1))
    order = [tensor_map(c, (8,)), ArrayParameter(c), ArrayParameter(a)]
    with pytest.raises(InternalError, match="order that the launcher cannot serve"):
        plan_launch(launch_of(order, [a], [c, d], order=False))


def test_three_ways_to_access_an_output_are_refused_at_the_users_line():
    (c,) = outputs((64, 64))
    where = SourceLocation("kernel.py", 12)
    maps = [dataclasses.replace(tensor_map(c, (n, 32)), location=where) for n in (8, 16)]
    with pytest.raises(UnsupportedError) as error:
        canonical_order([*maps, ArrayParameter(c)])
    text = str(error.value)
    assert text.startswith("kernel.py:12: output 0 is accessed in more ways")
    assert "1 pointers and 2 different TMA descriptors" in text


def test_three_ways_to_access_an_aliased_pair_are_refused():
    (a,), (c,) = inputs((64, 64)), outputs((64, 64))
    parameters = [ArrayParameter(a), ArrayParameter(c), tensor_map(a, (8, 32))]
    with pytest.raises(UnsupportedError, match="output 0, which shares memory with input 0,"):
        canonical_order(parameters, [(0, 0)])


def test_foreign_buffers_are_refused():
    (a,), (c,) = inputs((8,)), outputs((8,))
    with pytest.raises(InternalError, match="is not input 0"):
        plan_launch(launch_of([ArrayParameter(a)], outs=[c]))
    with pytest.raises(InternalError, match="zeroed scratch without a pointer"):
        (s,) = scratch((64, 64), zeroed=True)
        plan_launch(launch_of([tensor_map(s, (8, 32))], scratches=[s]))
