"""A machine that exists in time alone: its CPUs, threads, locks and programs are modelled.

Code that runs on it is real; what takes time is what asks for it. Of its threads one runs at a
time, and hands over to the next where it sleeps, computes or waits, so that two runs do the same
things in the same order, to the nanosecond. Time moves on when all of them wait for it.

CPUs are shared as by a plain scheduler: whoever wants one stands in one queue, and has it for a
slice, which is the shorter the nicer its process is. Code that asks for no CPU takes no time.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lightning_fastdata.host import clock
from lightning_fastdata.stamps.lines import look_at_thread

_A_SECOND_NS = 10**9
_SLICE_NS = 4_000_000
"""Of a process of niceness 0."""
_PER_NICENESS = 1.25
"""A process has so much less of a CPU for each step of niceness, as with Linux."""
_FOR_EVER_NS = 10**18
_LONGEST_S = 3_600.0


_installed: list[Machine] = []


def machine() -> Machine:
    """Return the machine that this process lives on, for code that is not told which."""
    return _installed[-1]


def sleep(seconds: float) -> None:
    """Let the calling thread wait without a CPU."""
    clock.sleep(seconds)


def work(seconds: float) -> None:
    """Let the calling thread compute, on the machine that this process lives on."""
    machine().work(seconds)


def die(sign: int) -> NoReturn:
    """End the process of the calling thread by a signal."""
    machine().current.process.kill(sign)
    raise KilledError


class KilledError(BaseException):
    """Ends a virtual thread whose process was killed; whatever it does next raises it again."""


class DeadlockError(Exception):
    """Nothing will ever happen any more, or not within the longest time."""


class VirtualProcess:
    """A process of a machine: a name, a niceness, and how it ended."""

    def __init__(self, machine: Machine, pid: int, niceness: int = 0) -> None:
        self.machine, self.pid, self.niceness = machine, pid, niceness
        self.threads: list[VirtualThread] = []
        self.exitcode: int | None = None
        self.kill: Callable[[int], None] = lambda sign: self.ended(-sign)
        """Ends it by a signal; whoever starts it may have more to do then."""

    @property
    def cpu_ns(self) -> int:
        """CPU time of all of its threads."""
        return sum(thread.cpu_ns for thread in self.threads)

    def ended(self, exitcode: int) -> None:
        """Have all of its threads end now."""
        if self.exitcode is None:
            self.exitcode = exitcode
            for thread in self.threads:
                self.machine.end(thread)


class VirtualThread:
    """A thread of a virtual process; one of a foreign program has no code, and only computes."""

    def __init__(self, process: VirtualProcess) -> None:
        self.process = process
        self.cpu_ns = self.queued_ns = 0
        self.baton = threading.Semaphore(0)
        """Whoever runs hands it over with this."""
        self.real: threading.Thread | None = None
        self.over = self.killed = self.parked = self.woken = False
        self.turn = 0
        """Counts its waits, so that what belongs to an earlier one does not end a later one."""
        self.wants_ns = 0
        self.since_ns = 0
        """When it came into the queue for a CPU, or was given one."""
        self.on_cpu = False

    def stack(self) -> str:
        """Return where its code is."""
        if self.real is None or self.real.ident is None:
            return ""

        def text(frame: FrameType | None) -> str:
            return "" if frame is None else "".join(traceback.format_stack(frame))

        return look_at_thread(self.real.ident, text)


class Machine(clock.Clock):
    """So many CPUs, and whatever runs on them; the clock of all of it.

    The thread that makes it is its first one: that of the training process.
    """

    def __init__(self, cpus: int = 2, *, now_ns: int = _A_SECOND_NS) -> None:
        self.cpus = cpus
        self.now_ns = now_ns
        self._ends_ns = now_ns + round(_LONGEST_S * _A_SECOND_NS)
        self._free = cpus
        self._queue: deque[VirtualThread] = deque()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._ready: deque[VirtualThread] = deque()
        self._pids = 1000
        self._processes: dict[int, VirtualProcess] = {}
        self._broken: BaseException | None = None
        self.training = self.process()
        self._first = VirtualThread(self.training)
        self.training.threads.append(self._first)
        self._by_ident = {threading.get_ident(): self._first}

    # The clock

    def monotonic_ns(self) -> int:
        """Return the time of the machine."""
        return self.now_ns

    def thread_time_ns(self) -> int:
        """Return the CPU time of the calling thread; 0 of one that is none of the machine's."""
        thread = self._by_ident.get(threading.get_ident())
        return 0 if thread is None else thread.cpu_ns

    def process_time_ns(self) -> int:
        """Return the CPU time of the process of the calling thread."""
        return self._by_ident.get(threading.get_ident(), self._first).process.cpu_ns

    def cpu_s_of(self, pid: int, *, with_children: bool) -> float:
        """Return the CPU time of a process of the machine."""
        process = self._processes.get(pid)
        return 0.0 if process is None else process.cpu_ns / _A_SECOND_NS

    def unix_s(self) -> float:
        """Return a time of day that moves with the clock."""
        return 1_700_000_000 + self.now_ns / _A_SECOND_NS

    def open_schedstat(self) -> int | None:
        """Return what stands for the file, which is not read: its figures are the machine's."""
        return None if threading.get_ident() not in self._by_ident else -1

    def queued_ns(self, schedstat: int) -> int:
        """Return how long the calling thread has been ready without a CPU."""
        thread = self._by_ident.get(threading.get_ident())
        return 0 if thread is None else thread.queued_ns

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait without a CPU.

        A thread that is none of the machine's, as one that writes files beside a training, waits
        in real time, and the machine does not wait for it.
        """
        if threading.get_ident() not in self._by_ident:
            time.sleep(min(seconds, 0.05))
            return
        until_ns = self.now_ns + max(0, round(seconds * _A_SECOND_NS))
        self.current.turn += 1
        if self._ready or (self._events and self._events[0][0] <= until_ns):
            self.wait(until_ns)
        else:  # nobody is in between
            self._go_to(until_ns)
            self._check(self.current)

    # What threads of it do

    @property
    def current(self) -> VirtualThread:
        """The virtual thread that runs."""
        return self._by_ident[threading.get_ident()]

    def work(self, seconds: float) -> None:
        """Let the calling thread compute for so long, once it has a CPU."""
        thread = self.current
        self._check(thread)
        thread.wants_ns = round(seconds * _A_SECOND_NS)
        if thread.wants_ns <= 0:
            return
        thread.since_ns = self.now_ns
        self._queue.append(thread)
        self._give_cpus()
        self.wait()

    def wait(self, until_ns: int | None = None) -> bool:
        """Let the calling thread wait until it is woken; return False if it was not until then."""
        thread = self.current
        self._check(thread)
        thread.turn += 1
        thread.parked = True
        if until_ns is not None:
            turn = thread.turn
            self.at(until_ns, lambda: self._resume(thread, turn, woken=False))
        after = self._next()
        if after is not thread:
            after.baton.release()
            thread.baton.acquire()
        self._check(thread)
        return thread.woken

    def wake(self, thread: VirtualThread) -> None:
        """End the wait of a thread."""
        self._resume(thread, thread.turn, woken=True)

    def at(self, ns: int, what: Callable[[], None]) -> None:
        """Do something at a time, in no thread: it may wake or start some."""
        self._count += 1
        heapq.heappush(self._events, (max(ns, self.now_ns), self._count, what))

    # Processes

    def process(self, niceness: int = 0) -> VirtualProcess:
        """Return a new process without a thread."""
        self._pids += 1
        self._processes[self._pids] = VirtualProcess(self, self._pids, niceness)
        return self._processes[self._pids]

    def start(self, process: VirtualProcess, target: Callable[[], None]) -> VirtualThread:
        """Start a thread of a process, which begins when those that are ready have run."""
        thread = VirtualThread(process)
        process.threads.append(thread)

        def live() -> None:
            self._by_ident[threading.get_ident()] = thread
            thread.baton.acquire()
            try:
                self._check(thread)
                target()
            except KilledError:
                pass
            except BaseException as error:  # told in the thread of the training process
                self._broken = self._broken or error
            thread.over = True
            del self._by_ident[threading.get_ident()]
            self._next().baton.release()

        thread.real = threading.Thread(target=live, daemon=True)
        thread.real.start()
        self._ready.append(thread)
        return thread

    def programs(self, count: int, niceness: int = 0) -> None:
        """Have so many foreign programs compute from now on for ever."""
        for _ in range(count):
            thread = VirtualThread(self.process(niceness))
            thread.process.threads.append(thread)
            thread.wants_ns, thread.since_ns = _FOR_EVER_NS, self.now_ns
            self._queue.append(thread)
        self._give_cpus()

    def end(self, thread: VirtualThread) -> None:
        """End a thread: it has no CPU from now on, and its code is unwound before time moves."""
        if thread.over or thread.killed:
            return
        thread.killed = True
        if thread.on_cpu:
            self._take_cpu(thread)
        elif thread in self._queue:
            self._queue.remove(thread)
        if thread.parked:
            self._resume(thread, thread.turn, woken=False)
        self._give_cpus()

    @contextmanager
    def installed(self) -> Iterator[Machine]:
        """Have this process live on the machine while a block runs; then all of it ends."""
        with clock.installed(self):
            _installed.append(self)
            try:
                yield self
            finally:
                _installed.remove(self)
                self._end_all()

    def forget_others(self) -> None:
        """Have nothing on the machine but the calling thread."""
        self._events.clear()
        self._ready.clear()
        self._queue.clear()
        self._free = self.cpus
        mine = threading.get_ident()
        self._by_ident = {mine: self._by_ident.get(mine, self._first)}

    def _end_all(self) -> None:
        self._broken = None
        self._events.clear()
        others = [
            thread
            for process in self._processes.values()
            for thread in process.threads
            if thread is not self._first and thread.real is not None
        ]
        for thread in others:
            self.end(thread)
        while self._ready:
            thread = self._ready.popleft()
            if not thread.over and thread is not self._first:
                # When it ends it hands over to the first thread, if to no other.
                self._ready.append(self._first)
                thread.baton.release()
                self._first.baton.acquire()
        for thread in others:
            if thread.real is not None:
                thread.real.join()

    # How it goes on

    def _check(self, thread: VirtualThread) -> None:
        if thread.killed:
            raise KilledError
        if self._broken is not None and thread is self._first:
            broken, self._broken = self._broken, None
            raise broken

    def _resume(self, thread: VirtualThread, turn: int, *, woken: bool) -> None:
        if thread.parked and thread.turn == turn:
            thread.parked, thread.woken = False, woken
            self._ready.append(thread)

    def _next(self) -> VirtualThread:
        """Return who runs next; time moves on until there is one."""
        while not self._ready and self._broken is None:
            if not self._events or self.now_ns > self._ends_ns:
                self._broken = DeadlockError(
                    f"Nothing happens after {self.now_ns / 1e9:g} s of the machine's time: "
                    "the training process waits for what nobody does."
                )
                break
            ns, _, what = heapq.heappop(self._events)
            self._go_to(ns)
            what()
        if self._broken is not None and self._first.parked:
            self._first.parked = False
            return self._first
        return self._ready.popleft()

    def _go_to(self, ns: int) -> None:
        self.now_ns = max(self.now_ns, ns)

    # The CPUs

    def _give_cpus(self) -> None:
        while self._free and self._queue:
            thread = self._queue.popleft()
            self._free -= 1
            thread.on_cpu = True
            thread.queued_ns += self.now_ns - thread.since_ns
            thread.since_ns = began_ns = self.now_ns
            longest_ns = round(_SLICE_NS / _PER_NICENESS**thread.process.niceness)
            until_ns = self.now_ns + min(thread.wants_ns, longest_ns)
            self.at(until_ns, lambda of=thread, began=began_ns: self._slice_ended(of, began))

    def _slice_ended(self, thread: VirtualThread, began_ns: int) -> None:
        if not thread.on_cpu or thread.since_ns != began_ns:
            return  # it was ended meanwhile
        self._take_cpu(thread)
        if thread.wants_ns:
            thread.since_ns = self.now_ns
            self._queue.append(thread)
        else:
            self.wake(thread)
        self._give_cpus()

    def _take_cpu(self, thread: VirtualThread) -> None:
        had_ns = self.now_ns - thread.since_ns
        thread.cpu_ns += had_ns
        thread.wants_ns -= had_ns
        thread.on_cpu = False
        self._free += 1


def _forked() -> None:
    """Leave a process that was forked with the thread that forked it: others do not exist there."""
    for each in _installed:
        each.forget_others()


os.register_at_fork(after_in_child=_forked)


class VirtualLock:
    """A lock that processes of a machine share; whoever waits longest has it next."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[VirtualThread] = deque()

    def __enter__(self) -> None:
        if self._held:
            self._waiting.append(machine().current)
            try:
                machine().wait()
            except KilledError:
                if machine().current in self._waiting:
                    self._waiting.remove(machine().current)
                else:  # it was just given the lock
                    self.__exit__()
                raise
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False
        if self._waiting:
            self._held = True
            machine().wake(self._waiting.popleft())


class VirtualBarrier:
    """Lets nobody on until so many threads have come to it."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self._waiting: list[VirtualThread] = []

    def wait(self) -> None:
        """Wait for the others."""
        if len(self._waiting) + 1 < self.parties:
            self._waiting.append(machine().current)
            machine().wait()
            return
        for thread in self._waiting:
            machine().wake(thread)
        self._waiting.clear()
