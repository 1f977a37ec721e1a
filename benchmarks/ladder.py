"""The ladder of PyTorch's tutorial "Data Loading Optimization in PyTorch", and ours, untuned.

512 samples of 3x224x224 that sleep for 5 ms each, batches of 32, 160 batches in 10 epochs. Each
row of the tutorial adds a setting by hand; ``__getitems__`` is a dataset that was written anew.
Ours are the unchanged per-sample dataset and nothing set but the executor, from construction and
its probe to the last batch. By default nothing is trained, so that loading alone is compared;
``--train`` takes the tutorial's model and loop. Ratios are over the best of torch's with 0, 1, 2
and 4 workers, kept between epochs, of the unchanged dataset (``published.py``).
https://docs.pytorch.org/tutorials/intermediate/intermediate_data_loading_tutorial.html
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from published import TORCH_WORKERS, add_publish, over_best, publish
from torch import nn
from torch.utils.data import DataLoader, Dataset
from turns import arguments, in_turn, known_work_s, machine, spread, write

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.loading.loader import FastDataLoader

SAMPLES, BATCH, BATCHES, SLEEP_S, SIDE = 512, 32, 160, 0.005, 224
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Waiting(Dataset):
    """A sample is drawn and waits, as one from a disk or a network does."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = torch.randn(3, SIDE, SIDE), int(torch.randint(0, 10, (1,)))
        time.sleep(SLEEP_S)
        return image, label


class WaitingBatched(Waiting):
    """The tutorial's last row: a batch is drawn at once, and waits once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        images = torch.randn(len(indices), 3, SIDE, SIDE)
        labels = torch.randint(0, 10, (len(indices),))
        time.sleep(SLEEP_S)
        return [(images[at], int(labels[at])) for at in range(len(indices))]


class Ahead:
    """Copies the next batch to the GPU while this one is used; as it is where there is none."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        if DEVICE.type != "cuda":
            yield from self.loader
            return
        stream = torch.cuda.Stream()
        ahead = None
        for batch in self.loader:
            with torch.cuda.stream(stream):
                copied = [part.to(DEVICE, non_blocking=True) for part in batch]
            if ahead is not None:
                yield ahead
            torch.cuda.current_stream().wait_stream(stream)
            for part in copied:
                part.record_stream(torch.cuda.current_stream())
            ahead = copied
        yield ahead


class Model(nn.Module):
    """The tutorial's: two convolutions, two transformer layers, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 7, stride=4, padding=3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(7),
        )
        layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=128, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2)
        self.classifier = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.features(images).flatten(2).transpose(1, 2)
        return self.classifier(self.transformer(tokens).mean(1))


def seconds(make: Callable[[], Any], batches: int, *, train: bool) -> float:
    """Return the seconds from making the loader to the end of its last batch."""
    model = Model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began, left = time.perf_counter(), batches
    loader = make()
    while left:
        for batch in loader:
            images, labels = (part.to(DEVICE, non_blocking=True) for part in batch)
            if train:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss.item()
            left -= 1
            if not left:
                break
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def theirs(dataset: Dataset, *, ahead: bool = False, **settings: Any) -> Callable[[], Any]:
    """Return what makes one of the tutorial's loaders."""

    def make() -> Any:
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, **settings)
        return Ahead(loader) if ahead else loader

    return make


def torchs(workers: int) -> str:
    return f"torch, {workers} workers, kept"


def kept_by(workers: int) -> dict[str, Any]:
    pin = DEVICE.type == "cuda"
    return {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": pin}


def ours() -> FastDataLoader:
    return FastDataLoader(Waiting(), batch_size=BATCH, shuffle=True, num_workers="auto")


def ours_in_a_module() -> FastDataLoader:
    options = LoaderOptions(executor="auto")
    return FastDataModule.from_datasets(
        Waiting(), batch_size=BATCH, options=options
    ).train_dataloader()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batches", type=int, default=BATCHES, help="the tutorial's: 160")
    add_publish(parser)
    parser.add_argument("--train", action="store_true", help="train the tutorial's model")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    pin = DEVICE.type == "cuda"
    four: dict[str, Any] = {"num_workers": 4, "prefetch_factor": 2}
    kept = {**four, "pin_memory": pin, "persistent_workers": True}
    rows: dict[str, Callable[[], Any]] = {
        "baseline, num_workers=0": theirs(Waiting()),
        "+ num_workers=4": theirs(Waiting(), **four),
        "+ pin_memory": theirs(Waiting(), **four, pin_memory=pin),
        "+ persistent_workers": theirs(Waiting(), **kept),
        "+ prefetcher": theirs(Waiting(), **kept, ahead=True),
        "+ __getitems__ (another dataset)": theirs(WaitingBatched(), **kept, ahead=True),
        **{torchs(workers): theirs(Waiting(), **kept_by(workers)) for workers in TORCH_WORKERS},
        "ours: FastDataLoader, auto": ours,
        "ours: FastDataModule, auto": ours_in_a_module,
    }
    if not pin:
        del rows["+ pin_memory"], rows["+ prefetcher"]  # the tutorial, too, skips them without CUDA
    loader = ours()
    print(loader.plan.explain() if loader.plan else "")
    contenders = {
        name: lambda make=make: seconds(make, chosen.batches, train=chosen.train)
        for name, make in rows.items()
    }
    found = in_turn(contenders, rounds=chosen.rounds, pace_s=known_work_s)
    by_workers = {workers: found[torchs(workers)] for workers in TORCH_WORKERS}
    results = {}
    for name, spent in found.items():
        speedup = over_best(spent, by_workers).median
        results[name] = {"seconds": spent, "speedup": speedup}
        median = statistics.median(spent)
        print(f"{name:34s} x{speedup:6.2f}  {median:8.3f} s  (low / median / high {spread(spent)})")
    write(chosen.json, "ladder", {"batches": chosen.batches, "train": chosen.train, **results})
    ratios = {
        f"ladder/{name}": over_best(found[f"ours: {name}, auto"], by_workers)
        for name in ("FastDataLoader", "FastDataModule")
    }
    publish(ratios, machine(), asked=chosen.publish)


if __name__ == "__main__":
    main()
