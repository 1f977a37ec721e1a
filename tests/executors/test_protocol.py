"""The messages between the training process and its side processes, and what outlives these."""

from __future__ import annotations

import os
import pickle
from typing import Any, get_args

from misses import each

from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.protocol import ProgressMemory, State
from lightning_fastdata.executors.pool.wire import (
    Wire,
    make_packet,
    number_in,
    request_in,
    wire_pair,
)

MESSAGES = [*get_args(protocol.ToChild), *get_args(protocol.FromChild)]


@each("kind", [protocol.TaskRequest, *MESSAGES])
def test_each_message_is_in_the_drawing(kind: Any) -> None:
    assert kind.__name__ in str(protocol.__doc__)


@each("kind", [kind for kind in MESSAGES if kind is not protocol.TaskEnded])
def test_messages_arrive_as_what_they_were(kind: Any) -> None:
    ours, theirs = map(Wire, wire_pair())
    message = kind(*range(len(kind._fields)))
    ours.send(message)
    arrived, files = theirs.receive()
    assert (arrived, type(arrived), files) == (message, kind, [])
    ours.close()
    theirs.close()


@each("kind", get_args(protocol.TaskResult))
def test_the_end_of_a_task_arrives_with_its_result(kind: Any) -> None:
    message = protocol.TaskEnded(5, 1000, None, (), kind(*range(len(kind._fields))))
    arrived = protocol.decode(pickle.loads(pickle.dumps(protocol.encode(message), 5)))
    assert arrived == message
    assert type(arrived.result) is kind


def test_a_request_arrives_with_its_number() -> None:
    request = protocol.TaskRequest("rows", 2, 3, 1, 8, [5, 6], 32, None)
    packet = make_packet(7, request)
    assert (number_in(packet), request_in(packet)) == (7, request)


def test_progress_is_seen_from_the_other_side_and_outlives_the_writer() -> None:
    seen = ProgressMemory.create()
    writer = ProgressMemory(os.dup(seen.descriptor))
    assert (seen.state, seen.being_read()) == (State.STARTING, None)
    writer.state = State.WAITING
    assert seen.state == State.WAITING
    seen.generation = 3
    assert writer.generation == 3
    writer.state = 7
    writer.read(5, 2)
    os.close(writer.descriptor)
    del writer
    assert seen.state == 7
    assert seen.being_read() == (5, 2)
    assert seen.noted() == (5, 2, 7)
    os.close(seen.descriptor)
