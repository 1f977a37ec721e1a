"""The folder has ImageFolder's samples, and each is a function of (seed, epoch, index) alone."""

from __future__ import annotations

import copy
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from misses import each
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_fastdata import FastImageFolder
from lightning_fastdata.errors import BatchError, DatasetError, OptionsError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.types import SampleKey


def everything(dataset):
    return torch.stack([dataset[index][0] for index in range(len(dataset))])


def test_classes_and_samples_are_those_of_image_folder(folder):
    theirs, ours = ImageFolder(folder), FastImageFolder(folder, size=32)
    assert ours.classes == theirs.classes == ["Z", "a_dogs", "b_cats"]
    assert ours.class_to_idx == theirs.class_to_idx
    assert ours.samples == theirs.samples
    assert ours.imgs == theirs.imgs
    assert ours.targets == theirs.targets
    assert len(ours) == len(theirs) == 12
    assert ours.root == str(theirs.root)


def test_which_files_are_valid_can_be_said_as_for_image_folder(folder):
    def small(path):
        return path.endswith((".jpeg", "one.png", "10.JPG"))

    theirs = ImageFolder(folder, is_valid_file=small)
    assert FastImageFolder(folder, size=32, is_valid_file=small).samples == theirs.samples


@each("lack", ["folder", "classes", "files"])
def test_an_empty_folder_is_an_error_where_it_is_one_for_image_folder(lack, tmp_path):
    root = tmp_path / "root"
    if lack != "folder":
        root.mkdir()
    if lack == "files":
        (root / "cats").mkdir()
    with pytest.raises(FileNotFoundError):
        ImageFolder(root)
    with pytest.raises(FileNotFoundError, match=r"root.*[^. ]\. Put .*<class>/<image>"):
        FastImageFolder(root, size=32)
    with pytest.raises(DatasetError):
        FastImageFolder(root, size=32)


def test_an_empty_class_can_be_allowed(folder):
    (folder / "empty").mkdir()
    with pytest.raises(DatasetError, match="empty"):
        FastImageFolder(folder, size=32)
    theirs = ImageFolder(folder, allow_empty=True)
    ours = FastImageFolder(folder, size=32, allow_empty=True)
    assert ours.classes == theirs.classes
    assert ours.samples == theirs.samples


def test_a_sample_is_a_contiguous_uint8_tensor_and_its_class(folder):
    dataset = FastImageFolder(folder, size=40)
    for index, (_, target) in enumerate(dataset.samples):
        image, label = dataset[index]
        assert image.dtype == torch.uint8
        assert image.shape == dataset.sample_shape == (40, 40, 3)
        assert image.is_contiguous()
        assert label == target
        assert type(label) is int


@each("normalize", [True, ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))])
def test_normalised_samples_are_the_same_pixels_normalised(folder, normalize):
    dataset = FastImageFolder(folder, size=40, normalize=normalize)
    mean, std = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) if normalize is True else normalize
    plain = FastImageFolder(folder, size=40)
    for index in range(len(plain)):
        image, label = dataset[index]
        pixels, target = plain[index]
        assert label == target
        assert image.dtype == torch.float32
        assert image.shape == dataset.sample_shape == (3, 40, 40)
        wanted = ((pixels.double() / 255 - torch.tensor(mean)) / torch.tensor(std)).permute(2, 0, 1)
        torch.testing.assert_close(image.double(), wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(BatchError, match="float32"):
        dataset.write_into(0, np.empty((3, 40, 40), np.uint8))


class Darker(FastImageFolder):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image // 2, label


@each("make", [FastImageFolder, partial(FastImageFolder, normalize=True), Darker])
def test_side_processes_deliver_the_samples_also_those_of_a_subclass(folder, make):
    dataset = make(folder, size=40, seed=3)
    loader = FastDataLoader(dataset, 4, executor="workers", num_workers=2)
    assert torch.equal(torch.cat([images for images, _ in loader]), everything(dataset))


@each(("resize", "size"), [(None, 64), (256, 224), (100, 99), (64, 64)])
def test_validation_samples_are_those_of_image_folder_with_torchvisions_transforms(
    folder, resize, size
):
    transform = v2.Compose([v2.Resize(resize or 73, antialias=True), v2.CenterCrop(size)])
    theirs = ImageFolder(folder, v2.Compose([v2.PILToTensor(), transform]))
    ours = FastImageFolder(folder, size=size, crop="center", resize=resize)
    for index, (wanted, target) in enumerate(theirs):
        mine, label = ours[index]
        assert label == target
        assert torch.equal(mine, wanted.permute(1, 2, 0))
        # PIL rounds between its two passes, so its pixels differ by one level here and there.
        on_pil = np.array(transform(theirs.loader(theirs.samples[index][0])))
        assert np.abs(mine.numpy().astype(int) - on_pil).max() <= 1


def test_iteration_ends_after_the_last_sample(folder):
    dataset = FastImageFolder(folder, size=8)
    assert len(list(dataset)) == len(dataset)
    np.testing.assert_array_equal(dataset[-1][0], dataset[len(dataset) - 1][0])
    for outside in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match="12"):
            dataset[outside]
    with pytest.raises(TypeError, match="interpreted as an integer"):
        dataset[2.5]


def test_a_sample_depends_on_seed_epoch_and_index_alone(folder):
    options = {"size": 48, "horizontal_flip": 0.5}
    first = FastImageFolder(folder, seed=3, **options)
    plain = everything(first)
    backwards = [first[index][0] for index in reversed(range(len(first)))][::-1]
    torch.testing.assert_close(torch.stack(backwards), plain, rtol=0, atol=0)
    again = FastImageFolder(folder, seed=3, **options)
    torch.testing.assert_close(everything(again), plain, rtol=0, atol=0)
    again.set_epoch(1)
    next_epoch = everything(again)
    other_seed = everything(FastImageFolder(folder, seed=4, **options))
    for index in range(len(first)):
        assert not torch.equal(next_epoch[index], plain[index])
        assert not torch.equal(other_seed[index], plain[index])
    again.set_epoch(0)
    torch.testing.assert_close(everything(again), plain, rtol=0, atol=0)


def test_a_key_given_stands_above_the_datasets_own(folder):
    dataset = FastImageFolder(folder, size=48, seed=3)
    dataset.set_epoch(5)
    wanted = dataset[2][0].numpy()
    other = FastImageFolder(folder, size=48)
    out = np.empty((48, 48, 3), np.uint8)
    other.write_into(2, out, key=SampleKey(3, 5, 2))
    np.testing.assert_array_equal(out, wanted)


def test_a_sample_is_written_into_its_slot_and_nowhere_else(folder):
    dataset = FastImageFolder(folder, size=40, horizontal_flip=0.5)
    batch = np.full((len(dataset) + 2, 40, 40, 3), 7, np.uint8)
    labels = [dataset.write_into(i, batch[i + 1]) for i in range(len(dataset))]
    assert labels == dataset.targets
    np.testing.assert_array_equal(batch[1:-1], everything(dataset))
    assert (batch[[0, -1]] == 7).all()


@each(
    "out",
    [
        np.empty((40, 41, 3), np.uint8),
        np.empty((3, 40, 40), np.uint8),
        np.empty((40, 40, 3), np.float32),
        np.empty((40, 80, 3), np.uint8)[:, ::2],
        np.frombuffer(bytes(4800), np.uint8).reshape(40, 40, 3),
    ],
)
def test_a_slot_that_does_not_fit_is_refused_with_what_would(out, folder):
    with pytest.raises(BatchError, match=r"\(40, 40, 3\)"):
        FastImageFolder(folder, size=40).write_into(0, out)


def test_many_threads_fill_one_batch_as_one_thread_does(folder):
    dataset = FastImageFolder(folder, size=64, horizontal_flip=0.5)
    count = len(dataset)
    wanted = everything(dataset).numpy()
    batch = np.zeros((count * 20, 64, 64, 3), np.uint8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: dataset.write_into(i % count, batch[i]), range(len(batch))))
    for i in range(len(batch)):
        np.testing.assert_array_equal(batch[i], wanted[i % count])


def test_a_pickled_copy_gives_the_same_samples_and_leaves_the_lists_behind(folder):
    dataset = FastImageFolder(folder, size=48, horizontal_flip=0.5, seed=9)
    dataset.set_epoch(4)
    before = len(pickle.dumps(dataset))
    assert len(dataset.samples) == 12
    assert len(pickle.dumps(dataset)) == before
    twin = pickle.loads(pickle.dumps(dataset))
    assert twin.epoch == 4
    assert twin.samples == dataset.samples
    torch.testing.assert_close(everything(twin), everything(dataset), rtol=0, atol=0)


@pytest.mark.slow
@each("context", ["fork", "spawn"])
def test_workers_that_outlive_an_epoch_draw_the_next_one(folder, context):
    dataset = FastImageFolder(folder, size=32, horizontal_flip=0.5)
    loader = DataLoader(
        dataset,
        batch_size=5,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        images = torch.cat([images for images, _ in loader])
        torch.testing.assert_close(images, everything(dataset), rtol=0, atol=0)


COPIES = [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))]


@each("copied", COPIES)
def test_workers_of_a_copy_that_outlive_an_epoch_draw_the_next_one(folder, copied):
    dataset = copied(FastImageFolder(folder, size=32, horizontal_flip=0.5))
    loader = DataLoader(dataset, 5, num_workers=1, persistent_workers=True)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        images = torch.cat([images for images, _ in loader])
        torch.testing.assert_close(images, everything(dataset), rtol=0, atol=0)


@each("copied", COPIES)
def test_workers_of_a_copy_are_kept_as_those_of_the_original(folder, copied):
    dataset = copied(FastImageFolder(folder, size=32, horizontal_flip=0.5))
    loader = FastDataLoader(dataset, 5, num_workers=1, persistent_workers="unchanged")
    readers = []
    for _ in range(4):
        images = torch.cat([images for images, _ in loader])
        torch.testing.assert_close(images, everything(dataset), rtol=0, atol=0)
        readers.append(loader._iterator)
    assert len(set(map(id, readers))) == 1


def test_a_damaged_file_is_named_and_the_next_one_still_reads(folder):
    broken = folder / "b_cats" / "10.JPG"
    broken.write_bytes(broken.read_bytes()[:5000])
    dataset = FastImageFolder(folder, size=32)
    at = [path for path, _ in dataset.samples].index(str(broken))
    with pytest.raises(DatasetError, match=r"b_cats/10\.JPG.*is_valid_file"):
        dataset[at]
    assert dataset[at + 1][0].shape == (32, 32, 3)


def test_a_folder_that_vanishes_is_told_with_the_file(folder):
    dataset = FastImageFolder(folder, size=32)
    shutil.rmtree(folder / "Z")
    with pytest.raises(DatasetError, match=r"one\.png"):
        dataset[0]


@each("name", ["simplejpeg", "pillow"])
def test_every_decoder_gives_the_same_samples(folder, name):
    wanted = everything(FastImageFolder(folder, size=32))
    dataset = FastImageFolder(folder, size=32, decoder=name)
    assert dataset.decoder.name == name
    assert f"decoder='{name}'" in repr(dataset)
    torch.testing.assert_close(everything(dataset), wanted, rtol=0, atol=0)


def test_impossible_options_are_refused_before_the_folder_is_read(tmp_path):
    impossible = (
        {"size": 0},
        {"size": 8, "resample": "best"},
        {"size": 8, "decoder": "x"},
        {"size": 8, "normalize": (0.5, 0.5)},
        {"size": 8, "normalize": ((0, 0, 0), (1, 1, 0))},
        {"size": 8, "normalize": ((123, 1, 1), (58, 1, 1))},
        *({"size": size} for size in ("40", None, (40, 40), 40.5)),
        *({"size": 8, "scale": scale} for scale in (0.5, "ab", (0.1, "x"), (0.5, 0.1))),
        *({"size": 8, "seed": seed} for seed in ("a", None, 1.5)),
        *({"size": 8, "max_pixels": most} for most in ("x", None, 0)),
        {"size": 8, "ratio": 1},
        {"size": 8, "resize": "x"},
        {"size": 8, "horizontal_flip": "0.5"},
        {"size": 8, "shorter_side": 50.5},
        {"size": 8, "check_files": "no"},
        {"size": 8, "allow_empty": "no"},
        {"size": 8, "is_valid_file": "*.jpg"},
        {"size": 8, "root": b"odd"},
    )
    for options in impossible:
        with pytest.raises(OptionsError):
            FastImageFolder(**{"root": tmp_path / "nowhere", **options})


@pytest.mark.parametrize("name", ["find_classes", "make_dataset"])
def test_what_image_folder_would_call_is_refused_in_a_subclass(folder, name):
    chooses = type("Chooses", (FastImageFolder,), {name: lambda *_: None})
    with pytest.raises(OptionsError, match=rf"Chooses\.{name} would not be called"):
        chooses(folder, size=32)


class CallsItsTransform(FastImageFolder):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return self.transform(image), target


@each("name", ["transform", "target_transform", "transforms", "loader"])
def test_what_image_folder_would_call_is_refused_unless_a_subclass_calls_it(folder, name):
    dataset = FastImageFolder(folder, size=32)
    with pytest.raises(OptionsError, match=rf"calls no {name}, .*augment="):
        setattr(dataset, name, torch.neg)
    own = CallsItsTransform(folder, size=32)
    setattr(own, name, None)
    own.transform = torch.neg
    assert torch.equal(own[0][0], -dataset[0][0])


def test_options_may_be_numbers_and_arrays_of_numpy(folder):
    plain = {"size": 32, "scale": (0.25, 1.0), "horizontal_flip": 0.5, "shorter_side": 40}
    plain |= {"seed": 3, "max_pixels": 10**8, "check_files": True}
    theirs = {name: np.array(value)[()] for name, value in plain.items()}
    assert isinstance(theirs["scale"], np.ndarray)
    wanted = everything(FastImageFolder(folder, **plain))
    torch.testing.assert_close(everything(FastImageFolder(folder, **theirs)), wanted)
