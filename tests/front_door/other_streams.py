"""Streams of other libraries, over files that each library's own writer has written.

A sample is ``{"image": uint8 pixels, "number": int}``, numbered from 0. As a program, one of
several ranks that read a stream: see :func:`main`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

COUNT = 48
SHARDS = 6
SIDE = 8
BAD = 13
"""Number of the sample that :func:`fails` refuses."""


def pixels(number: int) -> np.ndarray:
    image = np.arange(SIDE * SIDE * 3, dtype=np.int64).reshape(SIDE, SIDE, 3) * 7 + 31 * number
    return (image % 251).astype(np.uint8)


def as_it_is(sample: Any) -> Any:
    return sample


def fails(sample: Any) -> Any:
    if int(sample["number"]) == BAD:
        raise ValueError(f"sample {BAD} is damaged")
    return sample


# -- what each library writes and reads ------------------------------------------------------------


def write_webdataset(folder: Path, shards: int) -> None:
    import webdataset as wds

    for shard in range(shards):
        with wds.TarWriter(str(folder / f"{shard:03}.tar")) as file:
            for number in range(shard, COUNT, shards):
                key, image = f"{number:05}", pixels(number)
                file.write({"__key__": key, "image.npy": image, "number.cls": number})


def of_webdataset(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": row["image.npy"], "number": row["number.cls"]}


def open_webdataset(folder: Path, shuffle: bool, decode: Callable[[Any], Any]) -> Any:
    import webdataset as wds

    urls = sorted(str(path) for path in folder.glob("*.tar"))
    stream = wds.WebDataset(
        urls,
        shardshuffle=SHARDS if shuffle else False,
        detshuffle=shuffle,
        seed=5,
        nodesplitter=wds.split_by_node,
    )
    return stream.decode().map(of_webdataset).map(decode)


def write_hugging_face(folder: Path, shards: int) -> None:
    import datasets

    for shard in range(shards):
        numbers = list(range(shard, COUNT, shards))
        images = [pixels(number).tolist() for number in numbers]
        form = datasets.Features(
            {"image": datasets.Array3D((SIDE, SIDE, 3), "uint8"), "number": datasets.Value("int64")}
        )
        rows = datasets.Dataset.from_dict({"image": images, "number": numbers}, features=form)
        rows.to_parquet(folder / f"{shard:03}.parquet")


def of_hugging_face(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": np.array(row["image"], np.uint8)}


def open_hugging_face(folder: Path, shuffle: bool, decode: Callable[[Any], Any]) -> Any:
    import datasets
    from datasets.distributed import split_dataset_by_node

    # Where it is shuffled, the library sleeps for 5 s at the end of each stream of Parquet files.
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.5
    files = sorted(str(path) for path in folder.glob("*.parquet"))
    stream = datasets.load_dataset(
        "parquet", data_files=files, streaming=True, split="train", cache_dir=str(folder / "cache")
    )
    stream = stream.map(of_hugging_face).map(decode)
    if shuffle:
        stream = stream.shuffle(seed=5, buffer_size=7)
    rank, ranks = ranks_now()
    return stream if ranks == 1 else split_dataset_by_node(stream, rank, ranks)


def write_litdata(folder: Path, shards: int) -> None:
    from litdata.streaming import Cache

    cache = Cache(str(folder), chunk_size=COUNT // shards)
    for number in range(COUNT):
        cache[number] = {"image": pixels(number), "number": number}
    cache.done()
    cache.merge()


def open_litdata(folder: Path, shuffle: bool, decode: Callable[[Any], Any]) -> Any:
    import litdata

    return litdata.StreamingDataset(
        str(folder), shuffle=shuffle, seed=5, drop_last=False, transform=decode
    )


def write_ray(folder: Path, shards: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    for shard in range(shards):
        numbers = range(shard, COUNT, shards)
        images = [pixels(number).ravel().tolist() for number in numbers]
        table = pa.table({"image": pa.array(images, pa.list_(pa.uint8())), "number": list(numbers)})
        pa.parquet.write_table(table, folder / f"{shard:03}.parquet")


class RayRows(IterableDataset):
    """As one wraps a Ray Data set: its rows."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        for row in self.rows.iter_rows():
            yield {"image": np.uint8(row["image"]).reshape(SIDE, SIDE, 3), "number": row["number"]}


def open_ray(folder: Path, shuffle: bool, decode: Callable[[Any], Any]) -> Any:
    import ray

    rows = ray.data.read_parquet(str(folder))
    if decode is not as_it_is:
        rows = rows.map(decode)
    return RayRows(rows.random_shuffle(seed=None) if shuffle else rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """How one library writes and reads."""

    module: str
    write: Callable[[Path, int], None]
    opened: Callable[[Path, bool, Callable[[Any], Any]], Any]


LIBRARIES = {
    "Hugging Face": Library(module="datasets", write=write_hugging_face, opened=open_hugging_face),
    "LitData": Library(module="litdata", write=write_litdata, opened=open_litdata),
    "WebDataset": Library(module="webdataset", write=write_webdataset, opened=open_webdataset),
}
"""Those whose streams share themselves out among workers. Ray Data has processes of its own."""


def importable(module: str) -> bool:
    """Whether a library is there, and can be imported beside the others."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def ranks_now() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
