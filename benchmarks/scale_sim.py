"""A training on 1 to 1,024 GPUs, on paper: what it needs, what a step takes, what breaks first.

    python benchmarks/scale_sim.py            # arithmetic and simulation; no training is run
    python benchmarks/scale_sim.py --check    # small cases, simulated beside real runs here
    python benchmarks/scale_sim.py --measure  # what one rank costs here: CPU, memory, files

The simulation is that of the package (``loading/simulate.py``), which knows a training process with
its loader: one for each rank here, and a step ends when the slowest rank has ended it. The ranks of
a node share its CPUs and its links in equal parts, since none of them can get ahead of the others.
Random numbers have fixed seeds. docs/scaling.md explains the tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import turns

from lightning_fastdata.loading.simulate import BatchCost, EventModel, LoaderSetup

MS = 1e6
GPUS_A_NODE = 8
SCALES = (8, 64, 1024)
LINKS_GBIT = (25, 100, 200, 400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a GPU takes, and what a sample is."""

    per_s: float
    """Samples a second that one GPU trains on: assumed."""
    batch: int
    made_bytes: int
    """Of a sample that is ready, as it goes to the GPU."""
    stored_bytes: int
    """Of a sample in storage: assumed."""
    cpu_ms: float
    """CPU time to make one: measured on the machine of benchmarks/results/two-cores.md."""
    length: int
    """Samples in the dataset: assumed."""
    objects: bool = True
    """A sample is an object of the storage, got by one request."""

    @property
    def step_ms(self) -> float:
        """What a step takes if data are never waited for."""
        return self.batch / self.per_s * 1000


CROP = 3 * 224 * 224
WORKLOADS = {
    # FastImageFolder, uint8: benchmarks/jpeg_folder.py ("ours, workers").
    "crops 224, JPEG": Workload(
        per_s=2500, batch=256, made_bytes=CROP, stored_bytes=110_000, cpu_ms=0.56, length=1_281_167
    ),
    # Albumentations' ImageNet recipe, whole in a worker: benchmarks/augment.py.
    "crops 224, Albumentations": Workload(
        per_s=2500, batch=256, made_bytes=CROP, stored_bytes=110_000, cpu_ms=1.49, length=1_281_167
    ),
    # Picture and mask of 512 px, both uint8: --measure.
    "segmentation 512": Workload(
        per_s=100, batch=16, made_bytes=4 * 512 * 512, stored_bytes=200_000, cpu_ms=7.2,
        length=1_000_000,
    ),
    # Windows of 1,025 tokens, uint16 in storage, int64 in a batch: benchmarks/tabular.py.
    "token windows": Workload(
        per_s=400, batch=32, made_bytes=8 * 1025, stored_bytes=2 * 1025, cpu_ms=0.0012,
        length=10_000_000_000, objects=False,
    ),
}  # fmt: skip
CPU_MS = {
    "crops, decoded in part": 0.56,
    "ImageFolder, our workers": 1.30,
    "Albumentations, our workers": 1.49,
    "Albumentations, torch": 2.21,
}
"""Of a sample; benchmarks/jpeg_folder.py and benchmarks/augment.py."""
FAR_BYTES_PER_S = 64 * CROP / 18.85e-3
NEAR_BYTES_PER_S = 64 * CROP / 6.54e-3
"""What one training process takes from actors: benchmarks/remote.py, batches of 9.6 MB."""
RAY_BATCH_MS = 1.3
"""What a batch of 64 KiB costs the training process: benchmarks/remote.py."""
GETS_PER_PREFIX = 5500
"""A second, at least: Amazon's guide to the performance of S3."""
GPU_HOURS_PER_LOSS = 54 * 24 * 16384 / 419
"""One unexpected interruption: The Llama 3 Herd of Models, section 3.3.4 (arXiv 2407.21783)."""


class Line:
    """Carries one batch after the other, as a link or a storage of so much a batch does."""

    def __init__(self, ns_per_batch: float) -> None:
        self.ns_per_batch = ns_per_batch
        self.carried: list[int] = []
        self._free_ns = 0.0

    def __call__(self, number: int, ended_ns: float) -> float:
        """Return when a batch has arrived whose last task ended then."""
        self.carried.append(number)
        self._free_ns = max(self._free_ns, ended_ns) + self.ns_per_batch
        return self._free_ns


class Rank(EventModel):
    """A rank of several, which waits for the others at the end of a step.

    ``line`` brings its batches: given a number and when its last task ended, it returns when the
    batch has arrived; None: at once.
    """

    def __init__(
        self, costs: Sequence[BatchCost], setup: LoaderSetup, line: Line | None = None
    ) -> None:
        super().__init__(costs, setup)
        self._line = line

    @property
    def now_ns(self) -> float:
        """What the clock shows, which begins at 0."""
        return self._now_ns

    def rest_until(self, moment_ns: float) -> None:
        """Let the training do nothing until then, as one that waits for other ranks."""
        self._pass(moment_ns - self._now_ns, cpus=0.0)

    def arrival_ns(self, batch: int) -> float:
        """Return when a batch is there whose last task ends now."""
        return self._now_ns if self._line is None else self._line(batch, self._now_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What the steps of a training took in which ranks wait for each other."""

    took_ms: tuple[float, ...]
    """Each step."""
    waited_ms: float
    """For batches, the mean over steps and ranks: only part of it delays the training."""

    @property
    def step_ms(self) -> float:
        """The mean."""
        return sum(self.took_ms) / len(self.took_ms)


def coupled(
    ranks: Sequence[Sequence[BatchCost]],
    setup: LoaderSetup,
    *,
    steps: int,
    warm_up: int,
    sync_ns: float = 0.0,
    lines: Sequence[Line] = (),
) -> Steps:
    """Return the steps of ranks of which each waits for the slowest at the end of every step.

    Args:
        ranks: For each rank what its batches cost, over and over.
        setup: The loader of each rank; its ``cpus`` are those of one rank.
        steps: Of which the times are returned.
        warm_up: Steps before these.
        sync_ns: What the exchange between the ranks takes, once all are there.
        lines: Of each rank, what brings its batches; none: they are there at once.
    """
    carried = lines or [None] * len(ranks)
    models = [Rank(costs, setup, line) for costs, line in zip(ranks, carried, strict=True)]
    took, waited = [], 0.0
    began = 0.0
    for number in range(warm_up + steps):
        waits = [model.step() for model in models]
        ended = max(model.now_ns for model in models) + sync_ns
        for model in models:
            model.rest_until(ended)
        if number >= warm_up:
            took.append((ended - began) / MS)
            waited += sum(waits) / len(waits)
        began = ended
    return Steps(took_ms=tuple(took), waited_ms=waited / steps / MS)


# -- arithmetic ------------------------------------------------------------------------------------


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table as Markdown."""
    print(f"\n{title}\n\n| {' | '.join(head)} |")
    print("| --- |" + " ---: |" * (len(head) - 1))
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def amount(value: float) -> str:
    """Return a number with three digits that count."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def arithmetic() -> None:
    """Print what follows from the inputs by multiplication alone."""
    rows = []
    for name, work in WORKLOADS.items():
        for gpus in SCALES:
            per_s, cpus = gpus * work.per_s, gpus * work.per_s * work.cpu_ms / 1000
            node_gbit = GPUS_A_NODE * work.per_s * work.made_bytes * 8 / 1e9
            rows.append(
                (
                    name, f"{gpus:,}", amount(per_s), amount(cpus),
                    amount(cpus / (gpus // GPUS_A_NODE)), amount(per_s * work.made_bytes / 1e9),
                    amount(node_gbit), amount(per_s * work.stored_bytes / 1e9),
                    f"{math.ceil(per_s / GETS_PER_PREFIX)}" if work.objects else "",
                    amount(work.length / per_s), amount(work.length / (gpus * work.batch)),
                )
            )  # fmt: skip
    table(
        "What a training asks for",
        ("workload", "GPUs", "samples/s", "CPUs", "CPUs a node", "made, GB/s",
         "made, Gbit/s a node", "read, GB/s", "prefixes", "epoch, s", "steps an epoch"), rows,
    )  # fmt: skip
    table(
        "Batches under way",
        (
            "workload",
            "MB a batch",
            "workers or actors a GPU",
            "batches ahead",
            "these last, s",
            "GB a node of 8 GPUs",
        ),
        [memory_of(name, work) for name, work in WORKLOADS.items()],
    )
    rows = []
    for name, work in WORKLOADS.items():
        rate = work.per_s * work.made_bytes
        node = GPUS_A_NODE * rate * 8 / 1e9
        rows.append(
            (
                name, amount(rate / 1e6), amount(rate / NEAR_BYTES_PER_S * 100),
                amount(rate / FAR_BYTES_PER_S * 100), amount(RAY_BATCH_MS / work.step_ms * 100),
                *(f"{node / link:.1%}" for link in LINKS_GBIT),
                *(f"{work_cpus(work, link):,.0f}" for link in LINKS_GBIT[:2]),
            )
        )  # fmt: skip
    table(
        "Batches made elsewhere: what one trainer takes in, and its node's link",
        ("workload", "MB/s a GPU", "of what was taken from near actors, %", "from far ones, %",
         "1.3 ms of a step, %", *(f"link of {link} Gbit/s" for link in LINKS_GBIT),
         *(f"CPUs that fill {link} Gbit/s" for link in LINKS_GBIT[:2])), rows,
    )  # fmt: skip
    rows = []
    for gpus in SCALES:
        hours = GPU_HOURS_PER_LOSS / gpus
        # Young: write a checkpoint each sqrt(2 x its cost x time between losses).
        write_h, restart_h = 30 / 3600, 300 / 3600
        every_h = math.sqrt(2 * write_h * hours)
        lost = write_h / every_h + (every_h / 2 + restart_h) / hours
        rows.append((f"{gpus:,}", amount(hours), amount(every_h * 60), f"{lost:.2%}"))
    table(
        "Losses of the training's own nodes (30 s a checkpoint, 5 min a restart: assumed)",
        ("GPUs", "hours between losses", "checkpoint each, min", "time lost"), rows,
    )  # fmt: skip
    chances = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    table(
        "Steps that some rank is late for, if each rank is late by itself in so many of its steps",
        ("GPUs", *(f"1 in {round(1 / chance):,}" for chance in chances)),
        [(f"{gpus:,}", *(f"{1 - (1 - c) ** gpus:.2%}" for c in chances)) for gpus in (1, *SCALES)],
    )


def memory_of(name: str, work: Workload) -> tuple[str, ...]:
    """Return what the batches under way take in a node, with a fifth more workers than needed."""
    size = work.batch * work.made_bytes
    workers = max(1, math.ceil(1.2 * work.per_s * work.cpu_ms / 1000))
    # As executors/pool/scheduler.py has it, of local workers and of actors.
    ahead = max(workers, 2, min(8, 2**28 // size))
    return (
        name, amount(size / 1e6), f"{workers}", f"{ahead}",
        amount(ahead * work.step_ms / 1000), amount(GPUS_A_NODE * ahead * size / 1e9),
    )  # fmt: skip


def work_cpus(work: Workload, link_gbit: float) -> float:
    """Return how many CPUs of a node make as many bytes as its link carries."""
    return link_gbit * 1e9 / 8 / work.made_bytes * work.cpu_ms / 1000


# -- simulation ------------------------------------------------------------------------------------


def costs_of(
    work: Workload, random: np.random.Generator, *, batches: int = 64, taking_ms: float = 0.1
) -> list[BatchCost]:
    """Return batches whose samples differ by half of their mean, independently."""
    spread = 1 + 0.5 / math.sqrt(work.batch) * random.standard_normal(batches)
    cost = BatchCost(
        samples=work.batch, cpu_ns=0.0, blocked_ns=0.0, collate_ns=0.0, slowest_ns=0.0,
        handover_ns=taking_ms * MS, taking_ns=taking_ms * MS, step_ns=work.step_ms * MS,
    )  # fmt: skip
    cpu = work.batch * work.cpu_ms * MS * np.maximum(0.1, spread)
    return [replace(cost, cpu_ns=float(each)) for each in cpu]


def setup_of_rank(workers: int, cpus: float, *, ahead: int | None = None) -> LoaderSetup:
    """Return a loader of which each worker makes whole batches, as actors do."""
    return LoaderSetup(
        workers=workers, look_ahead=ahead or max(8, 2 * workers), scheduling="queue", cpus=cpus,
        step_cpus=1.0,
    )  # fmt: skip


def by_cpus() -> None:
    """Print steps by CPUs a GPU: eight ranks, each with its part of the node."""
    base, rows = WORKLOADS["crops 224, JPEG"], []
    for name, cpu_ms in CPU_MS.items():
        work = replace(base, cpu_ms=cpu_ms)
        found = [name, f"{1 + base.per_s * cpu_ms / 1000:.1f}"]
        for cpus in (2, 4, 6, 8, 14):
            random = np.random.default_rng(cpus)
            ranks = [costs_of(work, random) for _ in range(GPUS_A_NODE)]
            steps = coupled(ranks, setup_of_rank(max(1, cpus - 1), cpus), steps=100, warm_up=30)
            found.append(told(steps, base))
        rows.append(found)
    table(
        f"Step by CPUs a GPU (8 GPUs, {base.per_s:,.0f} images/s each wanted: "
        f"{base.step_ms:.1f} ms; ms, and the part that is waiting)",
        ("samples", "CPUs needed", *(f"{cpus} CPUs" for cpus in (2, 4, 6, 8, 14))), rows,
    )  # fmt: skip


def told(steps: Steps, work: Workload) -> str:
    """Return a step, and which part of it is more than computing."""
    return f"{steps.step_ms:.1f} ({max(0.0, 1 - work.step_ms / steps.step_ms):.0%})"


def by_link() -> None:
    """Print steps by the link of a node whose eight ranks get all batches over it."""
    rows = []
    kinds = {
        "crops 224, uint8": (WORKLOADS["crops 224, JPEG"], 1),
        "crops 224, float32": (WORKLOADS["crops 224, JPEG"], 4),
        "segmentation 512, uint8": (WORKLOADS["segmentation 512"], 1),
        "segmentation 512, float32 and int64": (WORKLOADS["segmentation 512"], 5),
        "token windows": (WORKLOADS["token windows"], 1),
    }
    for name, (work, times) in kinds.items():
        size, found = work.batch * work.made_bytes * times, [name]
        for link in (10, *LINKS_GBIT):
            random = np.random.default_rng(link)
            ranks = [costs_of(work, random, taking_ms=RAY_BATCH_MS) for _ in range(GPUS_A_NODE)]
            carry_ns = size / (link * 1e9 / 8 / GPUS_A_NODE) * 1e9
            lines = [Line(carry_ns) for _ in ranks]
            cpus = max(4, math.ceil(1.5 * work.per_s * work.cpu_ms / 1000))
            steps = coupled(
                ranks, replace(setup_of_rank(cpus, 1000.0)), steps=60, warm_up=30, lines=lines
            )
            found.append(told(steps, work))
        rows.append(found)
    table(
        "Step by the link of a GPU node, all batches made elsewhere (8 GPUs; ms, and waiting)",
        ("batches", *(f"{link} Gbit/s" for link in (10, *LINKS_GBIT))), rows,
    )  # fmt: skip


def with_stragglers(
    costs: Sequence[BatchCost], random: np.random.Generator, *, one_in: int, late_ms: float
) -> list[BatchCost]:
    """Return the batches, of which some have a sample that is blocked for long."""
    late = random.random(len(costs)) * one_in < 1
    return [
        replace(cost, blocked_ns=cost.blocked_ns + late_ms * MS, slowest_ns=late_ms * MS)
        if hit
        else cost
        for cost, hit in zip(costs, late, strict=True)
    ]


def by_stragglers() -> None:
    """Print steps by ranks, where a batch in a thousand has a sample that takes long."""
    work, rows = WORKLOADS["crops 224, JPEG"], []
    for late_ms, ahead, workers in ((500, 4, 3), (500, 8, 3), (2000, 8, 3), (2000, 32, 3)):
        found: list[object] = [f"{late_ms} ms", ahead]
        for gpus in (1, *SCALES):
            steps = {1: 4000, 8: 1000, 64: 400}.get(gpus, 100)
            random = np.random.default_rng(gpus)
            ranks = [
                with_stragglers(
                    costs_of(work, random, batches=steps), random, one_in=1000, late_ms=late_ms
                )
                for _ in range(gpus)
            ]
            setup = setup_of_rank(workers, workers + 1.0, ahead=ahead)
            found.append(told(coupled(ranks, setup, steps=steps, warm_up=3 * ahead), work))
        rows.append(found)
    table(
        "Step by ranks and look-ahead, one batch in 1,000 late (3 workers, 4 CPUs a GPU; ms, and "
        "waiting)",
        ("late by", "batches ahead", *(f"{gpus:,} GPUs" for gpus in (1, *SCALES))), rows,
    )  # fmt: skip


def by_loss() -> None:
    """Print what the loss of a node with actors costs: each rank loses one actor of four."""
    work, rows = WORKLOADS["crops 224, JPEG"], []
    late_ms = 3 * work.batch * work.cpu_ms
    for name, notice_ms in (
        (f"asked of others after 3 usual times ({late_ms:.0f} ms)", late_ms),
        ("noticed after 5 s", 5000.0),
        ("noticed after 15 s", 15000.0),
    ):
        for ahead in (8, 32, 256):
            random = np.random.default_rng(7)
            ranks = []
            for _ in range(16):
                costs = costs_of(work, random, batches=600)
                for number in (300, 304):  # an actor has two batches at most
                    costs[number] = replace(costs[number], blocked_ns=notice_ms * MS)
                ranks.append(costs)
            steps = coupled(
                ranks, setup_of_rank(4, 1000.0, ahead=ahead), steps=350, warm_up=12
            ).took_ms
            usual = sorted(steps)[len(steps) // 2]
            stall = sum(max(0.0, step - usual) for step in steps)
            rows.append((name, ahead, f"{max(steps):,.0f}", f"{stall / 1000:.2f}"))
    table(
        "A node with actors goes, of which each of 16 ranks had one of four",
        ("its batches are", "batches ahead", "longest step, ms", "lost in all, s"), rows,
    )  # fmt: skip


def by_ranks() -> None:
    """Print steps by ranks alone: batches differ a little, and CPUs are just enough or too few."""
    base, rows = WORKLOADS["crops 224, JPEG"], []
    workers = 2
    for part in (1.2, 1.05, 1.0, 0.9):
        work = replace(base, cpu_ms=workers / part / base.per_s * 1000)
        found = [f"{part:.0%}"]
        for gpus in (1, *SCALES):
            random = np.random.default_rng(gpus)
            ranks = [costs_of(work, random) for _ in range(gpus)]
            steps = coupled(ranks, setup_of_rank(workers, 1.0 + workers), steps=60, warm_up=30)
            found.append(told(steps, work))
        rows.append(found)
    table(
        "Step by ranks: each differs a little from the others (crops 224; ms, and waiting)",
        ("CPUs for reading, of those needed", *(f"{gpus:,} GPUs" for gpus in (1, *SCALES))), rows,
    )  # fmt: skip


def main() -> None:
    parser = turns.arguments(__doc__ or "")
    parser.add_argument("--check", action="store_true", help="real runs of small cases")
    parser.add_argument("--measure", action="store_true", help="what one rank costs here")
    parser.add_argument("--only", help="of --check: one kind of case")
    options = parser.parse_args()
    if options.check or options.measure:
        import scale_check

        (scale_check.check if options.check else scale_check.measure)(options)
        return
    for each in (arithmetic, by_ranks, by_cpus, by_link, by_stragglers, by_loss):
        each()


if __name__ == "__main__":
    main()
