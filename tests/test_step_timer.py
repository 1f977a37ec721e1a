"""StepTimer: any loop is measured as Lightning's is, and left as it was."""

from __future__ import annotations

import collections
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conformance.pieces import Rows
from front_door.test_report_never_harms import HasNoLength
from misses import each
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset

from lightning_fastdata import FastDataLoader, StepTimer, prefetch
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host import clock

LONG_MS = 40


pytestmark = pytest.mark.usefixtures("virtual")


def pass_ms(ms):
    clock.sleep(ms / 1e3)


def samples(length=12, slow=(), ms=LONG_MS):
    """Return samples of which some take long."""
    return Rows(length, dict.fromkeys(slow, ms / 1e3))


def columns(timer, stage="train"):
    return timer.report().recent[stage]


def waits(timer, stage="train"):
    return columns(timer, stage)["wait_ms"].tolist()


@pytest.mark.parametrize("kind", [partial(FastDataLoader, num_workers=0), DataLoader])
def test_each_wait_is_found_in_its_own_step_exactly(kind):
    timer = StepTimer("cpu")
    loader = kind(samples(slow=[3, 7]), batch_size=1)
    for _ in range(2):
        for _ in timer.batches(loader):
            pass_ms(10)
    assert waits(timer) == [LONG_MS if i in (3, 7) else 0 for i in range(12)] * 2
    assert columns(timer)["compute_ms"].tolist() == [10] * 24
    assert columns(timer)["cold"].tolist() == ([1] + [0] * 11) * 2


def test_phases_are_told_apart_and_add_up():
    timer = StepTimer("cpu")
    for _ in timer.batches(DataLoader(samples(4, slow=range(4)), batch_size=2)):
        with timer.transfer():
            pass_ms(1)
            with timer.augment():
                pass_ms(2)
            pass_ms(3)
        pass_ms(5)
        with timer.augment():
            pass_ms(7)
        pass_ms(11)
        timer.step_ended()
        pass_ms(100)
    steps = columns(timer)
    assert steps["stall_ms"].tolist() == [2 * LONG_MS] * 2
    assert steps["transfer_ms"].tolist() == [4, 4]
    assert steps["augment_ms"].tolist() == [9, 9]
    # What lies between two marked phases belongs to none.
    assert steps["compute_ms"].tolist() == [11, 11]
    assert steps["gap_ms"].tolist()[1:] == [100]
    assert steps["samples"].tolist() == [2, 2]


def test_a_phase_of_some_steps_has_the_mean_of_all_so_that_phases_add_up_to_the_step():
    timer = StepTimer("cpu")
    for i, _ in enumerate(timer.batches(DataLoader(samples(32), batch_size=2))):
        if i % 4 == 1:
            with timer.augment():
                pass_ms(8)
        pass_ms(10)
    (stage,), (found, *_) = timer.report().stages, timer.report().verdict.findings
    # The first of sixteen steps is counted apart.
    assert stage.augment.mean_ms == pytest.approx(4 * 8 / 15)
    assert sum(each.mean_ms for each in stage.phases.values()) == pytest.approx(stage.step.mean_ms)
    assert found.code == "FD313"
    assert "takes 2.1 ms, 18% of a step" in found.cause
    assert found.gain.after_ms == pytest.approx(10)
    assert timer.metrics()["data_step/augment_ms"] == stage.augment.mean_ms


def test_a_phase_that_none_of_the_newest_steps_had_keeps_its_mean():
    timer = StepTimer("cpu")
    for i, _ in enumerate(timer.batches(range(1101))):
        if 1 <= i <= 11:
            with timer.augment():
                pass_ms(1)
        pass_ms(1)
    (stage,) = timer.report().stages
    assert stage.augment.mean_ms == pytest.approx(11 / 1100)
    assert stage.augment.p95_ms == stage.augment.mean_ms


def test_phases_outside_of_a_step_do_nothing():
    timer = StepTimer("cpu")
    with timer.transfer(), timer.augment():
        pass
    timer.step_ended()
    assert timer.metrics() == {}
    assert timer.report().stages == ()
    assert "nothing was measured" in str(timer.report())


def test_batches_are_those_of_the_loader_as_often_as_it_is_iterated():
    timer, rows = StepTimer("cpu"), samples(5)
    batches = timer.batches(FastDataLoader(rows, batch_size=2, shuffle=True, seed=3))
    twin = FastDataLoader(rows, batch_size=2, shuffle=True, seed=3)
    assert len(batches) == 3
    assert batches.dataset is rows
    for _ in range(2):
        torch.manual_seed(0)
        ours = [i.tolist() for _, i in batches]
        torch.manual_seed(0)
        assert ours == [i.tolist() for _, i in twin]


IMAGES = torch.zeros(3, 8, 8), torch.zeros(3, 9, 8)
BOXES = {"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(5, 4)}


@pytest.mark.parametrize(
    "batches",
    [
        [[1, 2]],
        [{"a": torch.zeros(2, 3)}],
        [np.zeros((2, 3))],
        # Samples that cannot be stacked: tuple(zip(*samples)), and what others make of them.
        [(IMAGES, BOXES)],
        [{"images": list(IMAGES), "targets": list(BOXES)}],
        [(IMAGES, (7, 8))],
        [[[torch.zeros(2, 3)] * 3, [torch.zeros(2, 5)] * 3]],  # collated pairs of triples
        [pack_sequence([torch.zeros(5, 3), torch.zeros(4, 3)])],
        [(pack_sequence([torch.zeros(5), torch.zeros(4)]), torch.zeros(2))],
        [{"words": pack_sequence([torch.zeros(5), torch.zeros(4)]), "y": torch.zeros(2)}],
        [[{"image": IMAGES[0], **BOXES[0]}, {"image": IMAGES[1], **BOXES[1]}]],  # samples
        [[(IMAGES[0], 7), (IMAGES[0], 8)]],
        [[{"a": torch.zeros(2, 3)}, {"a": torch.zeros(2, 3)}, {"a": torch.zeros(2, 3)}]],
        [[torch.zeros(2, 3, 9, 9), torch.zeros(2, 3, 5, 5), torch.zeros(2, 3, 5, 5)]],  # crops
        [[torch.zeros(2, 9, 3), torch.zeros(2, 8, 3), torch.zeros(2, 7, 3)]],  # no pictures
    ],
)
def test_any_iterable_will_do_and_samples_are_counted(batches):
    timer = StepTimer("cpu")
    seen = list(timer.batches(batches))
    assert seen[0] is batches[0]
    assert columns(timer)["samples"].tolist() == [2]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_list_of_pictures_of_unequal_size_has_as_many_samples_as_pictures(channels):
    timer = StepTimer("cpu")
    list(timer.batches([[torch.zeros(channels, 8 + i, 9) for i in range(6)]]))
    assert columns(timer)["samples"].tolist() == [6]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_list_of_samples_has_as_many_as_it_is_long(count):
    timer = StepTimer("cpu")
    list(timer.batches([[(torch.zeros(3, 8, 8), {"boxes": torch.zeros(4, 4)})] * count]))
    assert columns(timer)["samples"].tolist() == [count]


class Graphs:
    """As a batch of torch_geometric, whose length is the number of its attributes."""

    def __init__(self, count):
        self.num_graphs, self.x = count, torch.zeros(5 * count, 4)

    def __len__(self):
        return 1

    def to(self, *_, **__):
        return self


@pytest.mark.parametrize("made", [lambda graphs: graphs, lambda graphs: (graphs, torch.zeros(3))])
def test_a_batch_of_graphs_has_as_many_samples_as_graphs(made):
    timer = StepTimer("cpu")
    list(timer.batches([made(Graphs(3))]))
    assert columns(timer)["samples"].tolist() == [3]


class Looked(list):
    """Counts how often it is looked through."""

    times = 0

    def __iter__(self):
        Looked.times += 1
        return super().__iter__()


def test_counting_samples_does_not_look_through_all_objects_of_a_batch():
    timer, looked = StepTimer("cpu"), []
    batch = [{"words": Looked(range(100))} for _ in range(50)]
    for _ in timer.batches([batch] * 40):
        looked.append(Looked.times)
    assert columns(timer)["samples"].tolist() == [50] * 40
    assert set(np.diff(looked[-8:])) == {1}, "the first batches are looked at for padding"


def test_samples_of_loaders_that_are_zipped_are_those_of_all():
    timer = StepTimer("cpu")
    list(timer.batches(zip(DataLoader(samples(16), 8), DataLoader(samples(8), 4), strict=True)))
    list(timer.batches(DataLoader(samples(5), 5)))
    assert columns(timer)["samples"].tolist() == [12, 12, 5]


class HasNoAttributes:
    """Raises whatever it is asked for."""

    def __getattr__(self, name):
        raise RuntimeError(name)


class HasNoItems(collections.UserDict):
    """A mapping whose values cannot be read."""

    def __getitem__(self, key):
        raise KeyError(key)


def ragged():
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def within_itself():
    found = []
    found.append(found)
    return found


SIZES = {
    "a number": (lambda: torch.tensor(1.0), 1),
    "a number of numpy": (lambda: np.array(1.0), 1),
    "nested": (ragged, 2),
    "a dict of nested": (lambda: {"a": ragged()}, 2),
    "quantized": (lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), 2),
    "no length": (HasNoLength, 0),
    "an object": (lambda: SimpleNamespace(points=3), 0),
    "one graph": (lambda: SimpleNamespace(num_graphs=1), 1),
    "no attributes": (HasNoAttributes, 0),
    "no items": (lambda: HasNoItems(a=1), 0),
    "within itself": (within_itself, 0),
}


@each("name", SIZES)
def test_a_batch_whose_size_nobody_can_tell_is_a_step_without_samples(name):
    make, samples = SIZES[name]
    batch, timer = make(), StepTimer("cpu")
    for given in timer.batches([batch] * 3):
        assert given is batch
        pass_ms(10)
    assert columns(timer)["samples"].tolist() == [samples] * 3
    assert timer.report().stages[0].steps == 3
    assert ("data/throughput_samples_per_s" in timer.metrics()) == (samples > 0)


@pytest.mark.parametrize("ended", [False, True])
def test_a_step_that_is_left_counts_only_if_it_was_said_to_have_ended(ended):
    timer, loader = StepTimer("cpu"), DataLoader(samples(8))
    for _ in range(2):
        for _, i in timer.batches(loader):
            pass_ms(10)
            if ended:
                timer.step_ended()
            if i == 3:
                break
        pass_ms(1000)
    steps = columns(timer)
    assert len(steps["step"]) == (8 if ended else 6)
    assert steps["compute_ms"].max() == 10
    assert steps["cold"].sum() == 2


def test_an_exception_in_the_loop_passes_and_leaves_no_open_step():
    timer, loader = StepTimer("cpu"), DataLoader(samples(8))

    def breaks():
        for _, i in timer.batches(loader):
            pass_ms(10)
            1 / (3 - int(i))

    with pytest.raises(ZeroDivisionError):
        breaks()
    pass_ms(1000)
    for _ in timer.batches(loader):
        pass_ms(10)
    steps = columns(timer)
    assert steps["compute_ms"].tolist() == [10] * 11
    assert np.nanmax(steps["gap_ms"]) == 0


def test_a_batch_is_let_go_of_when_the_loop_lets_go_of_it():
    class Big:
        alive = 0

        def __init__(self):
            Big.alive += 1

        def __del__(self):
            Big.alive -= 1

    for batch in StepTimer("cpu").batches(Big() for _ in range(5)):
        assert Big.alive == 1
        del batch
        assert Big.alive == 0


def test_a_validation_within_training_has_its_own_steps_and_is_no_part_of_a_training_step():
    timer = StepTimer("cpu")
    train, val = DataLoader(samples(6)), DataLoader(samples(3, slow=[1]))
    for _, i in timer.batches(train):
        pass_ms(10)
        if i == 2:
            for _ in timer.batches(val, stage="val"):
                pass_ms(5)
            pass_ms(100)
    assert columns(timer)["compute_ms"].tolist() == [10] * 6
    gaps = columns(timer)["gap_ms"][1:]
    assert np.nan_to_num(gaps, nan=-1).tolist() == [0, 0, -1, 0, 0]
    assert columns(timer, "val")["wait_ms"].tolist() == [0, LONG_MS, 0]
    assert columns(timer, "val")["compute_ms"].tolist() == [5, 5, 5]
    assert [stage.stage for stage in timer.report().stages] == ["train", "val"]


def test_the_duration_of_a_stage_leaves_out_the_others_and_what_lies_between_epochs():
    timer, rows = StepTimer("cpu"), samples(2)
    for _ in range(2):
        for _ in timer.batches(DataLoader(rows)):
            timer.step_ended()
            for _ in timer.batches(DataLoader(rows), stage="val"):
                pass_ms(50)
        pass_ms(200)
    train, val = timer.report().stages
    assert (train.duration_s, val.duration_s) == (0, pytest.approx(8 * 0.05))


def test_loaders_read_side_by_side_are_one_or_an_error():
    one, two = samples(5, slow=range(5), ms=20), samples(4, slow=range(4), ms=3)
    timer, loaders = StepTimer("cpu"), (DataLoader(one), DataLoader(two))
    for _ in timer.batches(zip(*loaders, strict=False)):
        pass_ms(10)
    assert waits(timer) == [23] * 4
    assert columns(timer)["compute_ms"].tolist() == [10] * 4
    with pytest.raises(OptionsError, match=r"Read several .* as one: batches\(zip\(a, b\)\)"):
        list(zip(*map(timer.batches, loaders), strict=False))


def test_an_iterator_that_was_left_standing_stops_no_later_loop():
    timer, loader = StepTimer("cpu"), DataLoader(samples(5))
    standing = iter(timer.batches(loader))
    next(standing)
    for _ in timer.batches(loader):
        pass_ms(10)
    assert columns(timer)["compute_ms"].tolist() == [10] * 5


def test_metrics_are_means_since_the_last_call_named_by_stage():
    timer = StepTimer("cpu")
    for _, i in timer.batches(FastDataLoader(samples(9, slow=[6]), num_workers=0)):
        pass_ms(10)
        if i == 4:
            early = timer.metrics()
    for _ in timer.batches(DataLoader(samples(3)), stage="val"):
        pass_ms(2)
    late = timer.metrics()
    assert early["data/step_ms"] == 10
    assert late["data/step_ms"] == 10 + LONG_MS / 5
    assert late["data/time_wait_ms"] == LONG_MS / 5
    assert late["data_val/step_ms"] == 2
    assert any(name.startswith("data_wait/") for name in early)
    assert timer.metrics() == {}
    for i, _ in enumerate(timer.batches(range(3001))):  # more than are kept one by one
        pass_ms(40 if i <= 1000 else 10)
    assert timer.metrics()["data/time_compute_ms"] == 20


def test_late_batches_have_causes_files_apart_and_a_verdict():
    timer, rows = StepTimer("cpu"), samples(160, slow=range(160), ms=4)
    loader = FastDataLoader(rows, 4, num_workers=0, executor="inline")
    for _ in timer.batches(loader):
        pass_ms(2)
    report = timer.report()
    assert report.verdict.code == "FD303"
    assert report.verdict.kind == "data-bound"
    assert report.verdict.findings[0].gain.factor > 1
    assert report.stages[0].causes.wait.read_blocked_ms == pytest.approx(16)
    assert report.notes == ()
    assert "FD303" in report.text()


def test_a_foreign_loader_is_judged_from_outside_and_that_is_said_once():
    timer, rows = StepTimer("cpu"), samples(10, slow=range(10), ms=4)
    for _ in timer.batches(DataLoader(rows)):
        pass
    for _ in timer.batches(DataLoader(rows), stage="val"):
        pass
    report = timer.report()
    assert report.verdict.code == "FD101"
    why = "a DataLoader does not tell, FastDataLoader does."
    assert report.notes == (f"Why batches were late is not known for train and val: {why}",)
    told = StepTimer("cpu")
    ours = FastDataLoader(rows, num_workers=0)
    for batches in (told.batches(ours), told.batches(DataLoader(rows), "val")):
        for _ in batches:
            pass
    assert told.report().notes == (f"Why batches were late is not known for val: {why}",)


def test_of_batches_that_were_not_late_nobody_has_to_know_why():
    timer = StepTimer("cpu")
    for _ in timer.batches([torch.zeros(2)] * 8):
        pass_ms(10)
    assert timer.report().notes == ()


class Own(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


class SlowStream(IterableDataset):
    def __iter__(self):
        for number in range(64):
            pass_ms(4)
            yield number


def slow_rows():
    return samples(64, slow=range(64), ms=4)


TELLS = "batches straight from a FastDataLoader: it tells why"


@each(
    ("make", "told", "note"),
    [
        (lambda: DataLoader(slow_rows()), "num_workers 0 -> ", "a DataLoader does not tell"),
        (lambda: DataLoader(SlowStream()), TELLS, "a DataLoader does not tell"),
        (lambda: Own(SlowStream()), TELLS, "a Own does not tell"),
        (lambda: iter(DataLoader(slow_rows())), TELLS, "FastDataLoader itself does"),
        (lambda: map(list, FastDataLoader(slow_rows())), TELLS, "FastDataLoader itself does"),
        (lambda: zip(DataLoader(slow_rows()), strict=True), TELLS, "FastDataLoader itself does"),
        (lambda: FastDataLoader(slow_rows(), num_workers=0), "FastDataLoader(", ""),
    ],
)
def test_what_a_loop_is_told_is_of_the_class_of_its_loader_and_can_be_followed(make, told, note):
    timer, loader = StepTimer("cpu"), make()
    for _ in timer.batches(loader):
        pass_ms(2)
    report = timer.report()
    assert report.verdict.kind == "data-bound"
    assert report.verdict.findings[0].remedy.startswith(told)
    assert note in str(report.notes)


def test_a_validation_loader_is_told_the_workers_that_it_lacks():
    timer = StepTimer("cpu")
    for _ in range(2):
        for _ in timer.batches(DataLoader(samples(64))):
            pass_ms(2)
        validation = DataLoader(slow_rows())
        for _ in timer.batches(validation, stage="val"):
            pass_ms(0.1)
    (found,) = (each for each in timer.report().verdict.findings if each.code == "FD318")
    assert found.remedy.startswith("num_workers 0 -> ")
    for _ in timer.batches(DataLoader(SlowStream()), stage="val"):
        pass_ms(0.1)
    (found,) = (each for each in timer.report().verdict.findings if each.code == "FD318")
    assert found.remedy == ""


def test_what_is_no_part_of_a_warm_step_changes_nothing_of_what_workers_are_said_to_gain():
    def told(*, validates=False, first_ms=2):
        timer = StepTimer("cpu")
        rows = samples(64, range(64), ms=1)
        for i, _ in enumerate(timer.batches(FastDataLoader(rows, 4, num_workers=0))):
            pass_ms(2 if i else first_ms)
            for _ in timer.batches(DataLoader(samples(8)), "val") if validates and i % 4 else ():
                pass_ms(50)
        (found,) = (f for f in timer.report().verdict.findings if f.code == "FD303")
        return found.remedy, found.gain

    assert told(validates=True) == told(first_ms=500) == told()


class Begins:
    """Batches whose passes take long to begin."""

    def __init__(self, begin_ms, wait_ms=0):
        self.begin_ms, self.wait_ms = begin_ms, wait_ms

    def __iter__(self):
        pass_ms(self.begin_ms)
        for i in range(10):
            pass_ms(self.wait_ms)
            yield i


@pytest.mark.parametrize(
    ("begin_ms", "val_wait_ms", "kind", "said"),
    [
        (0, 0, "compute-bound", "FD001"),
        (100, 0, "paused between epochs", "0.2 s of 0.6 s, 0.1 s each"),
        (0, 6, "starved in validation", "waited 0.2 s of its 0.2 s"),
    ],
)
def test_a_loop_is_judged_by_what_starts_of_epochs_and_validation_take_of_it(
    begin_ms, val_wait_ms, kind, said
):
    timer = StepTimer("cpu")
    for _ in range(3):
        for _ in timer.batches(Begins(begin_ms)):
            pass_ms(10)
        for _ in timer.batches(Begins(0, val_wait_ms), stage="val"):
            pass_ms(0.1)
    verdict = timer.report().verdict
    assert verdict.kind == kind
    assert said in f"{verdict.findings[0].cause} {verdict.code}"
    assert timer.report().wall is None


@pytest.mark.parametrize("later_ms", [0, 30])
def test_of_epochs_only_the_first_of_which_starts_slowly_the_others_are_not_blamed(later_ms):
    timer, batches = StepTimer("cpu"), Begins(500)
    for _ in range(4):
        for _ in timer.batches(batches):
            pass_ms(10)
        batches.begin_ms = later_ms  # as with workers that are kept
    told = [each.cause for each in timer.report().verdict.findings if each.code == "FD310"]
    cause = "starting epochs after the first took 90 ms of 1.0 s, 30 ms each"
    assert told == ([cause] if later_ms else [])


def test_a_first_step_of_validation_that_computes_for_long_is_not_its_waiting():
    timer = StepTimer("cpu")
    for _ in timer.batches(Begins(0)):
        pass_ms(10)
    for i in timer.batches(Begins(0, 4), stage="val"):
        pass_ms(1 if i else 1000)  # as where it is compiled
    assert "FD318" not in {each.code for each in timer.report().verdict.findings}


def test_what_passes_between_two_steps_is_told_and_no_loader_is_said_to_save_it():
    timer = StepTimer("cpu")
    for _ in timer.batches(DataLoader(samples(40, range(40), ms=1), 2)):
        pass_ms(10)
        timer.step_ended()
        pass_ms(38)
    verdict = timer.report().verdict
    assert verdict.sentence.endswith("(2.0 of 12.0 ms)")
    assert "38.0 ms pass beside each step" in verdict.evidence
    (found,) = verdict.findings
    assert (found.gain.before_ms, found.gain.after_ms) == pytest.approx((50, 48))


def test_one_timer_after_another_takes_the_stamps_of_a_loader_while_it_is_read():
    loader = FastDataLoader(samples(8))
    for _ in range(2):
        timer = StepTimer("cpu")
        for _ in range(2):
            for _ in timer.batches(loader):
                pass
            assert loader.records is None
            list(loader)
        assert timer.report().stages[0].causes.batches == 14
        assert timer.report().notes == ()


def test_a_loader_is_not_kept_alive():
    timer, loader = StepTimer("cpu"), FastDataLoader(samples(8))
    for _ in timer.batches(loader):
        pass
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert timer.report().stages[0].causes.batches == 7


def test_of_a_loader_that_is_gone_the_advice_is_that_of_one_that_is_kept():
    def advised(loader_of):
        timer = StepTimer("cpu")
        for _ in range(2):
            for _ in timer.batches(loader_of()):
                pass_ms(2)
        gc.collect()
        found = timer.report().verdict.findings[0]
        return found.code, found.remedy, found.gain

    loader_of = partial(FastDataLoader, samples(64, range(64), ms=1), 8, num_workers=0)
    kept = loader_of()
    told = advised(lambda: kept)
    assert told == advised(loader_of)
    assert told[:2] == ("FD303", "FastDataLoader(num_workers=4)")


def test_a_prefetching_loader_has_its_stamps():
    timer, loader = StepTimer("cpu"), FastDataLoader(samples(8), batch_size=2)
    for x, _ in timer.batches(prefetch(loader, "cpu")):
        assert x.shape == (2, 4)
    report = timer.report()
    assert report.stages[0].causes.batches == 3
    assert report.notes == ()


def fabric_of(loader, **arguments):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return fabric, model, optimizer, fabric.setup_dataloaders(loader, **arguments)


@pytest.mark.parametrize("moves", [True, False])
def test_fabric_is_measured_with_stamps(moves):
    """Also pins the name under which Fabric keeps the loader that it wraps."""
    loader = FastDataLoader(samples(12, slow=[7], ms=60), num_workers=0)
    fabric, model, optimizer, wrapped = fabric_of(loader, move_to_device=moves)
    timer = StepTimer(fabric.device)
    for _ in range(2):
        for batch in timer.batches(wrapped):
            x, _ = batch
            if not moves:
                with timer.transfer():
                    x = fabric.to_device(x)
            fabric.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    report = timer.report()
    stage = report.stages[0]
    found = columns(timer)["wait_ms"]
    assert found.tolist() == [60 if i in (7, 19) else 0 for i in range(24)]
    assert stage.causes.batches == 22
    assert stage.causes.slow_samples[0].index == 7
    assert (stage.transfer is None) == moves
    assert report.notes == ()


@pytest.mark.parametrize("device", ["gpu", 1.5, "cuda:x"])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(OptionsError, match="is no device"):
        StepTimer(device)


def test_a_device_that_this_machine_does_not_have_is_refused():
    with pytest.raises(OptionsError, match="device is 'cuda:77'"):
        StepTimer("cuda:77")


def test_an_unknown_stage_and_what_cannot_be_iterated_are_refused():
    with pytest.raises(OptionsError, match="'training'; allowed are 'train', 'val'"):
        StepTimer("cpu").batches([], stage="training")
    with pytest.raises(OptionsError, match="cannot be iterated"):
        StepTimer("cpu").batches(3)
