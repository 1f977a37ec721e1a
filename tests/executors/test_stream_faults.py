"""Processes that read a stream die and hang: what is lost is said, and nothing else is lost."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processes import until
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from lightning_fastdata.errors import WorkerError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.stream import StreamExecutor


class Lengths(IterableDataset):
    """Worker w gives the numbers from 1000 * w, as many as its own length says."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info().id
        for at in range(self.lengths[worker % len(self.lengths)]):
            yield {"x": torch.full((3, 50), worker * 1000 + at)}


def pool(dataset: Any, processes: int = 2, **how: Any) -> StreamExecutor:
    plan = FetchPlan(dataset=dataset, collate_fn=default_collate, look_ahead=4, **how)
    return StreamExecutor(plan, processes=processes)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_killed_stream_is_an_error_that_counts_what_was_delivered(in_order: bool) -> None:
    executor = pool(Lengths([400]), in_order=in_order)
    executor.start_epoch([2], 0)
    seen = [int(x) for _ in range(6) for x in next(executor)["x"][:, 0, 0]]
    executor.children[1].process.kill()
    with contextlib.suppress(WorkerError):
        for batch in executor:
            seen += [int(x) for x in batch["x"][:, 0, 0]]
    with pytest.raises(WorkerError, match="process 1 was ended by SIGKILL") as caught:
        next(executor)
    delivered = [x for x in seen if x >= 1000]
    assert delivered == [*range(1000, 1000 + len(delivered))]
    assert f"The {len(delivered) // 2} batches" in str(caught.value)
    executor.start_epoch([2], 1)
    assert len(list(executor)) == 400
    executor.close()


def test_a_process_killed_after_its_last_batch_is_not_missed() -> None:
    executor = pool(Lengths([30, 1]))
    for epoch in range(2):
        executor.start_epoch([1], epoch)
        first = next(executor)
        until(lambda: executor._lanes[1].ended or executor._receive())
        process = executor.children[1].process
        process.kill()
        process.join()
        assert len([first, *executor]) == 31
    executor.close()


def test_a_process_killed_between_epochs_is_replaced() -> None:
    executor = pool(Lengths([5]))
    for epoch in range(3):
        executor.start_epoch([1], epoch)
        assert len(list(executor)) == 10
        process = executor.children[epoch % 2].process
        process.kill()
        process.join()
    executor.close()


def dies_at_once(number: int) -> None:
    os._exit(7)


def test_a_process_that_never_starts_is_named() -> None:
    executor = pool(Lengths([5]), worker_init_fn=dies_at_once)
    executor.start_epoch([1], 0)
    with pytest.raises(WorkerError, match=r"exit code 7 .*__main__"):
        next(executor)
    executor.close()


def test_kills_at_random_never_lose_a_batch_unsaid() -> None:
    executor = pool(Lengths([60]), 2)
    expected = [[w * 1000 + at for at in range(60)] for w in range(2)]
    rng = random.Random(0)
    broken = 0
    for epoch in range(200):
        executor.start_epoch([3], epoch)
        children = list(executor.children.values())
        killer = threading.Timer(rng.uniform(0, 0.02), rng.choice(children).process.kill)
        killer.start()
        seen: list[list[int]] = [[], []]
        try:
            for batch in executor:
                for x in batch["x"][:, 0, 0].tolist():
                    seen[x // 1000].append(x)
        except WorkerError:
            broken += 1
            assert all(x == full[: len(x)] for x, full in zip(seen, expected, strict=True))
        else:
            assert seen == expected
        killer.cancel()
        killer.join()
        if broken >= 15:
            break
    assert broken >= 15
    executor.close()
