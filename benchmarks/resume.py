"""What it costs to keep a position and to go on from it, and what comes twice or never.

Three parts. ``cost``: the bytes of a state at step 10,000 of an epoch of 1.28 million samples in
batches of 64, the time to take it, and from a new loader to the batch that follows it. ``exact``: a
training in Lightning is stopped within an epoch and goes on with four workers in place of two, or
is stopped at an epoch's end; of its two epochs, samples that never came and those that came too
often, and whether order and random draws are those of a run that nobody stopped. ``step``: the time
of a step of a loop that does nothing else, with and without a state.

Peers: ``StatefulDataLoader`` of torchdata, ``StreamingDataLoader`` of LitData, and torch's
``DataLoader``, which has no state. Peers that are not installed are printed as missing.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from turns import arguments, in_turn, spread, write

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions

PACKAGES = ("lightning", "torchdata", "litdata")
Make = Callable[[int], Any]
"""Returns a loader, or what a Trainer takes, with so many workers."""


class Numbers(Dataset):
    """Each sample is its index and a number that is drawn when it is read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(np.random.rand())


def installed(package: str) -> bool:
    """Return whether a package is there; say so if it is not."""
    with contextlib.suppress(PackageNotFoundError):
        version(package)
        return True
    print(f"{package}: missing")
    return False


def contenders(length: int, batch: int, scratch: Path) -> dict[str, Make]:
    """Return what makes a shuffled loader of so many samples, by name."""
    data = Numbers(length)
    makers: dict[str, Make] = {
        "ours": lambda workers: FastDataLoader(
            data, batch, True, num_workers=workers, executor="workers" if workers else "inline"
        ),
        "torch": lambda workers: DataLoader(data, batch, shuffle=True, num_workers=workers),
    }
    if installed("torchdata"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        makers["torchdata"] = lambda workers: StatefulDataLoader(
            data, batch, shuffle=True, num_workers=workers
        )
    if installed("litdata"):
        makers["litdata"] = streaming(length, batch, scratch / f"litdata-{length}")
    return makers


def streaming(length: int, batch: int, folder: Path) -> Make:
    """Return what makes a loader of LitData, of chunks that are written once."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    # optimize() does this in processes of its own, which takes seconds for any length.
    writer = BinaryWriter(str(folder), chunk_bytes="1MB")
    for index in range(length):
        writer[index] = index
    writer.done()
    writer.merge()

    class Drawing(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[int, float]:
            return super().__getitem__(index), float(np.random.rand())

    def make(workers: int) -> Any:
        dataset = Drawing(str(folder), shuffle=True)
        return StreamingDataLoader(dataset, batch_size=batch, num_workers=workers)

    return make


# -- cost ------------------------------------------------------------------------------------------


def first_batch_s(loader: Any, state: Any = None) -> float:
    """Return the seconds from a new loader to its first batch."""
    began = time.perf_counter()
    if state is not None:
        loader.load_state_dict(state)
    given = iter(loader)
    next(given)
    spent = time.perf_counter() - began
    shut(loader, given)
    return spent


def shut(loader: Any, given: Iterator[Any] | None = None) -> None:
    """Stop the workers."""
    del given
    if isinstance(loader, FastDataLoader):
        loader.close()


def cost(chosen: Any, scratch: Path) -> dict[str, Any]:
    """Return what a state weighs and takes, by contender and number of workers."""
    makers = contenders(chosen.samples, 64, scratch)
    found: dict[str, Any] = {}
    print(f"\ncost at step {chosen.at} of {chosen.samples // 64}: low / median / high")
    print(f"{'':22s}{'bytes':>8s}  ms to take it;  ms to the next batch;  ms to a first batch")
    for workers in chosen.workers:
        for name, make in makers.items():
            if name == "torch":
                continue
            loader = make(workers)
            given = iter(loader)
            for _ in islice(given, chosen.at):
                pass
            takes = []
            for _ in range(chosen.rounds):
                began = time.perf_counter()
                state = loader.state_dict()
                takes.append(1e3 * (time.perf_counter() - began))
            shut(loader, given)
            size = len(pickle.dumps(state))
            spent = in_turn(
                {
                    "next": lambda make=make, state=state, workers=workers: first_batch_s(
                        make(workers), state
                    ),
                    "first": lambda make=make, workers=workers: first_batch_s(make(workers)),
                },
                rounds=chosen.rounds,
            )
            in_ms = {which: [1e3 * s for s in seconds] for which, seconds in spent.items()}
            row = f"{name}, {workers} workers"
            found[row] = {"bytes": size, "take_ms": takes, **in_ms}
            parts = (takes, in_ms["next"], in_ms["first"])
            print(f"{row:22s}{size:8d}  {';  '.join(map(spread, parts))}", flush=True)
    return found


# -- exact -----------------------------------------------------------------------------------------


class Notes(LightningModule):
    """Remembers the samples of each step, with what was drawn for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: Any, _batch_idx: int) -> Any:
        self.seen += zip(batch[0].tolist(), batch[1].tolist(), strict=True)
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(data: Any, folder: Path, *, save: int, resume: Path | None = None) -> list[Any]:
    """Return what two epochs saw; a checkpoint is written after so many steps."""
    torch.manual_seed(1)
    np.random.seed(1)
    model = Notes()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=save, save_top_k=-1)],
    )
    trainer.fit(model, data, ckpt_path=resume)
    return model.seen


def compared(make: Make, length: int, batch: int, stop: int, later: int) -> dict[str, Any]:
    """Return how a run that was stopped differs from one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        straight = fit(make(2), Path(folder), save=stop)
        before = straight[: stop * batch]
        rest = fit(
            make(later), Path(folder) / "b", save=10**9, resume=Path(folder) / f"step={stop}.ckpt"
        )
    left = straight[stop * batch :]
    counts = Counter(index for index, _ in before + rest)
    return {
        "lost": sum(max(0, 2 - counts[index]) for index in range(length)),
        "doubled": sum(max(0, count - 2) for count in counts.values()),
        "order_equal": [index for index, _ in rest] == [index for index, _ in left],
        "draws_equal": rest == left,
    }


def root_of(error: BaseException) -> str:
    """Return the error that another one hides."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"


def exact(chosen: Any, scratch: Path) -> dict[str, Any]:
    """Return what each contender loses and doubles, by contender and case."""
    length, batch = chosen.exact, 8
    makers = contenders(length, batch, scratch)
    data = Numbers(length)
    makers["ours"] = lambda workers: FastDataModule.from_datasets(
        data,
        batch_size=batch,
        options=LoaderOptions(num_workers=workers, executor="workers"),
        seed=1,
    )
    steps = length // batch
    cases = {
        "in mid-epoch, 2 -> 2 workers": (steps * 2 // 5 + 1, 2),
        "in mid-epoch, 2 -> 4 workers": (steps * 2 // 5 + 1, 4),
        "at an epoch's end": (steps, 2),
    }
    found: dict[str, Any] = {}
    print(f"\nexact, {length} samples x 2 epochs in batches of {batch}")
    print(f"{'':44s}{'lost':>6s}{'doubled':>9s}  order equal, draws equal")
    for case, (stop, later) in cases.items():
        for name, make in makers.items():
            row = f"{name}, {case}"
            try:
                about = compared(make, length, batch, stop, later)
            except Exception as error:
                about = {"error": root_of(error)}
                print(f"{row:44s}{about['error'][:80]!r}", flush=True)
            else:
                lost, doubled, order, draws = about.values()
                print(f"{row:44s}{lost:6d}{doubled:9d}  {order}, {draws}", flush=True)
            found[row] = about
    return found


# -- step ------------------------------------------------------------------------------------------


def step_us(loader: Any, steps: int, every: int | None) -> float:
    """Return the microseconds of a step of a loop that takes a state after so many of them."""
    given = iter(loader)
    for _ in islice(given, 50):
        pass
    began = time.perf_counter()
    for number, _batch in enumerate(islice(given, steps), start=1):
        if every is not None and number % every == 0:
            loader.state_dict()
    spent = time.perf_counter() - began
    shut(loader, given)
    return 1e6 * spent / steps


def step(chosen: Any) -> dict[str, list[float]]:
    """Return microseconds a step, by contender."""
    data, steps = Numbers((chosen.steps + 100) * 64), chosen.steps
    found: dict[str, list[float]] = {}
    print(f"\nstep, microseconds of {steps} steps: low / median / high")
    for workers in chosen.workers:
        how: dict[str, Any] = {"batch_size": 64, "shuffle": True, "num_workers": workers}
        executor: Any = "workers" if workers else "inline"
        ours = lambda how=how, executor=executor: FastDataLoader(data, executor=executor, **how)  # noqa: E731
        runs: dict[str, Callable[[], float]] = {
            "ours, no state": lambda ours=ours: step_us(ours(), steps, None),
            "ours, a state every 100": lambda ours=ours: step_us(ours(), steps, 100),
            "ours, a state every step": lambda ours=ours: step_us(ours(), steps, 1),
            "torch": lambda how=how: step_us(DataLoader(data, **how), steps, None),
        }
        if installed("torchdata"):
            from torchdata.stateful_dataloader import StatefulDataLoader

            for each in (1, 100):
                runs[f"torchdata, snapshots every {each}"] = lambda how=how, each=each: step_us(
                    StatefulDataLoader(data, snapshot_every_n_steps=each, **how), steps, each
                )
        for name, values in in_turn(runs, rounds=chosen.rounds).items():
            row = f"{name}, {workers} workers"
            found[row] = values
            print(f"{row:40s}{spread(values)}", flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="*", default=["exact", "step", "cost"])
    parser.add_argument("--samples", type=int, default=1_280_000, help="of an epoch of cost")
    parser.add_argument("--at", type=int, default=10_000, help="step of the state of cost")
    parser.add_argument("--exact", type=int, default=1_600, help="samples of exact")
    parser.add_argument("--steps", type=int, default=1_000, help="of a round of step")
    parser.add_argument("--workers", nargs="*", type=int, default=[0, 2])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {"versions": {}}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            results["versions"][package] = version(package)
    print(", ".join(f"{name} {number}" for name, number in results["versions"].items()))
    with tempfile.TemporaryDirectory() as scratch:
        if "exact" in chosen.parts:
            results["exact"] = exact(chosen, Path(scratch))
        if "step" in chosen.parts:
            results["step"] = step(chosen)
        if "cost" in chosen.parts:
            results["cost"] = cost(chosen, Path(scratch))
    write(chosen.json, "resume", results)


if __name__ == "__main__":
    main()
