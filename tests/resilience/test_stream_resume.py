"""A stream goes on behind any batch, as if it had never stopped, and says what that cost."""

from __future__ import annotations

import io
import random
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from thoroughness import LONG, some
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from virtual_time import virtual_time

from lightning_fastdata.batches.keyed import keyed
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.inline import InlineExecutor
from lightning_fastdata.executors.kinds import Resources, open_executor
from lightning_fastdata.executors.stream import StreamExecutor
from lightning_fastdata.executors.stream_position import StreamPosition
from lightning_fastdata.executors.stream_state import StateTaker
from lightning_fastdata.host import clock
from lightning_fastdata.randomness.seeds import EpochCell

LENGTHS = (5, 3, 6)
SILENT = pytest.mark.filterwarnings("ignore:To go on where:lightning_fastdata.FastDataWarning")


def share() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Numbers(IterableDataset):
    """Worker w gives the numbers of its own length."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def draw(self) -> Any:
        return ()

    def __iter__(self) -> Iterator[Any]:
        worker, workers = share()
        for at in range(self.lengths[worker % len(self.lengths)]):
            yield {"x": torch.full((3,), worker * 1000 + at), "of": workers, "drew": self.draw()}


class WithState(Numbers):
    """Goes on from its own state, which it changes while it is read."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(*lengths)
        self.live: dict[str, Any] = {"at": 0, "seen": []}
        self.loaded = False

    def __iter__(self) -> Iterator[Any]:
        worker, workers = share()
        if not self.loaded:
            self.live = {"at": 0, "seen": []}
        self.loaded = False
        while self.live["at"] < self.lengths[worker % len(self.lengths)]:
            at = self.live["at"]
            self.live["at"] += 1
            self.live["seen"].append(at)
            yield {"x": torch.full((3,), worker * 1000 + at), "of": workers, "drew": self.draw()}
        self.live = {"at": 0, "seen": []}

    def state_dict(self) -> dict[str, Any]:
        return self.live

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == list(range(state["at"]))
        self.live, self.loaded = state, True


class Drawing(Numbers):
    def draw(self) -> Any:
        info = get_worker_info()
        seed = 0 if info is None else info.seed
        return random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(2), seed


class DrawingWithState(WithState):
    draw = Drawing.draw


def collate_and_draw(samples: Any) -> Any:
    return default_collate(samples), random.random()


def frozen(batch: Any) -> bytes:
    """Return the bytes of a batch."""
    memory = io.BytesIO()
    torch.save(batch, memory)
    return memory.getvalue()


def plan_of(dataset: Any, **how: Any) -> FetchPlan:
    given = {"collate_fn": default_collate, "default_collation": True, "base_seed": 11}
    return FetchPlan(dataset=dataset, **{**given, **how})


def opened(plan: FetchPlan, workers: int) -> Any:
    return InlineExecutor(plan) if not workers else StreamExecutor(plan, processes=workers)


def saved(position: StreamPosition | None) -> StreamPosition:
    """Return a position as it comes out of a checkpoint."""
    assert position is not None
    memory = io.BytesIO()
    torch.save(position.as_dict(), memory)
    memory.seek(0)
    return StreamPosition.from_dict(torch.load(memory, weights_only=True))


def rest_after(
    position: StreamPosition, plan: FetchPlan, workers: int, size: int | None, epoch: int = 0
) -> list[bytes]:
    """Return what comes after a position, in another process as it were."""
    executor = opened(plan, workers)
    executor.start_epoch([size], epoch, resume=position)
    batches = [frozen(batch) for batch in executor]
    executor.close()
    return batches


def run_of(
    executor: Any, size: int | None, *, epoch: int = 0, resume: StreamPosition | None = None
) -> tuple[list[bytes], dict[int, list[StreamPosition]]]:
    """Return all batches of an epoch, and the positions behind each, asked for soon and late."""
    first = sum(lane.batches for lane in resume.lanes) if resume else 0
    executor.start_epoch([size], epoch, resume=resume)
    batches: list[bytes] = []
    positions: dict[int, list[StreamPosition]] = {}
    ended = False
    while True:
        for late in (0, 1, 4):
            if len(batches) >= late:
                at = first + len(batches) - late
                positions.setdefault(at, []).append(saved(executor.position(at)))
        if ended:
            return batches, positions
        batch = next(executor, None)
        ended = batch is None
        if batch is not None:
            batches.append(frozen(batch))


READERS = [(Drawing, n) for n in (1, 2, 3)] + [(DrawingWithState, n) for n in (1, 2, 3)]
READERS += [(Numbers, 0), (WithState, 0)]


@pytest.mark.cases(5)
@SILENT
@pytest.mark.parametrize(("stream", "workers"), READERS)
@pytest.mark.parametrize(
    ("size", "drop_last", "ahead"), [(2, False, 2), (3, True, 1), (None, False, 1), (4, False, 1)]
)
def test_what_comes_after_any_batch_is_the_rest_of_the_undisturbed_epoch(
    stream: type, workers: int, size: int | None, drop_last: bool, ahead: int
) -> None:
    how: dict[str, Any] = {"drop_last": drop_last, "look_ahead": max(1, ahead * workers)}
    if size is None:
        how |= {"batched": False, "collate_fn": dict, "default_collation": False}
    executor = opened(plan_of(stream(*LENGTHS), **how), workers)
    whole, positions = run_of(executor, size)
    executor.close()
    assert saved(executor.position(len(whole))).lanes[0].ended
    assert len(positions) == len(whole) + 1
    other = plan_of(stream(*LENGTHS), **{**how, "base_seed": 999})
    for stop, found in some(positions.items(), 3):
        different = list({repr(one): one for one in found}.values())
        for position in different if LONG else [different[stop % len(different)]]:
            assert rest_after(position, other, workers, size) == whole[stop:]


@SILENT
def test_draws_of_the_collation_are_made_again() -> None:
    how = {"collate_fn": collate_and_draw, "default_collation": False}
    whole, positions = run_of(first := opened(plan_of(Drawing(*LENGTHS), **how), 2), 2)
    first.close()
    for stop, found in some(positions.items(), 3):
        assert rest_after(found[0], plan_of(Drawing(*LENGTHS), **how), 2, 2) == whole[stop:]


class Plus:
    def __call__(self, sample: Any, key: Any) -> Any:
        return {**sample, "key": key.index}


@pytest.mark.cases(2)
@SILENT
@pytest.mark.parametrize("stream", [Numbers, WithState])
@pytest.mark.parametrize("workers", [0, 2])
def test_keys_of_samples_go_on(stream: type, workers: int) -> None:
    def plan() -> FetchPlan:
        return plan_of(keyed(stream(6), seed=1, epoch=EpochCell(), transform=Plus()))  # type: ignore[arg-type]

    whole, positions = run_of(executor := opened(plan(), workers), 2)
    executor.close()
    for stop, found in some(positions.items(), 2):
        assert rest_after(found[0], plan(), workers, 2) == whole[stop:]


@SILENT
@pytest.mark.parametrize("stream", [Numbers, WithState])
def test_batches_as_they_are_ready_are_all_there_once(stream: type) -> None:
    def loose() -> FetchPlan:
        return plan_of(stream(*LENGTHS), in_order=False)

    whole, positions = run_of(executor := opened(loose(), 3), 1)
    executor.close()
    for stop in some(range(0, len(whole) + 1, 5), 2):
        rest = rest_after(positions[stop][0], loose(), 3, 1)
        assert sorted(whole[:stop] + rest) == sorted(whole)


# -- what it costs, and what is said ---------------------------------------------------------------


def test_reading_again_is_said_once_with_its_samples() -> None:
    _, positions = run_of(executor := opened(plan_of(Numbers(7)), 2), 2)
    executor.close()
    with pytest.warns(
        FastDataWarning, match="10 samples of Numbers .* dropped, in .* s, as it has"
    ):
        rest = rest_after(positions[5][0], plan_of(Numbers(7)), 2, 2)
    assert len(rest) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_makes_reading_again_needless(workers: int) -> None:
    with virtual_time():  # in which taking a state costs nothing, so that one is taken each time
        executor = opened(plan_of(WithState(40)), workers)
        executor.start_epoch([2], 0)
        for _ in range(9):
            next(executor)
        position = saved(executor.position(9))
        executor.close()
    assert position.lanes[0].state is not None
    assert position.lanes[0].skip < 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(rest_after(position, plan_of(WithState(40)), workers, 2)) == 11


class Awkward(DrawingWithState):
    def __init__(self, *lengths: int, held: Any = None) -> None:
        super().__init__(*lengths)
        self.held = held

    def state_dict(self) -> Any:
        if isinstance(self.held, Exception):
            raise self.held
        return self.held if self.held is None else {"parts": [1, self.held]}


@SILENT
@pytest.mark.parametrize(
    ("held", "why"),
    [
        (torch.zeros(2), r"holds a Tensor at state\['parts'\]\[1\]"),
        (np.zeros(2), "holds a ndarray at"),
        (np.int64(2), "holds a int64 at"),
        ({1, 2}, "holds a set at"),
        ({(1, 2): 3}, "holds a tuple as a key of"),
        (RuntimeError("not yet"), r"raised RuntimeError \(not yet\)"),
        (None, "returned None, which is no dict"),
    ],
)
def test_a_state_that_no_checkpoint_takes_is_refused_once(held: Any, why: str) -> None:
    executor = opened(plan_of(Awkward(*LENGTHS, held=held)), 2)
    executor.start_epoch([2], 0)
    first = [frozen(next(executor)) for _ in range(3)]
    with pytest.warns(FastDataWarning, match=rf"Awkward.state_dict\(\) {why}"):
        executor.position(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        position = saved(executor.position(3))
    whole = first + [frozen(batch) for batch in executor]
    executor.close()
    assert rest_after(position, plan_of(Awkward(*LENGTHS, held=held)), 2, 2) == whole[3:]


class Timed(WithState):
    """Its state takes seconds of a clock, and bytes."""

    def __init__(self, cost_s: float, size: int) -> None:
        super().__init__(1)
        self.cost_s, self.size, self.calls = cost_s, size, 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        clock.sleep(self.cost_s)
        return {"text": "x" * self.size}


@pytest.mark.parametrize(
    ("cost_s", "size", "calls"), [(0.0, 10, 1000), (0.001, 10, 10), (0.0, 2**17, 1), (1, 10, 1)]
)
def test_states_take_one_hundredth_of_the_time_and_large_ones_are_rare(
    cost_s: float, size: int, calls: int
) -> None:
    stream = Timed(cost_s, size)
    with virtual_time():
        taker = StateTaker(stream, worker=False)
        for _ in range(1000):
            taker.take()
            clock.sleep(0.001)  # a batch
    assert abs(stream.calls - calls) <= 1


# -- what it refuses -------------------------------------------------------------------------------


def position_of(workers: int, stop: int, stream: IterableDataset[Any], size: int = 1) -> Any:
    executor = opened(plan_of(stream), workers)
    executor.start_epoch([size], 0)
    for _ in range(stop):
        next(executor)
    position = saved(executor.position(stop))
    executor.close()
    return position


@SILENT
def test_the_epoch_goes_on_in_as_many_workers_as_had_shared_it_out() -> None:
    reference = opened(plan_of(Drawing(*LENGTHS)), 3)
    whole, positions = run_of(reference, 1)
    reference.close()
    executor = opened(plan_of(Drawing(*LENGTHS)), 1)
    with pytest.warns(FastDataWarning, match="goes on in 3 workers.*Set num_workers=3") as said:
        executor.start_epoch([1], 0, resume=positions[6][0])
    assert [frozen(batch) for batch in executor] == whole[6:]
    assert sum("3 workers" in str(one.message) for one in said) == 1
    executor.start_epoch([1], 1)
    assert len(list(executor)) == LENGTHS[0]  # its own number again
    assert len(executor.children) == 1
    executor.close()


@SILENT
def test_what_was_read_in_the_training_process_goes_on_in_one_worker() -> None:
    position = position_of(0, 3, WithState(5))
    with pytest.warns(FastDataWarning, match="goes on in 1 workers"):
        rest = rest_after(position, plan_of(WithState(5)), 2, 1)
    assert len(rest) == 2


def test_the_training_process_alone_cannot_go_on_in_several_parts() -> None:
    position = position_of(2, 3, Numbers(5))
    with pytest.raises(OptionsError, match="Set num_workers=2"):
        opened(plan_of(Numbers(5)), 0).start_epoch([1], 0, resume=position)


@pytest.mark.parametrize("workers", [0, 1])
def test_other_batches_are_refused(workers: int) -> None:
    position = position_of(workers, 1, Numbers(5), size=2)
    executor = opened(plan_of(Numbers(5)), workers)
    with pytest.raises(OptionsError, match="Set batch_size=2"):
        executor.start_epoch([3], 0, resume=position)
    executor.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_that_is_not_known_is_an_error(workers: int) -> None:
    executor = opened(plan_of(Numbers(100)), workers)
    assert executor.position(0) is None  # there is no epoch
    executor.start_epoch([1], 0)
    for _ in range(90):
        next(executor)
    assert sum(lane.batches for lane in executor.position(60).lanes) == 60
    for unknown in (91, 2):
        with pytest.raises(OptionsError, match=f"after {unknown} batches .* not known: 90 were"):
            executor.position(unknown)
    executor.close()


def test_data_with_indices_have_no_position_here() -> None:
    executor = open_executor(plan_of([1, 2, 3]), Resources(executor="inline"))
    executor.start_epoch([[0, 1]], 0)
    assert isinstance(executor, InlineExecutor)
    assert executor.position(0) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_has_become_shorter_is_an_error(workers: int) -> None:
    position = position_of(workers, 5, Numbers(6))
    with pytest.raises(DatasetError, match=r"ended after 2 samples .* delivered 3 batches more"):
        rest_after(position, plan_of(Numbers(2)), workers, 1)


class Refusing(WithState):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("another version")


def test_a_state_that_cannot_be_loaded_ends_the_epoch_with_its_error() -> None:
    position = position_of(1, 4, WithState(9))
    executor = opened(plan_of(Refusing(9)), 1)
    executor.start_epoch([1], 0, resume=position)
    with pytest.raises(RuntimeError, match=r"in load_state_dict(.|\n)*another version"):
        next(executor)
    assert list(executor) == []  # and never the beginning in place of the rest
    executor.close()
    inline = opened(plan_of(Refusing(9)), 0)
    inline.start_epoch([1], 0, resume=position_of(0, 4, WithState(9)))
    with pytest.raises(RuntimeError, match="another version"):
        next(inline)
    assert list(inline) == []


@pytest.mark.parametrize("broken", [{}, {"lanes": [], "workers": 2}, {"lanes": [{"x": 1}]}])
def test_what_is_no_position_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match="no position in a stream"):
        StreamPosition.from_dict(broken)


# -- streams of others -----------------------------------------------------------------------------


class Lines(IterableDataset):
    """As in the docs."""

    begin, end = 0, 9

    def __iter__(self) -> Iterator[Any]:
        for self.at in range(self.begin, self.end):  # noqa: B020 - as people write it
            yield torch.full((2,), self.at)
        self.begin = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["at"]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_stream_of_the_docs_goes_on(workers: int) -> None:
    whole, positions = run_of(executor := opened(plan_of(Lines()), workers), 2)
    executor.close()
    for stop, found in positions.items():
        assert rest_after(found[0], plan_of(Lines()), workers, 2) == whole[stop:]


@SILENT
def test_a_shuffle_buffer_of_hugging_face_loses_nothing() -> None:
    datasets = pytest.importorskip("datasets")

    def plan() -> FetchPlan:
        rows = [{"x": number} for number in range(20)]
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        return plan_of(stream.shuffle(seed=1, buffer_size=5).filter(lambda row: row["x"] % 3))

    executor = opened(plan(), 2)
    with pytest.warns(FastDataWarning, match="leaves out the samples in its shuffle buffer"):
        whole, positions = run_of(executor, 2)
    executor.close()
    for stop, found in some(positions.items(), 2):
        assert rest_after(found[0], plan(), 2, 2) == whole[stop:]


class Counted(Numbers):
    """As LitData's: the training process says how much was read, and workers work out the rest."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(*lengths)
        self.process = threading.get_native_id()
        self.read: tuple[int, int, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        worker, workers = share()
        begin = 0
        if self.read is not None:
            samples, of, size = self.read
            assert of == workers
            batches = samples // size  # in turn, from the first worker on
            begin = (batches // of + (worker < batches % of)) * size
        for at in range(begin, self.lengths[worker % len(self.lengths)]):
            yield {"x": torch.full((3,), worker * 1000 + at)}

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> Any:
        assert threading.get_native_id() == self.process
        return {"read": num_samples_yielded, "workers": num_workers or 1, "size": batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"], state["workers"], state["size"]

    def reset_state_dict(self) -> None:
        self.read = None


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_streams_that_count_what_was_read_go_on_at_once(workers: int) -> None:
    executor = opened(plan_of(Counted(*LENGTHS)), workers)
    whole, positions = run_of(executor, 2)
    executor.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for stop, found in some(positions.items(), 2):
            assert not any(lane.skip for lane in found[0].lanes)
            rest, again = opened(plan_of(Counted(*LENGTHS)), workers), []
            rest.start_epoch([2], 0, resume=found[0])
            again = [frozen(batch) for batch in rest]
            assert again == whole[stop:]
            assert run_of(rest, 2, epoch=1)[0] == whole  # the next epoch is whole
            rest.close()
