from __future__ import annotations

import pickle
from dataclasses import fields
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from loading.planned import GIB, cpus, memory, plan
from misses import each
from thoroughness import max_examples
from torch.utils.data import TensorDataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.ray import Ray, options_of_actors
from lightning_fastdata.loading.facts import DatasetFacts
from lightning_fastdata.loading.options import LoaderOptions
from lightning_fastdata.loading.plan_for import ExecutorChoice
from lightning_fastdata.types import STAGES

NAMES = [field.name for field in fields(LoaderOptions)]


any_options = st.builds(
    LoaderOptions,
    num_workers=st.just("auto") | st.integers(0, 64),
    pin_memory=st.sampled_from(["auto", True, False]),
    persistent_workers=st.sampled_from(["auto", "unchanged", True, False]),
    prefetch_factor=st.just("auto") | st.integers(1, 16),
    multiprocessing_context=st.sampled_from(["auto", "fork", "spawn", "forkserver"]),
    timeout=st.just("auto") | st.floats(0, 100),
    in_order=st.booleans(),
    executor=st.sampled_from(["auto", "torch", "inline", "gather", "workers"]),
)
any_situation = st.fixed_dictionaries(
    {
        "stage": st.sampled_from(STAGES),
        "cpu": st.builds(cpus, st.integers(1, 128), st.integers(1, 8)),
        "memory": st.builds(
            memory,
            ram=st.integers(0, 2**40),
            cgroup=st.none() | st.integers(0, 2**36),
            shm=st.none() | st.integers(0, 2**36),
            soft=st.none() | st.integers(64, 2**20),
        ),
        "accelerator": st.sampled_from(["cpu", "cuda", "mps"]),
        "batch_size": st.integers(1, 512),
        "dataset_length": st.none() | st.integers(0, 2**20),
        "iterable": st.booleans(),
        "in_memory": st.booleans(),
    }
)


@max_examples(200)
@given(options=any_options, situation=any_situation)
def test_the_users_value_always_wins_and_each_option_is_chosen_once(
    options: LoaderOptions, situation: dict[str, Any]
) -> None:
    made = plan(options, **situation)
    set_ = options.set_by_user()
    for name in NAMES:
        if name in set_:
            assert getattr(made.options, name) == getattr(options, name)
        row = next(line for line in made.explain().splitlines() if line.startswith(f"{name} "))
        assert row.split()[2] == ("you" if name in set_ else "auto")
    assert set(made.reasons).isdisjoint(set_)
    assert all(limit in made.explain() for limit in made.limits)
    given = made.loader_arguments()
    assert given["num_workers"] or not {"prefetch_factor", "persistent_workers"} & set(given)


@max_examples(300)
@given(situation=any_situation)
def test_what_is_chosen_stays_within_the_machine(situation: dict[str, Any]) -> None:
    made = plan(**situation)
    assert 0 <= made.num_workers <= situation["cpu"].usable_cpus
    if situation["dataset_length"] is not None:
        assert (made.num_workers - 1) * situation["batch_size"] < max(
            1, situation["dataset_length"]
        )
    if made.num_workers == 0:
        assert made.options.prefetch_factor == "auto"
        return
    assert made.options.prefetch_factor in (2, 3, 4)


@max_examples(100)
@given(situation=any_situation, more=st.integers(1, 64))
def test_more_cpus_never_give_fewer_workers(situation: dict[str, Any], more: int) -> None:
    few = situation["cpu"]
    ranks = few.ranks_on_host
    many = {
        **situation,
        "cpu": cpus(few.usable_cpus + more, ranks),
        "memory": memory(ram=2**60, shm=None),
    }
    few_cpus = {**many, "cpu": few}
    assert plan(**many).num_workers >= plan(**few_cpus).num_workers


@each("count", [1, 2, 3, 8, 64])
@each("accelerator", ["cpu", "cuda"])
@each("workers", ["auto", 3])
def test_validation_has_what_training_has_and_is_tuned_as_it(
    count: int, accelerator: str, workers: Any
) -> None:
    options = LoaderOptions(num_workers=workers)
    engine = {
        "choice": ExecutorChoice("workers", "images"),
        "facts": DatasetFacts(split=True),
    }
    train, val, test = (
        plan(options, **engine, cpu=cpus(count), accelerator=accelerator, stage=stage)
        for stage in ("train", "val", "test")
    )
    assert (val.num_workers, val.tuned) == (train.num_workers, train.tuned)
    assert (val.tuned, test.tuned) == (workers == "auto", False)


@each(
    ("changes", "workers"),
    [
        pytest.param({}, 7, id="one CPU is left for the training process"),
        pytest.param({"stage": "val"}, 7, id="the training pool sleeps meanwhile"),
        pytest.param({"stage": "test"}, 7, id="nothing else runs"),
        pytest.param({"accelerator": "cpu"}, 8, id="the model computes on the CPUs"),
        pytest.param({"accelerator": "cpu", "cpu": cpus(2)}, 2, id="two CPUs that also train"),
        pytest.param({"cpu": cpus(2)}, 2, id="two CPUs and a GPU"),
        pytest.param({"cpu": cpus(1), "stage": "val"}, 1, id="at least one"),
        pytest.param({"dataset_length": 129}, 3, id="no more than batches"),
        pytest.param({"dataset_length": 0}, 0, id="an empty dataset"),
        pytest.param({"in_memory": True}, 0, id="tensors in memory"),
    ],
)
def test_workers_follow_what_else_needs_the_cpus(changes: dict[str, Any], workers: int) -> None:
    made = plan(**changes)
    assert made.num_workers == workers
    assert made.limits == ()


def test_a_stream_gets_one_worker_and_says_how_to_get_more() -> None:
    made = plan(iterable=True, dataset_length=None)
    assert made.num_workers == 1
    assert "set num_workers=7" in made.limits[0]
    assert plan(LoaderOptions(num_workers=7), iterable=True).limits == ()


def test_workers_start_as_python_starts_them_unless_the_user_says_otherwise() -> None:
    assert plan().start_method is None
    forked = plan(LoaderOptions(multiprocessing_context="fork"))
    assert forked.start_method == "fork"
    assert forked.limits == ()


def test_memory_is_pinned_for_cuda_only() -> None:
    assert plan().options.pin_memory
    assert not plan(accelerator="mps").options.pin_memory


def test_only_training_and_validation_keep_their_workers() -> None:
    aside = LoaderOptions(executor="workers")
    assert {s: plan(aside, stage=s).options.persistent_workers for s in STAGES} == {
        "train": "unchanged",
        "val": "unchanged",
        "test": False,
        "predict": False,
    }
    assert plan(LoaderOptions(executor="torch")).options.persistent_workers is False


@each(
    ("option", "value"),
    [
        ("num_workers", -1),
        ("num_workers", True),
        ("num_workers", 2.0),
        ("num_workers", "many"),
        ("num_workers", None),
        ("prefetch_factor", 0),
        ("pin_memory", 1),
        ("persistent_workers", "yes"),
        ("multiprocessing_context", "thread"),
        ("timeout", -1.0),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("timeout", "5"),
        ("timeout", "never"),
        ("in_order", "auto"),
        ("multiprocessing_context", 3),
        *((name, np.array([1, 2])) for name in NAMES),
    ],
)
def test_an_impossible_value_is_named_and_quoted(option: str, value: object) -> None:
    with pytest.raises(OptionsError) as error:
        LoaderOptions(**{option: value})  # type: ignore[arg-type]
    assert str(error.value).startswith(f"{option} is {value!r}; allowed are ")
    data = TensorDataset(torch.arange(4))
    if option == "multiprocessing_context":
        with pytest.raises(OptionsError, match="multiprocessing_context is "):
            FastDataLoader(data, num_workers=1, multiprocessing_context=value)


def test_numbers_and_methods_of_starting_may_be_objects_of_libraries() -> None:
    data = TensorDataset(torch.arange(4))
    options: Any = {"num_workers": np.int64(1), "timeout": np.int64(5)}
    loader = FastDataLoader(data, multiprocessing_context=get_context("spawn"), **options)
    context: Any = loader.multiprocessing_context
    assert context.get_start_method() == "spawn"
    with pytest.raises(OptionsError, match=r"generator is 42; allowed are None and a torch\.Gen"):
        FastDataLoader(data, shuffle=True, generator=42)  # type: ignore[arg-type]
    sizes: Any = {"batch_size": np.int64(3), "executor": "inline"}
    assert [len(batch[0]) for batch in FastDataLoader(data, **sizes)] == [3, 1]
    assert LoaderOptions(**options).num_workers == 1


@each("text", ["abc", "", "1.5"])
def test_a_seed_of_the_environment_that_is_none_is_named(text: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", text)
    with pytest.raises(OptionsError, match=f"PL_GLOBAL_SEED is {text!r}"):
        FastDataLoader(TensorDataset(torch.arange(4)))
    assert FastDataLoader(TensorDataset(torch.arange(4)), seed=3).seed == 3


@each(
    ("executor", "taken"),
    [
        ("ray", {"num_cpus": 1}),
        (Ray(), {"num_cpus": 1}),
        (Ray(num_cpus=0.5, memory=2**30), {"num_cpus": 0.5, "memory": 2**30}),
        (
            Ray(resources={"fast": 1}, options={"num_gpus": 1, "num_cpus": 3}),
            {"num_cpus": 1, "resources": {"fast": 1}, "num_gpus": 1},
        ),
    ],
)
def test_actors_take_what_the_executor_says_wherever_it_is_given(executor: Any, taken: Any) -> None:
    assert options_of_actors(executor) == taken
    asked = LoaderOptions(executor=executor, num_workers=2)
    assert plan(asked).executor == executor
    assert str(executor) in plan(asked).explain()
    loader = FastDataLoader(TensorDataset(torch.arange(4)), executor=executor, num_workers=2)
    assert loader.executor == pickle.loads(pickle.dumps(loader)).executor == executor


@each(
    ("name", "value"),
    [
        ("num_cpus", -1),
        ("num_cpus", None),
        ("num_cpus", True),
        ("memory", "1 GiB"),
        ("resources", ["fast"]),
        ("label_selector", "zone"),
        ("runtime_env", 1),
        ("options", ("a",)),
    ],
)
def test_an_impossible_value_of_an_executor_is_named_and_quoted(name: str, value: object) -> None:
    with pytest.raises(OptionsError) as error:
        Ray(**{name: value})  # type: ignore[arg-type]
    assert str(error.value).startswith(f"{name} of Ray is {value!r}; allowed are ")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_options_come_from_a_command_line_and_from_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(LoaderOptions, "loader")
    parser.add_argument("--config", action="config")
    yaml = "loader:\n  num_workers: 4\n  pin_memory: false\n  timeout: 2.5\n"
    ray = yaml + "  executor:\n    class_path: lightning_fastdata.executors.ray.Ray\n"
    ray += "    init_args: {num_cpus: 2}\n"
    assert parser.instantiate_classes(parser.parse_string(ray)).loader.executor == Ray(num_cpus=2)
    for parsed in (
        parser.parse_string(yaml),
        parser.parse_args(
            ["--loader.num_workers=4", "--loader.pin_memory=false", "--loader.timeout=2.5"]
        ),
    ):
        options = parser.instantiate_classes(parsed).loader
        assert options == LoaderOptions(num_workers=4, pin_memory=False, timeout=2.5)


def test_there_are_no_more_workers_than_memory_has_room_for_and_it_is_said():
    def planned(each_bytes, options=None, **about):
        facts = DatasetFacts(worker_bytes=each_bytes)
        return plan(options, accelerator="cpu", facts=facts, **about)

    roomy = planned(2 * GIB, memory=memory(ram=100 * GIB))
    assert (roomy.num_workers, roomy.limits) == (8, ())
    tight = planned(2 * GIB, memory=memory(cgroup=10 * GIB))
    assert tight.num_workers == 4
    assert "a worker comes to take 2.00 GiB, and 10.00 GiB are left" in tight.reasons["num_workers"]
    assert "num_workers is 4 instead of 8" in tight.limits[0]
    ranks = planned(2 * GIB, cpu=cpus(8, ranks=2))
    assert ranks.num_workers == min(8, int(0.8 * memory().available_bytes) // 2 // (2 * GIB))
    assert planned(20 * GIB, memory=memory(cgroup=10 * GIB)).num_workers == 1
    asked = planned(20 * GIB, LoaderOptions(num_workers=8), memory=memory(ram=GIB))
    assert asked.num_workers == 8
