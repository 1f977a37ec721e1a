"""Ranks go on with what was left, and so do fewer or more ranks with the same global batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conformance.forked_ranks import launched
from misses import each
from resilience.resume_on_ranks import SAMPLERS, STREAMS
from resilience.runs import first_difference, lines

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).with_name("resume_on_ranks.py")
GLOBAL = 8
"""Samples of a step, of all ranks."""
LENGTH = 44
"""Five steps and a half an epoch."""
STEPS, LAST = 6, 14


def settings(name, ranks, steps, *, resume=None, loader="inline", **more):
    about = {**more, "loader": loader, "batch_size": GLOBAL // ranks, "length": LENGTH}
    return {"name": name, "steps": steps, "resume": resume, **about}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Records of straight runs, and of runs that went on with as many ranks or another number."""
    folder = tmp_path_factory.mktemp("ranks")
    stops = (3, STEPS)  # within an epoch, and at its last step
    begin = [settings("one", 1, LAST), *(settings(f"one-{n}", 1, n) for n in stops)]
    two = [settings("two", 2, LAST)]
    for n in stops:
        two += [
            settings(f"two-{n}", 2, n, loader="workers-1"),
            settings(f"two-{n}-two", 2, LAST, resume=f"two-{n}"),
            settings(f"one-{n}-two", 2, LAST, resume=f"one-{n}"),
        ]
    # One rank begins, two go on, and one ends it.
    two.append(settings("one-3-two-5", 2, 5, resume="one-3"))
    one = [settings(f"two-{n}-one", 1, LAST, resume=f"two-{n}") for n in stops]
    one.append(settings("one-3-two-5-one", 1, LAST, resume="one-3-two-5"))
    # Shuffled in blocks: begun on one rank or two, and gone on with on the other.
    blocks = {"shuffle": "blocks"}
    begin += [settings("block", 1, LAST, **blocks), settings("block-3", 1, 3, **blocks)]
    two += [
        settings("blocks", 2, LAST, **blocks),
        settings("blocks-3", 2, 3, loader="workers-1", **blocks),
        settings("blocks-3-two", 2, LAST, resume="blocks-3", **blocks),
        settings("block-3-two", 2, LAST, resume="block-3", **blocks),
    ]
    one.append(settings("blocks-3-one", 1, LAST, resume="blocks-3", **blocks))
    lengths = {"by_length": True}
    two += [
        settings("lengths", 2, 12, **lengths),
        settings("lengths-2", 2, 2, loader="workers-1", **lengths),
        settings("lengths-2-two", 2, 12, resume="lengths-2", **lengths),
    ]
    one.append(settings("lengths-2-one", 1, 10, resume="lengths-2", **lengths))
    for sampler in SAMPLERS:
        how = {"sampler": sampler}
        begin += [settings(sampler, 1, LAST, **how), settings(f"{sampler}-3", 1, 3, **how)]
        two += [
            settings(f"{sampler}s", 2, 9, loader="workers-1", **how),
            settings(f"{sampler}-3-two", 2, 9, resume=f"{sampler}-3", **how),
        ]
        one.append(settings(f"{sampler}s-one", 1, LAST, resume=f"{sampler}-3-two", **how))
    launched(PROGRAM, str(folder), json.dumps([(1, begin), (2, two), (1, one)]))
    return folder


def samples(folder, name):
    """The samples of each step, of all ranks, in order."""
    ranks = [[line.split(" ") for line in lines(file)] for file in sorted(folder.glob(f"{name}-?"))]
    return [
        (steps[0][0], sorted(int(i) for step in steps for i in step[3].split(",")))
        for steps in zip(*ranks, strict=True)
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize("stop", [3, STEPS])
def test_two_ranks_go_on_with_what_was_left_to_each(folder, stop):
    for rank in range(2):
        straight = lines(folder / f"two-{rank}")
        assert len(straight) == LAST
        assert first_difference(lines(folder / f"two-{stop}-{rank}"), straight[:stop]) is None
        assert first_difference(lines(folder / f"two-{stop}-two-{rank}"), straight[stop:]) is None


@pytest.mark.parametrize("stop", [3, STEPS])
@pytest.mark.parametrize("run", ["one-{}-two", "two-{}-one"])
def test_another_number_of_ranks_goes_on_with_what_was_left(folder, stop, run):
    straight = samples(folder, "one")
    assert len(straight) == LAST
    assert samples(folder, run.format(stop)) == straight[stop:]


@pytest.mark.parametrize("run", ["block-3-two", "blocks-3-two", "blocks-3-one"])
def test_a_shuffle_in_blocks_goes_on_on_any_number_of_ranks(folder, run):
    straight = samples(folder, "block")
    assert samples(folder, "blocks") == straight
    assert samples(folder, run) == straight[3:]
    epoch = [sample for _, step in straight[:6] for sample in step]
    assert sorted(epoch) == list(range(LENGTH))
    # 44 samples in groups of four, of which eight are shuffled together: the first four steps.
    assert len({sample // 4 for sample in epoch[:32]}) == 8


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_two_ranks_train_on_the_global_batches_of_one_of_any_sampler_and_go_on(folder, sampler):
    """Ranks, and runs, begin with other states of the global generators each."""
    straight = samples(folder, sampler)
    assert len(straight) == LAST
    assert straight[0] != straight[7]
    assert samples(folder, f"{sampler}s") == straight[:9]
    assert samples(folder, f"{sampler}-3-two") == straight[3:9]
    assert samples(folder, f"{sampler}s-one") == straight[9:]


def test_two_ranks_share_batches_of_like_length_and_one_goes_on(folder):
    straight = samples(folder, "lengths")
    epochs = [[i for epoch, step in straight for i in step if epoch == n] for n in "01"]
    assert sorted(epochs[0]) == list(range(LENGTH))
    assert sorted(epochs[1]) == list(range(LENGTH))
    assert epochs[0] != epochs[1]
    assert samples(folder, "lengths-2-two") == straight[2:]
    rest = [i for epoch, step in samples(folder, "lengths-2-one") for i in step if epoch == "0"]
    begun = [i for _, step in straight[:2] for i in step]
    assert sorted(begun + rest) == list(range(LENGTH))


def test_the_number_of_ranks_may_change_more_than_once(folder):
    straight = samples(folder, "one")
    assert samples(folder, "one-3-two-5") == straight[3:5]
    assert samples(folder, "one-3-two-5-one") == straight[5:]


def test_a_sampler_that_gives_some_ranks_more_batches_is_refused_on_all_of_them(folder):
    texts = [(folder / f"uneven-{rank}").read_text() for rank in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("refused: ")
    assert "Uneven gives ranks 2 to 3 batches" in texts[0]


@each(("case", "sampler"), [("seeded", "Seeded"), ("shuffled", "ShuffleSampler")])
def test_ranks_that_are_not_seeded_alike_are_told_before_the_training(folder, case, sampler):
    for rank in range(2):
        text = (folder / f"{case}-{rank}").read_text()
        assert f"{sampler} is not seeded alike on all ranks" in text


def test_what_is_no_number_under_the_name_of_a_seed_is_not_compared(folder):
    for rank in range(2):
        assert "seeded alike" not in (folder / f"method-{rank}").read_text()


@pytest.mark.parametrize("name", STREAMS)
def test_each_rank_goes_on_in_its_own_part_of_a_stream(folder, name):
    """The checkpoint has the state of rank 0. A loader alone is a batch ahead of its training."""
    for rank in range(2):
        taken = json.loads((folder / f"stream-{name}-2-{rank}").read_text())
        whole = [[number, number + 2] for number in range(rank, 16, 4)]
        assert taken == (whole if name == "module" else [*whole[:2], *whole[3:]])


@pytest.mark.parametrize("name", STREAMS)
def test_another_number_of_ranks_does_not_go_on_within_a_stream(folder, name):
    said = json.loads((folder / f"stream-{name}-1-0").read_text())
    assert said.startswith("The stream was saved on 2 ranks, and shares itself out among 1 now")
