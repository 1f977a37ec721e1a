"""Samples that cannot be read are named, replaced or left out, alike for every executor."""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import stat
import warnings
from pathlib import Path
from typing import Any

import albumentations
import numpy as np
import pytest
import torch
from resilience.runs import warned
from thoroughness import LONG
from torch.utils.data import Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from lightning_fastdata import FastDataLoader, FastDataWarning
from lightning_fastdata.augment import as_batch_transform
from lightning_fastdata.batches import bad_samples, memory
from lightning_fastdata.batches.bad_samples import BadSamples, SampleGuard
from lightning_fastdata.errors import DatasetError, OptionsError, WorkerError

LENGTH = 1000
BAD = (3, 250, 251, 700, 999)
SETUPS = {
    "inline": {"executor": "inline"},
    "workers-1": {"executor": "workers", "num_workers": 1},
    "workers-2": {"executor": "workers", "num_workers": 2},
    "workers-4": {"executor": "workers", "num_workers": 4},
    "torch-0": {"executor": "torch"},
}
CHOSEN = [name for name in SETUPS if name != "workers-4" or LONG]
SETUP = pytest.mark.parametrize("setup", CHOSEN)


class Numbers(Dataset):
    """Sample i is 16 floats of i and of the epoch's draw; some cannot be read."""

    def __init__(self, length: int = LENGTH, bad: tuple[int, ...] = BAD) -> None:
        self.length = length
        self.bad = frozenset(bad)
        self.samples = [(f"/data/{i}.bin", 0) for i in range(length)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise ValueError(f"sample {index} is damaged")
        return {"values": torch.full((16,), float(index)), "index": index}


class Together(Numbers):
    """The same, read by the batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Images(Dataset):
    """Images, some of which a transform refuses."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = np.full((8, 8, 3), index % 251, np.uint8)
        image[0, 0] = (index // 256, index % 256, 7)
        return {"image": image, "index": index}


def refuse(image: Any, **_: Any) -> Any:
    index = int(image[0, 0, 0]) * 256 + int(image[0, 0, 1])
    if index in BAD and image[0, 0, 2] == 7:
        raise ArithmeticError(f"no transform of {index}")
    return image


def pipeline() -> albumentations.Compose:
    return albumentations.Compose(
        [albumentations.Lambda(image=refuse, p=1.0), albumentations.GaussNoise(p=0.8)]
    )


def loader(dataset: Any, setup: str, rule: Any = "replace", **how: Any) -> FastDataLoader:
    return FastDataLoader(dataset, on_bad_sample=rule, **{"batch_size": 32, **how}, **SETUPS[setup])


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastDataWarning)
        yield


def expected(bad: tuple[int, ...] = BAD, epoch: int = 0, seed: int = 0) -> list[int]:
    """Return which sample is read for each index, by the rule alone."""
    guard = SampleGuard("replace", seed, range(LENGTH))
    found = list(range(LENGTH))
    for index in bad:
        attempt = 1
        while (other := guard.stand_in(index, epoch, attempt)) in bad:
            attempt += 1
        found[index] = other
    return found


def stand_in(index: int, of: int, epoch: int = 0) -> int:
    """Return which sample is read for one of so many."""
    return SampleGuard("replace", 0, range(of)).stand_in(index, epoch)


def taken(batches: list[Any]) -> list[int]:
    return [int(i) for batch in batches for i in batch["index"]]


# -- one rule for every executor -------------------------------------------------------------------


@pytest.mark.cases(4)
@SETUP
@pytest.mark.parametrize("kind", [Numbers, Together])
def test_replaced_samples_are_those_of_the_rule_for_every_executor(setup, kind) -> None:
    data = loader(kind(), setup)
    for epoch in range(2):
        batches = list(data)
        assert [len(batch["index"]) for batch in batches] == [32] * 31 + [8]
        wanted = expected(epoch=epoch)
        assert taken(batches) == wanted
        values = torch.cat([batch["values"] for batch in batches])
        assert torch.equal(values, torch.tensor(wanted).float()[:, None].expand(-1, 16))
    assert data.faults.samples == 2 * len(BAD)
    assert data.faults.retries == 0


class Drawing(Numbers):
    """Draws from the global generators, before it fails, too."""

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand(4) + np.random.rand()
        return {**super().__getitem__(index), "drawn": drawn}


def test_what_replaces_a_sample_is_drawn_under_its_own_key() -> None:
    whole = {}
    for batch in loader(Drawing(bad=()), "inline"):
        whole |= dict(zip(taken([batch]), batch["drawn"], strict=True))
    wanted = expected()
    for setup in ("inline", "workers-1", "workers-2"):
        batches = list(loader(Drawing(), setup))
        assert taken(batches) == wanted
        drawn = torch.cat([batch["drawn"] for batch in batches])
        assert torch.equal(drawn, torch.stack([whole[index] for index in wanted])), setup


def test_samples_that_a_transform_refuses_are_replaced_with_the_same_bytes() -> None:
    found = {}
    for setup in SETUPS if LONG else ("inline", "workers-2", "torch-0"):
        transform = as_batch_transform(pipeline())
        data = loader(Images(), setup, transform=transform)
        batches = list(data)
        assert taken(batches) == expected(), setup
        assert data.faults.samples == len(BAD)
        found[setup] = torch.cat([torch.as_tensor(batch["image"]) for batch in batches])
    first = found.pop("inline")
    for setup, images in found.items():
        assert torch.equal(images, first), setup


@pytest.mark.cases(7)
@SETUP
@pytest.mark.parametrize("kind", [Numbers, Together])
def test_skipped_samples_shorten_their_batch_and_an_empty_one_is_not_delivered(setup, kind) -> None:
    bad = (0, 1, 2, 3, 37, 63)
    batches = list(loader(kind(64, bad), setup, "skip", batch_size=4))
    wanted = [i for i in range(64) if i not in bad]
    assert taken(batches) == wanted
    assert [len(batch["index"]) for batch in batches] == [4] * 8 + [3] + [4] * 5 + [3]
    values = torch.cat([batch["values"] for batch in batches])
    assert torch.equal(values[:, 0], torch.tensor(wanted).float())


@pytest.mark.cases(4)
@SETUP
def test_single_samples_are_replaced_and_skipped(setup) -> None:
    class Plain(Numbers):
        def __getitem__(self, index: int) -> int:
            return int(super().__getitem__(index)["index"])

    skipped = list(loader(Plain(20, (0, 7)), setup, "skip", batch_size=None))
    assert skipped == [i for i in range(20) if i not in (0, 7)]
    replaced = list(loader(Plain(20, (7,)), setup, batch_size=None))
    assert replaced == [*range(7), stand_in(7, 20), *range(8, 20)]


def test_rows_that_are_read_one_by_one_are_replaced_as_elsewhere() -> None:
    rows = torch.arange(40)
    order = [*range(10), 99, *range(10, 20)]  # there is no sample 99
    found = []
    for how in ({"executor": "gather"}, {"executor": "workers", "num_workers": 2}):
        data = FastDataLoader(
            TensorDataset(rows), batch_size=7, sampler=order, on_bad_sample="replace", **how
        )
        found.append(torch.cat([batch[0] for batch in data]).tolist())
        assert data.faults.samples == 1
    assert found[0] == found[1] == [*range(10), stand_in(99, 40), *range(10, 20)]


def test_a_subset_given_to_a_sampler_is_not_left() -> None:
    part = list(range(0, 200, 2))
    data = loader(Numbers(200, (8, 10)), "workers-2", sampler=SubsetRandomSampler(part))
    assert all(index % 2 == 0 for _ in range(3) for index in taken(list(data)))


@pytest.mark.parametrize(("shared", "reads"), [(True, "side processes"), (False, "the training")])
def test_others_read_in_the_place_of_torchs_own_iterator(monkeypatch, shared, reads) -> None:
    monkeypatch.setattr(memory, "shared_slots_supported", lambda: shared)
    with pytest.warns(FastDataWarning, match=rf"does not read on .*that {reads}"):
        data = FastDataLoader(Numbers(), 32, False, num_workers=1, executor="torch",
                              on_bad_sample="replace")  # fmt: skip
    monkeypatch.undo()
    assert taken(list(data)) == expected()


class OnlyAlone(Together):
    """Its call for a batch always fails."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) > 1:
            raise RuntimeError("not so many")
        return super().__getitems__(indices)


@pytest.mark.parametrize("setup", ["inline", "workers-2", "torch-0"])
def test_a_call_for_a_batch_that_fails_alone_is_counted_or_an_error(setup) -> None:
    data = loader(OnlyAlone(64, ()), setup)
    assert taken(list(data)) == list(range(64))
    assert (data.faults.samples, data.faults.retries) == (0, 2)
    with pytest.raises(RuntimeError, match="not so many"):
        list(loader(OnlyAlone(64, ()), setup, "raise"))


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", ["inline", "workers-2"])
def test_an_error_names_the_sample_its_file_and_the_stage(setup) -> None:
    with pytest.raises(ValueError, match="damaged") as told:
        list(loader(Numbers(40, (9,)), setup, "raise"))
    text = "\n".join([str(told.value), *getattr(told.value, "__notes__", ())])
    assert "hile reading sample 9 of the dataset (file /data/9.bin)" in text
    transform = as_batch_transform(pipeline())
    with pytest.raises(ArithmeticError, match="no transform of 3") as told:
        list(loader(Images(), setup, "raise", transform=transform))
    text = "\n".join([str(told.value), *getattr(told.value, "__notes__", ())])
    assert "hile reading sample 3 of the dataset, in its transform" in text


def refuse_to_collate(samples: list[Any]) -> Any:
    if any(sample["index"] == 9 for sample in samples):
        raise RuntimeError("these do not go together")
    return [sample["index"] for sample in samples]


@pytest.mark.cases(4)
@SETUP
@pytest.mark.parametrize("rule", ["raise", "replace", "skip"])
def test_a_collation_that_fails_is_an_error_that_names_its_samples(setup, rule) -> None:
    how = {"collate_fn": refuse_to_collate, "batch_size": 4}
    with pytest.raises(RuntimeError, match="do not go together") as told:
        list(loader(Numbers(40, ()), setup, rule, **how))
    text = "\n".join([str(told.value), *getattr(told.value, "__notes__", ())])
    if not (setup.startswith("torch") and rule == "raise"):  # that is torch's own
        assert "n collate_fn of samples [8, 9, 10, 11]" in text


@pytest.mark.cases(4)
@SETUP
def test_more_bad_samples_than_the_budget_end_the_training_and_are_listed(setup) -> None:
    bad = tuple(range(0, 400, 10))
    data = loader(Numbers(bad=bad), setup, BadSamples("replace", 0.02))
    with pytest.raises(DatasetError, match=r"and 20 may be[\s\S]*/data/100.bin"):
        list(data)
    assert len(list(loader(Numbers(bad=bad), setup, BadSamples("replace", 0.05)))) == 32
    assert len(list(loader(Numbers(100, tuple(range(10))), setup, "skip"))) == 4  # ten always may
    with pytest.raises(DatasetError, match="11 samples of the dataset are bad, and 10 may be"):
        list(loader(Numbers(100, tuple(range(11))), setup, "skip"))


@pytest.mark.cases(4)
@SETUP
def test_where_nothing_can_be_read_the_first_error_is_raised(setup) -> None:
    with pytest.raises(ValueError, match=r"sample \d is damaged") as told:
        list(loader(Numbers(50, tuple(range(50))), setup, batch_size=4))
    text = "\n".join([str(told.value), *getattr(told.value, "__notes__", ())])
    assert "8 other samples were read in its place" in text


def test_a_new_kind_of_error_is_warned_of_once() -> None:
    data = loader(Numbers(), "workers-2")
    with warned() as texts:
        list(data)
        list(data)
    (text,) = [text for text in texts if "is bad" in text]
    assert "Sample 3 (file /data/3.bin) is bad and was replaced" in text


def test_what_is_impossible_is_said_when_the_loader_is_made() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(OptionsError, match="is a stream"):
        FastDataLoader(Stream(), on_bad_sample="skip")
    with pytest.raises(OptionsError, match="on_bad_sample is 'ignore'"):
        FastDataLoader(Numbers(), on_bad_sample="ignore")  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="budget_share is 2"):
        BadSamples("skip", 2)
    assert BadSamples("skip", np.float32(0.5)).budget_share == 0.5
    with pytest.raises(OptionsError, match="quarantine_file is ''"):
        BadSamples("skip", quarantine_file="")


# -- the file --------------------------------------------------------------------------------------


@pytest.mark.cases(4)
@SETUP
def test_bad_samples_are_written_to_a_private_file(setup, tmp_path: Path) -> None:
    file = tmp_path / "logs" / "bad.jsonl"
    data = loader(Numbers(), setup, BadSamples("replace", 0.001, file))
    list(data)
    list(data)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["index"] for line in lines} == set(BAD)
    assert [line for line in lines if line["index"] == 250] == [
        {
            "index": 250,
            "path": "/data/250.bin",
            "stage": "read",
            "error": "ValueError: sample 250 is damaged",
            "count": epoch + 1,
            "epoch": epoch,
        }
        for epoch in range(2)
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.cases(4)
@SETUP
def test_an_error_is_written_down_before_it_is_raised(setup, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    with pytest.raises(ValueError, match="damaged"):
        list(loader(Numbers(), setup, BadSamples("raise", quarantine_file=file)))
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["index"] == 3


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "bad.jsonl"
    victim.write_text("mine")
    file.symlink_to(victim)
    with pytest.warns(FastDataWarning, match="not written to"):
        batches = list(loader(Numbers(), "inline", BadSamples("replace", 0.001, file)))
    assert taken(batches) == expected()
    assert victim.read_text() == "mine"


# -- what passes by itself -------------------------------------------------------------------------


class Flaky(Dataset):
    """A network file system: one read in 20 fails at first, one may do so for ever."""

    def __init__(self, folder: Path, lost: int | None) -> None:
        self.folder, self.lost = str(folder), lost

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        if index % 20 == 3:
            marker = Path(self.folder, str(index))
            tries = len(marker.read_text()) if marker.exists() else 0
            marker.write_text("x" * (tries + 1))
            if tries < 2 or index == self.lost:
                number = index // 20 % 4
                if number == 3:
                    raise DatasetError("cannot read") from ConnectionResetError("by peer")
                code = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)[number]
                raise OSError(code, os.strerror(code), f"/net/{index}")
        return index


RULES = ("raise", "replace", "skip")
AGAIN = [(setup, rule) for setup in CHOSEN for rule in RULES]
AGAIN.remove(("torch-0", "raise"))  # of which torch itself reads the samples


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_samples, "_RETRY_AFTER_S", (0.0, 0.001, 0.002))


@pytest.mark.cases(9)
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("setup", "rule"), AGAIN)
def test_a_read_that_fails_for_a_moment_is_done_again(setup, rule, tmp_path: Path) -> None:
    lost = None if rule == "raise" else 43
    data = loader(Flaky(tmp_path, lost), setup, BadSamples(rule, 0.001, tmp_path / "bad.jsonl"))
    other = {"raise": [43], "replace": [stand_in(43, 200)], "skip": []}[rule]
    assert torch.cat(list(data)).tolist() == [*range(43), *other, *range(44, 200)]
    # Nine samples at their third try, and one that is given up after its fourth.
    assert data.faults.retries == 9 * 2 + (2 if lost is None else 3)
    if lost is not None:
        (line,) = (tmp_path / "bad.jsonl").read_text().splitlines()
        assert json.loads(line)["path"] == "/net/43"


# -- samples that kill -----------------------------------------------------------------------------


class Deadly(Numbers):
    def __init__(self, how: str) -> None:
        super().__init__(60, ())
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            if self.how == "exit":
                os._exit(3)
            faulthandler.disable()  # pytest's, which would print stacks
            signal.raise_signal(signal.Signals[self.how])  # of this thread
        return super().__getitem__(index)


def collate_whole(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


@pytest.mark.cases(3)
@pytest.mark.parametrize("how", ["exit", "SIGSEGV", *(["SIGABRT", "SIGKILL"] if LONG else [])])
@pytest.mark.parametrize("setup", ["workers-1", "workers-2"])
@pytest.mark.parametrize("collated", [True, False])
def test_a_sample_that_kills_its_worker_is_replaced_and_not_read_again(
    how, setup, collated
) -> None:
    collate = None if collated else collate_whole
    data = loader(Deadly(how), setup, batch_size=8, collate_fn=collate, persistent_workers=True)
    for epoch in range(3):
        assert taken(list(data)) == [*range(13), stand_in(13, 60, epoch), *range(14, 60)]
        if epoch == 0:
            deaths = data.faults.deaths
    assert data.quarantine == [13]
    assert data.faults.samples == 3
    assert deaths == data.faults.deaths
    assert deaths == (4 if how == "SIGKILL" else 2)
    data.close()


@pytest.mark.parametrize("collated", [True, False])
def test_a_sample_that_kills_its_worker_is_left_out(collated) -> None:
    collate = None if collated else collate_whole
    data = loader(Deadly("exit"), "workers-2", "skip", batch_size=8, collate_fn=collate)
    for _ in range(2):
        batches = list(data)
        assert taken(batches) == [i for i in range(60) if i != 13]
        assert [len(batch["index"]) for batch in batches] == [8, 7, *[8] * 5, 4]
    assert data.quarantine == [13]


def test_a_sample_that_kills_its_worker_is_an_error_that_names_it() -> None:
    data = loader(Deadly("exit"), "workers-2", "raise", batch_size=8)
    with pytest.raises(WorkerError, match="Sample 13 of the dataset"):
        list(data)
    assert data.quarantine == []


@pytest.mark.parametrize("setup", ["inline", "workers-2", "torch-0"])
@pytest.mark.parametrize("rule", ["replace", "skip"])
def test_what_is_in_quarantine_is_not_read(setup, rule) -> None:
    data = loader(Deadly("exit"), setup, rule, batch_size=8)
    data.quarantine = [13]
    other = [stand_in(13, 60)] if rule == "replace" else []
    assert taken(list(data)) == [*range(13), *other, *range(14, 60)]
    assert data.faults.deaths == 0
    assert data.faults.samples == 1


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_resume_goes_on_with_the_budget(at) -> None:
    bad = tuple(range(0, 28, 2))  # fourteen, where ten may be

    def run(given: Any) -> int:
        """Return how many batches come before there were too many bad samples."""
        batches: list[Any] = []
        with pytest.raises(DatasetError, match="12 samples of the dataset are bad, and 10 may be"):
            batches.extend(given)
        return len(batches)

    unbroken = run(loader(Numbers(60, bad), "inline", "skip", batch_size=4))
    stopped = loader(Numbers(60, bad), "inline", "skip", batch_size=4)
    given = iter(stopped)
    for _ in range(at):
        next(given)
    again = loader(Numbers(60, bad), "inline", "skip", batch_size=4)
    again.load_state_dict(stopped.state_dict())
    assert at + run(again) == unbroken


def collate_to_death(samples: list[Any]) -> Any:
    if any(sample["index"] >= 8 for sample in samples):
        os._exit(3)
    return [sample["index"] for sample in samples]


@pytest.mark.slow
def test_a_collation_that_kills_its_worker_ends_with_an_error() -> None:
    data = loader(Numbers(32, ()), "workers-1", batch_size=8, collate_fn=collate_to_death)
    with pytest.raises(WorkerError):
        list(data)
