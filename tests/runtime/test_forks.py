"""Processes that fork while other threads compile: no child waits for a lock of theirs."""

from __future__ import annotations

import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import pallasite
from pallasite import config, forks
from pallasite import gpu as plgpu

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*fork"),
]


def in_child(function) -> int:
    """Runs a function in a forked process; returns its exit status, -SIGALRM if it hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(60)
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kernel(factor):
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    def scaled(x_ref, o_ref):
        o_ref[...] = x_ref[...] * factor

    return scaled


def compiled(factor):
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    return pallasite.compile(kernel(factor), x, target="sm_90").ptx


def test_children_compile_while_another_thread_does():
    """The thread is caught at some other place each time."""
    stop, failures = threading.Event(), []

    def loop():
        number = 0
        while not stop.is_set():
            number += 1
            try:
                with config.scoped(cache=False):
                    assert compiled(2.0 + number)
            except BaseException as error:
                failures.append(error)
                return

    compiled(1.5)
    thread = threading.Thread(target=loop)
    thread.start()
    try:
        statuses = []
        for number in range(6):
            time.sleep(0.007 * number)
            statuses.append(in_child(lambda n=number: compiled(1000.5 + n)))
    finally:
        stop.set()
        thread.join()
    assert statuses == [0] * 6
    assert failures == []


def test_a_fork_waits_for_the_others():
    inside, end = threading.Event(), threading.Event()
    order = []

    def work():
        with forks.unforked(), forks.unforked():
            inside.set()
            end.wait(0.2)
            order.append("worked")

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    with forks.unforked():  # One's own work is no obstacle.
        child = os.fork()
        if child == 0:
            os._exit(len(order) + 1 if len(forks._busy) == 1 and not forks._waiting else 9)
    order.append("forked")
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert order == ["worked", "forked"]
    assert not forks._busy and not forks._waiting


def test_a_fork_does_not_wait_for_ever(monkeypatch):
    """Who is in a block may wait for the thread that forks."""
    monkeypatch.setattr(forks, "_MOST_SECONDS", 0.05)
    inside, forked = threading.Event(), threading.Event()

    def work():
        with forks.unforked():
            inside.set()
            forked.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()

    def enter():
        with forks.unforked():
            pass

    assert in_child(enter) == 0
    forked.set()
    thread.join()
    enter()
