"""What takes the memory of workers: told from what was seen of their pages, and of the dataset."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from host.roots import root_of
from misses import Misses

from lightning_fastdata.host.memory import Pages, read_alone, read_pages
from lightning_fastdata.insight.evidence import Evidence
from lightning_fastdata.insight.machine import (
    Look,
    MemoryMeter,
    MemorySeen,
    leaks,
    memory_notes,
    memory_uses,
)
from lightning_fastdata.insight.verdict import findings
from lightning_fastdata.sources.shared import HeldObjects, held_objects

MIB, GIB = 2**20, 2**30
SAMPLES = HeldObjects(
    name="dataset.samples", kind="list of 1.2 million dicts",
    size_bytes=int(2.1 * GIB), counted_bytes=2 * GIB,
)  # fmt: skip


def seen(**known):
    return MemorySeen(**{"workers": 8, "left_bytes": 100 * GIB, **known})


def growth(*epochs, workers=1, steps=30, each=MIB, kept=True):
    """Return looks at workers that take so much of ``each`` a step, an epoch after the other."""
    found, size = [], 0
    for epoch, rate in enumerate(epochs):
        processes = range(workers) if kept else range(workers * epoch, workers * (epoch + 1))
        for _ in range(steps):
            found.append(Look(len(found), epoch, dict.fromkeys(processes, int(size))))
            size += rate * each
    return {"looks": tuple(found), "workers": workers}


def cache(workers, epochs):
    return growth(*((1 - 1 / workers) ** epoch for epoch in range(epochs)), workers=workers)


CAUSES = {
    "copied": seen(objects=(SAMPLES,), copied_bytes=2 * GIB),
    "copied, so far": seen(objects=(SAMPLES,), copied_bytes=600 * MIB),
    "copied, sent": seen(objects=(SAMPLES,), forked=False),
    "copied, one worker": seen(objects=(SAMPLES,), copied_bytes=GIB, workers=1),
    "leak": seen(**growth(1, 1, 1, 1, workers=2)),
    "leak of one worker": seen(**growth(1, 1, 1)),
    "leak here": seen(**{**growth(1, 1, 1), "workers": 0}),
    "leak of eight workers": seen(**growth(*[1] * 5, workers=8)),
    "cache": seen(**cache(2, 4)),
    "cache of one worker": seen(**growth(1, 0, 0, each=4 * MIB)),
    "cache of eight workers": seen(**cache(8, 5)),
    "cache, in the first epoch": seen(**growth(1, workers=4)),
    "cache that ends with workers": seen(**growth(1, 1, 1, workers=4, kept=False)),
    "copied, as its own pages tell": seen(
        objects=(replace(SAMPLES, name="dataset.unread", counted_bytes=3 * GIB), SAMPLES),
        own_parts={"dataset.unread": 0.01, "dataset.samples": 0.5},
        copied_bytes=2 * GIB,
    ),
}


def test_the_cause_of_memory_that_is_taken_is_told():
    with Misses() as misses:
        for name, given in CAUSES.items():
            first = memory_uses(given)[0]
            misses.check(name.startswith(first.cause), name, first)


HEALTHY = {
    "nothing": seen(),
    "workers of their own": seen(copied_bytes=30 * MIB),
    "an array, which nobody copies": seen(
        objects=(replace(SAMPLES, size_bytes=GIB, counted_bytes=999),),
        copied_bytes=30 * MIB,
    ),
    "a list that nobody reads": seen(
        objects=(replace(SAMPLES, size_bytes=150 * MIB, counted_bytes=100 * MIB),),
        copied_bytes=30 * MIB,
    ),
    "a list that is hardly read": seen(objects=(SAMPLES,), copied_bytes=40 * MIB),
    "a small list": seen(
        objects=(replace(SAMPLES, size_bytes=MIB, counted_bytes=MIB),),
        copied_bytes=30 * MIB,
    ),
    "it settles": seen(**growth(0.2, 0, 0, workers=2)),
    "a global that is copied, which is no list of the dataset": seen(
        objects=(SAMPLES,), own_parts={"dataset.samples": 0.0}, copied_bytes=2 * GIB
    ),
    "buffers, there soon": seen(
        looks=tuple(Look(n, n // 40, {1: min(n, 8) * 10 * MIB}) for n in range(80)), workers=2
    ),
    "buffers of workers that are new in each epoch": seen(
        looks=tuple(
            Look(n, n // 40, dict.fromkeys((n // 40, -n // 40), min(n % 40, 8) * 10 * MIB))
            for n in range(80)
        ),
        workers=2,
    ),
}  # fmt: skip


def test_a_list_is_blamed_by_its_own_pages_and_not_by_the_largest_sum():
    (use,) = memory_uses(CAUSES["copied, as its own pages tell"])
    assert (use.objects.name, use.size_bytes) == ("dataset.samples", 8 * GIB)


def test_what_is_healthy_is_blamed_for_nothing():
    for name, given in HEALTHY.items():
        assert memory_uses(given) == (), name
        assert not [f for f in findings(Evidence(memory=given)) if f.code.startswith("FD33")], name


def test_buffers_of_workers_that_are_new_in_an_epoch_are_no_cache_however_far_that_is():
    given = HEALTHY["buffers of workers that are new in each epoch"]
    for count in range(40, 81):
        assert memory_uses(replace(given, looks=given.looks[:count])) == (), count
    # A worker that comes in the midst of an epoch, which tuning adds.
    sizes = [{1: 0} | ({2: min(n - 20, 8) * 20 * MIB} if n >= 20 else {}) for n in range(40)]
    looks = [Look(n, 0, size) for n, size in enumerate(sizes)]
    for count in range(20, 41):
        assert memory_uses(seen(looks=tuple(looks[:count]), workers=2)) == (), count


def test_a_list_that_each_worker_copies_is_named_with_its_size_and_its_cure():
    (found,) = findings(Evidence(memory=CAUSES["copied"]))
    assert (found.code, found.severity) == ("FD334", "moderate")
    assert found.cause == (
        "dataset.samples (list of 1.2 million dicts, 2.10 GiB) is copied in each of 8 workers by "
        "reference counting: 16.00 GiB"
    )
    assert found.remedy == "from lightning_fastdata import share; dataset = share(dataset)"
    (part,) = findings(Evidence(memory=CAUSES["copied, so far"]))
    assert part.cause.endswith("4.69 GiB so far")
    (sent,) = findings(Evidence(memory=CAUSES["copied, sent"]))
    assert "as workers are not forked: 16.80 GiB" in sent.cause


def test_it_is_severe_where_what_is_to_come_does_not_fit():
    few = seen(objects=(SAMPLES,), copied_bytes=600 * MIB, left_bytes=4 * GIB)
    assert findings(Evidence(memory=few))[0].severity == "high"
    # Nearly all is taken already, and more of it than is left.
    rest_fits = seen(objects=(SAMPLES,), copied_bytes=1900 * MIB, left_bytes=4 * GIB)
    assert findings(Evidence(memory=rest_fits))[0].severity == "moderate"
    rest = seen(objects=(SAMPLES,), copied_bytes=600 * MIB, left_bytes=11 * GIB)
    assert findings(Evidence(memory=rest))[0].severity == "high"
    fits = seen(**cache(2, 4))
    assert findings(Evidence(memory=fits)) == ()
    assert "as in a cache" in memory_notes(fits)[0]
    assert memory_notes(few) == ()
    full = seen(**cache(2, 4), left_bytes=MIB)
    (found,) = findings(Evidence(memory=full))
    assert (found.code, found.severity) == ("FD336", "high")
    assert "as in a cache" in found.cause
    for left_bytes, severity in ((MIB, "high"), (1000 * GIB, "moderate")):
        (found,) = findings(Evidence(memory=replace(CAUSES["leak"], left_bytes=left_bytes)))
        assert (found.code, found.severity) == ("FD335", severity)


def test_where_nobody_can_say_whether_it_leaks_the_words_do_not():
    (sure,) = memory_notes(seen(**cache(2, 4)))
    assert not sure.endswith("is not known.")
    for unsure in (
        seen(**growth(1, each=4 * MIB, workers=2)),
        seen(**growth(4, 4, 4, workers=2, kept=False)),
    ):
        (told,) = memory_notes(unsure)
        assert told.endswith("; whether it leaks is not known.")


class Holds:
    def __init__(self, **held):
        self.__dict__.update(held)


def test_objects_are_named_and_sized_by_what_a_worker_would_copy():
    inner = Holds(
        samples=[{"path": f"{n:012d}.jpg", "at": [float(n)] * 4} for n in range(5000)],
        arrays=[np.zeros(2000) for _ in range(50)],
        names=dict.fromkeys(range(300), "x" * 10),
        array=np.zeros(10**6),
    )
    first, *others = held_objects(Holds(dataset=inner))
    assert first.name == "dataset.dataset.samples"
    assert first.kind == "list of 5,000 dicts"
    one = inner.samples[0]
    least = sum(sys.getsizeof(each) for each in (one, one["path"], one["at"]))
    assert 5000 * least <= first.size_bytes <= 1.2 * 5000 * (least + 4 * 24) + 8 * 5000 + 100
    assert first.counted_bytes < 5000 * (16 + 64 + 72 + 72 + 4 * 24 + 16)
    kinds = {each.name.rpartition(".")[2]: each for each in others}
    assert kinds["arrays"].kind == "list of 50 arrays"
    assert kinds["arrays"].size_bytes > 50 * 16_000 > 50 * 200 > kinds["arrays"].counted_bytes
    assert kinds["names"].kind == "dict of 300 texts"


def test_a_list_of_datasets_is_named_by_the_lists_of_these():
    parts = [Holds(samples=[{"n": number} for number in range(n)]) for n in (300, 200)]
    found = held_objects(Holds(datasets=parts))
    assert [each.name for each in found] == [
        "dataset.datasets[0].samples", "dataset.datasets[1].samples"
    ]  # fmt: skip
    nested = Holds(splits={"train": [f"{n:030d}" for n in range(500)]})
    (split,) = held_objects(nested)
    written = set(map(id, nested.splits["train"]))
    assert len(written & set(split.places)) > 0.9 * len(split.places) > 80, "by reading"


def test_what_objects_hold_in_slots_counts_and_what_many_hold_counts_once():
    paths = [Path(f"train/{n:012d}.jpg") for n in range(500)]
    name = "a name that all have" * 10
    kinds = {
        held.name.rpartition(".")[2]: held
        for held in held_objects(Holds(paths=paths, names=[(name, n + 0.5) for n in range(500)]))
    }
    least = sys.getsizeof(paths[0]) + sys.getsizeof(paths[0].name)
    assert kinds["paths"].size_bytes > 500 * least
    assert kinds["names"].size_bytes < 500 * sys.getsizeof(name)


def test_pages_that_only_one_process_has_are_told_from_those_that_several_have(tmp_path):
    def pages_of(told):
        return read_pages(7, root=root_of(tmp_path, {"proc/7/smaps_rollup": told}))

    text = "Pss: 700 kB\nPss_Shmem: {} kB\nAnonymous: 900 kB\n"
    text += "Private_Dirty: {} kB\n"
    assert pages_of(text.format(40, 600)) == Pages(*(1024 * n for n in (900, 560)))
    # What is private is of a memory file.
    assert pages_of(text.format(500, 480)).own_bytes == 0
    # It is of a file that was just written.
    fresh = pages_of(text.format(0, 480) + "Pss_Anon: 70 kB\n")
    assert fresh.own_bytes == 70 * 1024
    assert pages_of("Rss: 1 kB\n") is None


def meter(sizes, pages=None, alone=lambda *_: None):
    readers = SimpleNamespace(
        read_own_bytes=sizes.get,
        read_pages={}.get if pages is None else pages.get,
        read_alone=alone,
    )
    return MemoryMeter(readers)


def test_what_a_worker_has_grown_by_does_not_count_as_copied():
    sizes, pages = {1: 500 * MIB, 2: 500 * MIB}, {}
    of = meter(sizes, pages)
    of.look([1, 2], step=0, epoch=0)
    sizes.update({1: 600 * MIB, 2: 600 * MIB})
    for process in (os.getpid(), 1, 2):
        pages[process] = Pages(600 * MIB, 300 * MIB)
    of.read([1, 2])
    of.look([1, 2], step=9, epoch=0)
    found = of.seen(Holds(cache={}, samples=[1] * 5), forked=True)
    assert found.copied_bytes == 200 * MIB
    assert [look.sizes for look in found.looks] == [
        dict.fromkeys((1, 2), n * MIB) for n in (500, 600)
    ]
    assert found.workers == 2
    of.read([])
    assert of.copied_bytes == 200 * MIB, "of workers that have ended"


def trained(crews, *, keeps):
    """Return looks at workers, some in each epoch, that keep samples: ``"all"``, or each once."""
    draws, sizes, known, looks = random.Random(0), Counter(), set(), []
    for epoch, crew in enumerate(crews):
        order = draws.sample(range(400), 400)
        for step in range(40):
            worker = crew[step % len(crew)]
            for sample in order[step * 10 : step * 10 + 10]:
                sizes[worker] += MIB * (keeps == "all" or (worker, sample) not in known)
                known.add((worker, sample))
            looks.append(Look(len(looks), epoch, {each: sizes[each] for each in crew}))
    return looks


CREWS = {
    **{f"{count} workers": [list(range(count))] * 6 for count in (1, 2, 3, 4, 8)},
    "more": [[1, 2]] * 2 + [[1, 2, 3, 4]] * 3,
    "more, at last": [[1, 2]] * 4 + [[1, 2, 3, 4, 5, 6]],
    "fewer": [[1, 2, 3, 4]] * 3 + [[2, 4]] * 4,
    "others": [[1, 2]] * 2 + [[3, 4]] * 4,
}


def test_a_leak_and_a_cache_are_told_apart_after_some_epochs_though_workers_come_and_go():
    with Misses() as misses:
        for name, crews in CREWS.items():
            misses.check(leaks(trained(crews, keeps="all")) is True, name, "leak")
            misses.check(leaks(trained(crews, keeps="once")) is False, name, "cache")
            misses.check(leaks(trained(crews[:1], keeps="all")) is None, name, "one epoch")
    anew = [[2 * epoch, 2 * epoch + 1] for epoch in range(6)]
    for keeps in ("all", "once"):
        assert leaks(trained(anew, keeps=keeps)) is None


def test_the_part_of_a_list_that_workers_own_is_not_asked_of_a_single_one():
    objects = Holds(samples=[f"{n:030d}" for n in range(500)])
    for workers, expected in (([1, 2], {"dataset.samples": 0.5}), ([1], {})):
        pages = dict.fromkeys([os.getpid(), *workers], Pages(9, 9))
        of = meter(dict.fromkeys(workers, MIB), pages, alone=lambda process, _: process - 1.0)
        of.look(workers, step=0, epoch=0)
        of.read(workers)
        assert of.seen(objects, forked=True).own_parts == expected
        pages.clear()
        of.read(workers)
        assert of.seen(objects, forked=True).own_parts == expected, "of workers that have ended"


def test_where_nothing_is_known_nothing_is_said():
    of = meter({})
    of.look([1], step=0, epoch=0)
    of.read([1])
    assert memory_uses(of.seen(None, forked=True)) == ()


def test_readings_stay_few():
    of = meter({1: 5})
    for step in range(5000):
        of.look([1], step=step, epoch=step // 1000)
    found = of.seen(None, forked=True).looks
    assert 100 < len(found) <= 301
    assert {each.epoch for each in found} == {0, 1, 2, 3, 4}


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux' /proc")
def test_a_forked_process_that_reads_a_list_is_seen_to_copy_its_objects():
    dataset = Holds(samples=[{"path": f"{n:030d}"} for n in range(40_000)])
    (held,) = held_objects(dataset)
    reading, writing = os.pipe()
    idle = os.fork()
    if idle == 0:
        signal.pause()
    pid = os.fork()
    if pid == 0:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            os.write(writing, b"-")
            signal.sigwait({signal.SIGUSR1})
            for sample in dataset.samples:
                len(sample["path"])
            os.write(writing, b"+")
            signal.pause()
        finally:
            os._exit(0)
    try:
        of = MemoryMeter()
        os.read(reading, 1)
        of.look([pid], step=0, epoch=0)
        of.read([pid])
        before = of.copied_bytes
        os.kill(pid, signal.SIGUSR1)
        os.read(reading, 1)
        of.look([pid], step=1, epoch=0)
        of.read([pid])
        copied = of.copied_bytes - before
        own = [read_alone(each, held.places) for each in (pid, idle)]
    finally:
        for each in (pid, idle):
            os.kill(each, signal.SIGKILL)
            os.waitpid(each, 0)
        os.close(reading), os.close(writing)
    assert 0.6 * held.counted_bytes < copied < 1.7 * held.counted_bytes
    assert own[0] is None or own[0] > 0.9 > 0.3 > own[1]
