"""JPEG photographs behind a latency: ours with nothing set by hand, and torch's DataLoader.

    python benchmarks/object_store.py [--latency 5,20,80] [--rounds 3] [--json FILE]

A server in a process of its own on this machine (aiohttp) waits so many milliseconds before each
answer. Photographs of about 480 x 375 px, decoded by PIL, RandomResizedCrop(224), shuffled batches
of 64. "ours" is ``FastDataModule`` over ``SourceDataset(ObjectSource(...))`` and, without a server,
over ``FileSource``; "kept on disk" reads what ``CachedDataset`` kept in the epochs before. torch's
rows read one object a sample, as most datasets do, with obstore or fsspec. Images per second of the
third epoch, and CPU milliseconds an image of the training and its workers, without the server.
Server and loader share the CPUs: what the server takes an image is printed, because no loader here
can be as fast as local files with that beside it.
"""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import psutil
import torch
import turns
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from demo.photos import PHOTOGRAPHS, Cut, cut_photographs
from lightning_fastdata import CachedDataset, FastDataModule
from lightning_fastdata.sources import FileSource, ObjectSource, SourceDataset

BATCH = 64
TRANSFORM = v2.Compose([v2.RandomResizedCrop(224), v2.PILToTensor()])


def decode(raw, _index):
    return TRANSFORM(Image.open(io.BytesIO(raw)).convert("RGB"))


def as_it_is(raw, index):
    return bytes(raw), index


def decode_kept(sample):
    return decode(*sample)


def serve(folder: Path, latency_s: float, port) -> None:
    """Answer requests for files of a folder, each after a while."""
    import asyncio

    from aiohttp import web

    held = {path.name: path.read_bytes() for path in folder.glob("*.jpg")}

    async def answer(request):
        await asyncio.sleep(latency_s)
        return web.Response(body=held[request.match_info["name"]])

    async def run():
        app = web.Application()
        app.router.add_get("/{name}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.put(site._server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(run())


class OneByOne(Dataset):
    """A client a worker, and a request a sample."""

    def __init__(self, url, keys):
        self.url, self.keys, self.store = url, keys, None

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        import obstore
        from obstore.store import from_url

        if self.store is None:
            self.store = from_url(self.url, client_options={"allow_http": True})
        return decode(bytes(obstore.get(self.store, self.keys[index]).bytes()), index)


class ByFsspec(OneByOne):
    """The same by fsspec, whose client is of aiohttp."""

    def __getitem__(self, index):
        import fsspec

        if self.store is None:
            self.store = fsspec.filesystem("http")
        return decode(self.store.cat_file(f"{self.url}/{self.keys[index]}"), index)


def cpu_s() -> float:
    me = psutil.Process()
    times = [
        each.cpu_times()
        for each in (me, *me.children(recursive=True))
        if "serve" not in each.name()
    ]
    return sum(each.user + each.system for each in times)


def rate(loader, server) -> tuple[float, float, float]:
    """Images a second of the third epoch; CPU ms an image of the loader, and of the server."""
    for _ in range(2):
        for _ in loader:
            pass
    of_server = psutil.Process(server.pid) if server else None

    def server_s() -> float:
        return sum(of_server.cpu_times()[:2]) if of_server else 0.0

    count, used_s, served_s, began = 0, cpu_s(), server_s(), time.perf_counter()
    for images in loader:
        count += len(images)
    wall_s = time.perf_counter() - began
    served_s = server_s() - served_s
    own_s = cpu_s() - used_s - served_s
    return count / wall_s, own_s / count * 1e3, served_s / count * 1e3


def torchs(plain, workers, server):
    loader = DataLoader(plain, BATCH, shuffle=True, num_workers=workers, persistent_workers=True)
    return loader, "", server


def ours(source, server):
    return read(SourceDataset(source, decode), server)


def read(dataset, server):
    module = FastDataModule.from_datasets(dataset, batch_size=BATCH)
    loader = module.train_dataloader()
    return loader, f"{loader.executor}, {loader.num_workers} workers", server


def kept(source, server):
    records = SourceDataset(source, as_it_is)
    return read(CachedDataset(records, tempfile.mkdtemp(), transform=decode_kept), server)


def main() -> None:
    parser = turns.arguments(__doc__.partition("\n")[0], rounds=3)
    parser.add_argument("--latency", default="5,20,80", help="milliseconds")
    parser.add_argument("--count", type=int, default=1400, help="number of photographs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = turns.machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    per_class = -(-options.count // len(PHOTOGRAPHS))
    cut = Cut(train_per_class=per_class, val_per_class=1, shortest_px=375, longest_px=480)
    root = cut_photographs(Path(tempfile.gettempdir()) / f"fastdata-benchmark-{per_class}", cut)
    flat = Path(tempfile.mkdtemp())
    for number, (path, _) in enumerate(ImageFolder(root / "train").samples):
        (flat / f"{number:05}.jpg").write_bytes(Path(path).read_bytes())
    keys = sorted(path.name for path in flat.glob("*.jpg"))
    results = {}
    print("| latency | loader | img/s | x local | CPU ms/img | server ms/img |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    context = get_context("fork")
    for latency in map(float, options.latency.split(",")):
        port = context.Queue()
        server = context.Process(target=serve, args=(flat, latency / 1e3, port), daemon=True)
        server.start()
        url = f"http://127.0.0.1:{port.get()}"
        source = ObjectSource(url, keys, client_options={"allow_http": True})
        plain = OneByOne(url, keys)
        contenders = {
            "ours, local files": partial(ours, FileSource(flat / key for key in keys), None),
            "ours": partial(ours, source, server),
            "ours, kept on disk": partial(kept, source, server),
            "torch, 2 workers": partial(torchs, plain, 2, server),
            "torch, 16 workers": partial(torchs, plain, 16, server),
            "torch, 16 workers, fsspec": partial(torchs, ByFsspec(url, keys), 16, server),
        }
        found = {name: [] for name in contenders}
        said = {}
        for _ in range(options.rounds):
            for name, make in contenders.items():
                loader, said[name], beside = make()
                found[name].append(rate(loader, beside))
                del loader
        local = [each[0] for each in found["ours, local files"]]
        for name, rates in found.items():
            speed, own, served = (statistics.median(column) for column in zip(*rates, strict=True))
            ratio = turns.ratio([each[0] for each in rates], local)
            label = f"{name} ({said[name]})" if said[name] else name
            shares = [f"{number:.2f}" for number in (ratio, own, served)]
            cells = [f"{latency:g} ms", label, f"{speed:.0f}", *shares]
            print(f"| {' | '.join(cells)} |")
        results[latency] = found
        server.terminate()
        print(end="", flush=True)
    turns.write(options.json, "object_store", results)


if __name__ == "__main__":
    main()
