"""What is known of each executor stands in one row, which all other code asks."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest
from misses import each
from torch.utils.data import IterableDataset, TensorDataset, default_collate

import lightning_fastdata
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import (
    ExecutorName,
    Resources,
    executor_for,
    kind_of,
    open_executor,
)
from lightning_fastdata.planning.options import LoaderOptions

NAMES = get_args(ExecutorName)
ROOMS = ("device", "executors", "insight", "loading", "planning", "plugin/guard")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def test_each_name_has_its_row():
    for name in NAMES:
        assert kind_of(name).what
        assert LoaderOptions(executor=name, num_workers=2).executor == name


def names_compared(node: ast.AST) -> bool:
    """Whether it says ``x == "workers"``, ``x in ("workers", ...)`` or the opposite."""
    if not isinstance(node, ast.Compare):
        return False
    constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    equal = isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn)
    asks_for_one = isinstance(node.ops[0], ast.In) and isinstance(node.left, ast.Constant)
    return equal and not asks_for_one and bool(constants & {*NAMES})


def test_no_module_compares_the_names_of_executors():
    package = Path(lightning_fastdata.__file__).parent
    found = [
        f"{file.relative_to(package)}:{node.lineno}"
        for room in ROOMS
        for file in (package / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if names_compared(node)
    ]
    assert found == []


@each("workers", [0, 2])
@each("stream", [True, False])
@each("name", [name for name in NAMES if name != "torch"])
def test_who_fetches_can_read_the_dataset_with_so_many_workers(name, stream, workers):
    found = executor_for(name, stream=stream, workers=workers)
    assert executor_for(found, stream=stream, workers=workers) == found
    assert kind_of(found).reads_streams or not stream
    assert workers or not kind_of(found).side_processes
    if found != name:
        assert (stream and not kind_of(name).reads_streams) or not workers
    dataset = Stream() if stream else TensorDataset()
    if stream and not kind_of(name).reads_streams:
        with pytest.raises(OptionsError, match="is a stream"):
            open_executor(
                FetchPlan(dataset=dataset, collate_fn=default_collate), Resources(executor=name)
            )


@pytest.mark.parametrize("name", ["torch", "thread", "Workers"])
def test_what_is_no_executor_is_refused_with_those_that_there_are(name):
    plan = FetchPlan(dataset=Stream(), collate_fn=default_collate)
    with pytest.raises(OptionsError, match="'inline', 'gather', 'workers', 'ray'"):
        open_executor(plan, Resources(executor=name))
