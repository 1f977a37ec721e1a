"""The virtual machine shares its CPUs, locks and time as a real one would, and always the same."""

from __future__ import annotations

import signal

import pytest

from rig.machine import Machine, VirtualLock, sleep, work

MS = 1_000_000


def run(machine, *programs, niceness=()):
    """Run programs on a machine until all have ended; return when, and their threads, in ms."""
    ended = {}

    def ending(number, program):
        def target():
            program()
            ended[number] = machine.now_ns / MS

        return target

    with machine.installed():
        began = machine.now_ns / MS
        nice = [*niceness, *[0] * len(programs)]
        threads = [
            machine.start(machine.process(nice[number]), ending(number, program))
            for number, program in enumerate(programs)
        ]
        while len(ended) < len(programs):
            sleep(0.001)
    return [ended[number] - began for number in range(len(programs))], threads


def test_threads_have_as_many_cpus_as_there_are_and_wait_in_turn_for_them():
    ended, threads = run(Machine(2), *[lambda: work(0.008)] * 4)
    assert ended == [12, 12, 16, 16]  # slices of 4 ms, two at a time
    assert [thread.cpu_ns for thread in threads] == [8 * MS] * 4
    assert [thread.queued_ns for thread in threads] == [4 * MS] * 2 + [8 * MS] * 2


def test_a_nicer_program_has_less_of_a_cpu():
    _, threads = run(Machine(1), lambda: work(1.0), lambda: work(0.3), niceness=(0, 5))
    assert threads[1].queued_ns / threads[1].cpu_ns == pytest.approx(1.25**5, rel=0.02)


def test_foreign_programs_take_their_part():
    machine = Machine(2)
    machine.programs(4)
    (ended,), (thread,) = run(machine, lambda: work(0.4))
    assert (ended, thread.queued_ns) == (1000, 600 * MS)  # five share two CPUs


def test_a_lock_lets_one_in_at_a_time_whoever_waits_longest_first():
    lock, order = VirtualLock(), []

    def takes(name):
        def program():
            for _ in range(2):
                with lock:
                    sleep(0.002)
                    order.append(name)

        return program

    assert run(Machine(2), takes("a"), takes("b"))[0] == [6, 8]
    assert order == ["a", "b", "a", "b"]


def test_who_is_killed_does_nothing_any_more_and_leaves_locks_and_cpus():
    machine, lock, done = Machine(1), VirtualLock(), []

    def holds():
        with lock:
            work(1.0)
        done.append("held")

    def waits():
        with lock:
            done.append(machine.now_ns)

    with machine.installed():
        process = machine.process()
        thread = machine.start(process, holds)
        machine.start(machine.process(), waits)
        sleep(0.01)
        process.kill(signal.SIGKILL)
        killed_ns = machine.now_ns
        work(0.005)
        assert machine.now_ns - killed_ns == 5 * MS
    assert (process.exitcode, thread.cpu_ns) == (-signal.SIGKILL, 10 * MS)
    assert done == [killed_ns]
