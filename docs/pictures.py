"""Make the pictures of the documentation anew: needs Chromium, and two minutes.

    python docs/pictures.py [--browser chromium]
    python docs/pictures.py --output      # only what the first block of README and start.md prints

A training of three epochs with validation, whose storage answers in 3 ms, is read by one worker;
TensorBoard's page of it is shown to a browser without a window. What the browser shows is
checked, too: our group comes first among ours, with six scalars, and the last text is the summary.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch.utils.data import Dataset

DOCS = Path(__file__).parent
BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
DRAWN_S = 4.0
"""TensorBoard draws its charts bit by bit."""
CARDS = [
    "/stall_percent",
    "/step_ms",
    "/throughput_if_data_were_free_samples_per_s",
    "/throughput_samples_per_s",
    "/time_compute_ms",
    "/time_wait_ms",
    "/timeline",
]
TEXTS = """(() => {
  const found = [];
  const walk = node => {
    if (node.nodeType === Node.TEXT_NODE && node.textContent.trim())
      found.push(node.textContent.trim());
    if (["STYLE", "SCRIPT", "TEMPLATE"].includes(node.nodeName)) return;
    for (const child of node.shadowRoot ? [node.shadowRoot] : []) walk(child);
    for (const child of node.childNodes) walk(child);
  };
  walk(document.body);
  return found;
})()"""


class Scans(Dataset):
    """Samples from a storage that answers in 3 ms."""

    def __len__(self) -> int:
        return 8000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.003)
        return torch.rand(3, 32, 32), index % 10


def train(folder: str) -> None:
    """Train, with TensorBoard's logger."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    from lightning_fastdata import DataThroughputCallback, FastDataModule

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3 * 32 * 32, 10)

        def training_step(self, batch):
            images, labels = batch
            time.sleep(0.02)
            return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

        def validation_step(self, batch):
            self.log("val_loss", self.training_step(batch))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = Trainer(
        max_epochs=3,
        limit_train_batches=150,
        limit_val_batches=20,
        accelerator="cpu",
        logger=TensorBoardLogger(folder),
        callbacks=[DataThroughputCallback()],
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.set_num_threads(1)  # several wait for each other where other programs have the CPUs
    data = FastDataModule.from_datasets(Scans(), Scans(), batch_size=16, num_workers=1)
    trainer.fit(Model(), datamodule=data)


class Browser:
    """A Chromium without a window, driven by its DevTools protocol over two pipes."""

    def __init__(self, program: str, profile: str) -> None:
        (read, self._out), (self._in, write) = os.pipe(), os.pipe()
        # Chromium reads commands from 3 and answers on 4.
        start = f'exec "$@" 3<&{read} 4>&{write}'
        options = [*BROWSER, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", start, "bash", program, *options],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._answers, self._calls = os.fdopen(self._in, "rb"), 0
        page = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=page, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def _ask(self, method: str, **parameters: object) -> dict:
        self._calls += 1
        session = getattr(self, "_session", {})
        call = {"id": self._calls, "method": method, "params": parameters, **session}
        os.write(self._out, json.dumps(call).encode() + b"\0")
        while True:
            read = bytearray()
            while (byte := self._answers.read(1)) != b"\0":
                if not byte:
                    raise RuntimeError("The browser has ended.")
                read += byte
            answer = json.loads(read)
            if answer.get("id") == self._calls:
                return answer["result"]

    def open(self, address: str, size: tuple[int, int]) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **metrics)
        self._ask("Page.navigate", url="about:blank")
        self._ask("Page.navigate", url=address)

    def texts(self) -> list[str]:
        """Return the texts of the page in their order, those of its web components, too."""
        found = self._ask("Runtime.evaluate", expression=TEXTS, returnByValue=True)
        return found["result"].get("value", [])

    def until(self, shown: str, seconds: float = 60) -> list[str]:
        """Wait for a text and for what is drawn after it; return the texts."""
        until_s = time.monotonic() + seconds
        while not any(shown in text for text in self.texts()):
            if time.monotonic() > until_s:
                sys.exit(f"The page does not show {shown!r} but {self.texts()}.")
            time.sleep(0.5)
        time.sleep(DRAWN_S)
        return self.texts()

    def picture(self, file: str) -> None:
        data = self._ask("Page.captureScreenshot", format="png")["data"]
        (DOCS / file).write_bytes(base64.b64decode(data))
        print(f"{DOCS / file} written.")

    def close(self) -> None:
        self._ask("Browser.close")
        self._process.wait(20)
        self._answers.close()
        os.close(self._out)


def check_time_series(texts: list[str]) -> None:
    """Our group is the first of ours, and has six scalars and the picture."""
    groups = [text for text in texts if re.fullmatch("data(_[a-z]+)?", text)]
    cards = [after for text, after in pairwise(texts) if text == "data" and after[0] == "/"]
    if groups[0] != "data" or cards != CARDS:
        sys.exit(f"The first group is {groups[0]!r} with {cards}, and not 'data' with {CARDS}.")


def check_last_text(texts: list[str]) -> None:
    """The newest text, which is the uppermost, is the summary."""
    newest = texts[texts.index("step") + 2]  # after the number of the step
    if not newest.startswith("fastdata · train"):
        sys.exit(f"The last text is not the summary: {newest}.")


def on_one_line(text: str) -> str:
    """Return a wrapped text on one line, if that is no longer than README's others."""
    joined = re.sub(r"\n +", " ", text)
    return joined if len(joined) <= 100 else text


def write_output() -> None:
    """Run the first block of the first pages, and write below it what it prints."""
    readme, start = DOCS.parent / "README.md", DOCS / "start.md"
    code = readme.read_text().split("```python\n")[1].split("```")[0]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=folder,
            check=True,
            env={**os.environ, "COLUMNS": "80"},
        )
        printed = done.stdout.replace(f"{os.path.realpath(folder)}/", "")
    text = printed[printed.index("fastdata · train · ") :].rstrip() + "\n"
    head, *paragraphs = re.split(r"\n(?= \w)", text)
    left_out = r" (?:transfer|\d|val|note|page)"
    shown = [one.strip("─\n") for one in paragraphs if not re.match(left_out, one)]
    short = "\n".join([head, *map(on_one_line, shown)]) + "\n"
    for page, output in ((start, text), (readme, short)):
        before, after = page.read_text().split("fastdata · train · ", 1)
        page.write_text(f"{before}{output}```{after.split('```', 1)[1]}")
        print(f"{page} written.")


def wait_for(address: str, seconds: float = 60) -> None:
    until_s = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).read()
            return
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--port", type=int, default=6017)
    parser.add_argument("--output", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    write_output()
    if options.output:
        return
    if shutil.which(options.browser) is None:
        sys.exit(f"There is no {options.browser!r}; give another one with --browser.")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as profile:
        train(folder)
        browser = Browser(options.browser, profile)
        try:
            with tensorboard(folder, options.port) as address:
                show_board(browser, address)
        finally:
            browser.close()


def show_board(browser: Browser, address: str) -> None:
    """Look at what a user sees of a run in TensorBoard, and take the pictures."""
    browser.open(f"{address}#timeseries", (1750, 1500))
    check_time_series(browser.until("/timeline"))
    browser.picture("tensorboard-scalars.png")
    browser.open(f"{address}#custom_scalars", (1400, 480))
    browser.until("ms a step: wait and compute")
    browser.picture("tensorboard-charts.png")
    browser.open(f"{address}#images", (1400, 640))
    browser.until("data/timeline")
    browser.picture("tensorboard.png")
    browser.open(f"{address}#text", (1400, 1000))
    check_last_text(browser.until("fastdata · train"))
    browser.picture("tensorboard-text.png")


@contextmanager
def tensorboard(folder: str, port: int) -> Iterator[str]:
    """Have TensorBoard show a folder; give its address."""
    board = subprocess.Popen(
        [
            *(sys.executable, "-m", "tensorboard.main", "--logdir", "."),
            *("--port", str(port), "--load_fast=false"),
        ],
        cwd=folder,  # the page shows what --logdir is
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://localhost:{port}/"
        wait_for(address)
        time.sleep(10)
        yield address
    finally:
        board.terminate()
        board.wait(20)


if __name__ == "__main__":
    main()
