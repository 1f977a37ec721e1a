"""The loaders that others build, ready to be measured beside ours.

Each builder returns what starts an epoch, or the reason why this loader is absent here; none is
left out in silence. Install them with ``pip install 'lightning-fastdata[benchmarks]'``. FFCV has no
wheel and is compiled on installation: it needs a C++ compiler, pkg-config and the headers of OpenCV
and libturbojpeg (Debian: ``libopencv-dev libturbojpeg0-dev pkg-config``), then
``pip install --no-build-isolation ffcv``.
"""

from __future__ import annotations

import functools
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

Epoch: TypeAlias = Callable[[], Iterator[torch.Tensor]]
"""Starts an epoch and yields its batches of images, without their labels."""

MEAN = np.array([0.485, 0.456, 0.406], np.float32) * 255
STD = np.array([0.229, 0.224, 0.225], np.float32) * 255

PACKAGES = (
    "ffcv",
    "numba",
    "nvidia-dali-cuda130",
    "nvidia-dali-cuda120",
    "litdata",
    "webdataset",
    "timm",
    "torchvision",
    "pillow",
    "simplejpeg",
    "opencv-python-headless",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegTask:
    """Decode, ``RandomResizedCrop(size)``, horizontal flip, shuffled batches without the rest."""

    folder: Path
    """Holds one folder of JPEG files per class."""
    scratch: Path
    """Where peers put files of their own formats."""
    batch: int = 64
    """Images per batch."""
    size: int = 224
    """Height and width of a sample in pixels."""
    workers: int = 2
    """Threads or processes, whichever the loader has."""
    floats: bool = False
    """Deliver float32, normalised, channels first; otherwise uint8 in the loader's own layout."""


def versions() -> dict[str, str]:
    """Package -> version of each peer that is installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def or_reason(build: Callable[..., Epoch]) -> Callable[..., Epoch | str]:
    """Return the reason instead of raising it: a peer that fails is a row of the table too."""

    @functools.wraps(build)
    def tried(*arguments: Any, **options: Any) -> Epoch | str:
        try:
            return build(*arguments, **options)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    return tried


def torchvision_transform(task: JpegTask, *, tensors: bool = False) -> v2.Compose:
    """The usual pipeline on a PIL image, or on a uint8 tensor that is decoded already."""
    steps = [v2.RandomResizedCrop(task.size), v2.RandomHorizontalFlip()]
    if not tensors:
        steps.append(v2.PILToTensor())
    if task.floats:
        steps.append(v2.ToDtype(torch.float32, scale=True))
        steps.append(v2.Normalize((MEAN / 255).tolist(), (STD / 255).tolist()))
    return v2.Compose(steps)


def firsts(batches: Any) -> Iterator[torch.Tensor]:
    """The images of ``(images, labels)`` batches."""
    for batch in batches:
        yield batch[0]


def worker_settings(task: JpegTask) -> dict[str, Any]:
    return {
        "batch_size": task.batch,
        "num_workers": task.workers,
        "drop_last": True,
        "persistent_workers": task.workers > 0,
    }


@or_reason
def torch_jpeg(task: JpegTask) -> Epoch:
    """DataLoader over ImageFolder: PIL decodes, torchvision crops."""
    data = ImageFolder(task.folder, torchvision_transform(task))
    loader = DataLoader(data, shuffle=True, **worker_settings(task))
    return lambda: firsts(loader)


@or_reason
def timm_jpeg(task: JpegTask) -> Epoch:
    """timm's loader: uint8 from the workers, put together by its ``fast_collate``."""
    from timm.data import create_loader

    data = ImageFolder(task.folder)
    loader = create_loader(
        data,
        input_size=(3, task.size, task.size),
        batch_size=task.batch,
        is_training=True,
        color_jitter=0.0,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
        device=torch.device("cpu"),
        worker_seeding="all",
    )
    # The prefetcher that create_loader returns makes floats of the batches of the loader in it.
    inner = loader if task.floats else loader.loader
    return lambda: firsts(inner)


@or_reason
def ffcv_jpeg(task: JpegTask) -> Epoch:
    """FFCV over its own file, which holds the pictures as JPEG."""
    from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage

    path = task.scratch / "jpeg.beton"
    if not path.exists():
        write_ffcv(path, ImageFolder(task.folder), mode="jpg")
    pipeline: list[Any] = [
        RandomResizedCropRGBImageDecoder((task.size, task.size)),
        RandomHorizontalFlip(),
    ]
    if task.floats:
        pipeline.append(NormalizeImage(MEAN, STD, np.float32))
    pipeline.append(ToTensor())
    if task.floats:
        pipeline.append(ToTorchImage(convert_back_int16=False))
    return ffcv_epoch(path, pipeline, batch=task.batch, workers=task.workers)


@or_reason
def ffcv_images(images: np.ndarray, scratch: Path, *, batch: int, workers: int) -> Epoch:
    """FFCV over its own file of uncompressed images.

    Args:
        images: ``[count, height, width, 3]`` uint8.
        scratch: Folder for the file.
        batch: Images per batch.
        workers: Threads.
    """
    from ffcv.fields.decoders import SimpleRGBImageDecoder
    from ffcv.transforms import ToTensor

    path = scratch / "raw.beton"
    if not path.exists():
        write_ffcv(path, _Rows(images), mode="raw")
    return ffcv_epoch(path, [SimpleRGBImageDecoder(), ToTensor()], batch=batch, workers=workers)


class _Rows:
    def __init__(self, images: np.ndarray) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.asarray(self.images[index]), index


def write_ffcv(path: Path, data: Any, *, mode: str) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=92), "label": IntField()}
    writer = DatasetWriter(str(path), fields, num_workers=1)
    writer.from_indexed_dataset(data, chunksize=50)


def ffcv_epoch(path: Path, pipeline: list[Any], *, batch: int, workers: int) -> Epoch:
    from ffcv.fields.decoders import IntDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor

    loader = Loader(
        str(path),
        batch_size=batch,
        num_workers=workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        drop_last=True,
        pipelines={"image": pipeline, "label": [IntDecoder(), ToTensor(), Squeeze()]},
    )
    return lambda: firsts(loader)


@or_reason
def dali_jpeg(task: JpegTask) -> Epoch:
    """DALI on the CPU: decodes no more of a file than the random crop needs."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def(batch_size=task.batch, num_threads=task.workers, device_id=None, seed=1)
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            file_root=str(task.folder), random_shuffle=True, shuffle_after_epoch=False, name="files"
        )
        images = fn.decoders.image_random_crop(
            encoded, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        images = fn.resize(images, size=(task.size, task.size))
        mirror = fn.random.coin_flip()
        if not task.floats:
            return fn.flip(images, horizontal=mirror), labels
        floats = fn.crop_mirror_normalize(
            images,
            mirror=mirror,
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=MEAN.tolist(),
            std=STD.tolist(),
        )
        return floats, labels

    loader = DALIGenericIterator(
        pipeline(),
        ["images", "labels"],
        reader_name="files",
        last_batch_policy=LastBatchPolicy.DROP,
        auto_reset=True,
    )
    return lambda: (outputs[0]["images"] for outputs in loader)


@or_reason
def litdata_jpeg(task: JpegTask) -> Epoch:
    """LitData over its own chunks, which hold the files as they are."""
    os.environ.setdefault("DATA_OPTIMIZER_CACHE_FOLDER", str(task.scratch / "litdata-cache"))
    os.environ.setdefault("DATA_OPTIMIZER_DATA_CACHE_FOLDER", str(task.scratch / "litdata-data"))
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    chunks = task.scratch / "litdata"
    if not chunks.exists():
        optimize(
            _litdata_sample,
            inputs=ImageFolder(task.folder).samples,
            output_dir=str(chunks),
            chunk_bytes="16MB",
            num_workers=1,
            verbose=False,
        )
    data = StreamingDataset(
        str(chunks), shuffle=True, drop_last=True, transform=_LitTransform(task)
    )
    loader = StreamingDataLoader(data, **worker_settings(task))
    return lambda: firsts(loader)


def _litdata_sample(sample: tuple[str, int]) -> dict[str, Any]:
    from PIL import Image

    return {"image": Image.open(sample[0]), "label": sample[1]}


class _LitTransform:
    """LitData decodes to a uint8 tensor; the crop follows."""

    def __init__(self, task: JpegTask) -> None:
        self.crop = torchvision_transform(task, tensors=True)

    def __call__(self, sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
        image = sample["image"]
        if not isinstance(image, torch.Tensor):
            image = v2.functional.pil_to_tensor(image.convert("RGB"))
        return self.crop(image), sample["label"]


@or_reason
def webdataset_jpeg(task: JpegTask) -> Epoch:
    """WebDataset over tar files, in which the files stand as they are."""
    import webdataset

    shards = task.scratch / "webdataset"
    if not shards.exists():
        write_shards(shards, ImageFolder(task.folder).samples, count=8)
    data = (
        webdataset.WebDataset(
            sorted(map(str, shards.glob("*.tar"))),
            shardshuffle=8,
            nodesplitter=webdataset.split_by_node,
        )
        .shuffle(500)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(torchvision_transform(task), int)
        .batched(task.batch, partial=False)
    )
    loader = webdataset.WebLoader(
        data,
        batch_size=None,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
    )
    return lambda: firsts(loader)


def write_shards(folder: Path, samples: list[tuple[str, int]], count: int) -> None:
    """Deal the files to tar files in random order, as WebDataset asks for."""
    folder.mkdir()
    order = np.random.default_rng(0).permutation(len(samples))
    for shard in range(count):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for number in order[shard::count]:
                path, label = samples[number]
                for kind, data in (("jpg", Path(path).read_bytes()), ("cls", b"%d" % label)):
                    entry = tarfile.TarInfo(f"{number:06d}.{kind}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
