"""Count the functions that a dataset is handed to on its way to a loader.

    python tools/ways.py [--list]

``FastDataModule.make_loader`` is given a small dataset. Each call of a function of the package with
that dataset among its arguments counts, those inside other calls too. A call goes up where the
function that is called lies in a higher layer than the one that calls it; the layers are those of
import-linter in pyproject.toml. What other processes do is not seen.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Dataset

import lightning_fastdata

PACKAGE = Path(lightning_fastdata.__file__).parent
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def layers() -> list[set[str]]:
    """Return the modules and rooms of the package by layer, the highest first."""
    contracts = tomllib.loads(PROJECT.read_text())["tool"]["importlinter"]["contracts"]
    named = next(each for each in contracts if each["name"] == "rooms only look down")
    return [{name.strip() for name in layer.split("|")} for layer in named["layers"]]


def height_of(module: str, above: list[set[str]]) -> int | None:
    """Return the layer of a module, counted from below; None: it is in none."""
    parts = module.split(".")
    names = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return next((-place for place, layer in enumerate(above) if layer & names), None)


@dataclass(slots=True)
class Ways:
    """Where a value was handed to."""

    functions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls, by the module and the name of the function."""
    ups: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Those that went to a higher layer, by the modules of caller and function."""


def module_of(frame: FrameType) -> str | None:
    """Return the dotted name of a frame's module below the package; None: it is another's."""
    file = Path(frame.f_code.co_filename)
    if PACKAGE not in file.parents:
        return None
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def arguments_of(frame: FrameType) -> Iterator[Any]:
    """Yield the values that a function was called with, of ``*`` and ``**`` each one."""
    code = frame.f_code
    plain = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames
    yield from (frame.f_locals.get(name) for name in names[:plain])
    if code.co_flags & 0x04:  # CO_VARARGS
        yield from frame.f_locals.get(names[plain], ())
        plain += 1
    if code.co_flags & 0x08:  # CO_VARKEYWORDS
        yield from frame.f_locals.get(names[plain], {}).values()


@contextmanager
def watched(value: object) -> Iterator[Ways]:
    """Note the functions of the package that are called with a value inside the block."""
    ways, above = Ways(), layers()

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = module_of(frame) if event == "call" else None
        if module is None or frame.f_code.co_name.startswith("<"):
            return
        if not any(each is value for each in arguments_of(frame)):
            return
        ways.functions[module, frame.f_code.co_qualname] += 1
        caller = frame.f_back
        while caller is not None and module_of(caller) is None:
            caller = caller.f_back
        if caller is not None:
            calling = module_of(caller) or ""
            here, there = height_of(calling, above), height_of(module, above)
            if here is not None and there is not None and there > here:
                ways.ups[calling, module] += 1

    before: Callable[..., Any] | None = sys.getprofile()
    sys.setprofile(note)
    try:
        yield ways
    finally:
        sys.setprofile(before)


class Numbers(Dataset):
    """A few tensors, made when they are asked for."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


class Module(lightning_fastdata.FastDataModule):
    """Reads what it is given."""

    def train_dataset(self) -> Dataset:
        return Numbers()


def main() -> None:
    """Print the counts, and with ``--list`` each function."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="each function with its calls")
    listed = parser.parse_args().list
    module, dataset = Module(batch_size=4), Numbers()
    with watched(dataset) as made:
        loader = module.make_loader(dataset, stage="train")
    with watched(dataset) as read:
        list(loader)
    for name, ways in (("make_loader", made), ("an epoch", read)):
        files = {module for module, _ in ways.functions}
        print(
            f"{name:12} {len(ways.functions):3} functions in {len(files):2} files, "
            f"{ways.functions.total():3} calls, {ways.ups.total():2} to a higher layer"
        )
        if listed:
            for (file, function), calls in sorted(ways.functions.items()):
                print(f"    {file:36} {function:44} {calls:3}")
            for (lower, higher), calls in sorted(ways.ups.items()):
                print(f"    up: {lower} -> {higher}: {calls}")


if __name__ == "__main__":
    main()
