"""Ranks that share a cluster: each has actors of its own, and all samples are read once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import ray
from ext.ray import train_on_ranks
from ext.ray.clusters import actors, wait_until
from ext.ray.train_on_ranks import LENGTH, read

from lightning_fastdata.ext.ray.cluster import _free_cpus_by_node, read_nodes

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def see_each_sample_once(ranks) -> None:
    for epoch in (0, 1):
        seen = [
            row for rank in ranks for when, rows, _ in rank["ray"] if when == epoch for row in rows
        ]
        assert Counter(seen) == Counter(range(LENGTH)), epoch


def torchrun(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    folders = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    return subprocess.run(
        [*command, train_on_ranks.__file__, str(folder)],
        env={**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def test_free_cpus_of_nodes_are_those_that_ray_gives_in_sum(cluster) -> None:
    """It has no public name for those of each node."""
    held = ray.remote(num_cpus=1)(Holder).remote()
    ray.get(held.is_there.remote())
    wait_until(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"] - 1)
    nodes = read_nodes(ray)
    assert _free_cpus_by_node(ray).keys() == {node.id for node in nodes}
    assert [node.is_own for node in nodes].count(True) == 1
    wait_until(lambda: sum(n.cpus - n.free_cpus for n in read_nodes(ray)) == 1)
    ray.kill(held)


class Holder:
    def is_there(self) -> bool:
        return True


def test_two_ranks_that_want_all_cpus_each_get_half_and_say_so_once(cluster, tmp_path) -> None:
    wait_until(lambda: not actors(cluster))
    done = torchrun(tmp_path, RAY_ADDRESS=cluster.address)
    assert done.returncode == 0, done.stderr[-5000:]
    ranks = read(tmp_path)
    for rank in ranks:
        assert rank["ray"] == rank["workers"]
    see_each_sample_once(ranks)
    told = [text for rank in ranks for text in rank["told"] if "actors each" in text]
    assert len(told) == 1
    assert "2 ranks want 4 actors each" in told[0]
    assert "the cluster has CPUs for 2 each" in told[0]
    wait_until(lambda: not actors(cluster))


def test_ranks_that_find_no_cluster_say_how_to_start_one(tmp_path) -> None:
    code = "import torch; from lightning_fastdata import FastDataLoader as F; "
    code += "next(iter(F(torch.arange(9), executor='ray', num_workers=1)))"
    environment = {**os.environ, "WORLD_SIZE": "2", "RAY_TMPDIR": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "WorkerError: 2 ranks train together, and no Ray cluster runs" in done.stderr
    assert "`ray start --head`" in done.stderr


def test_ranks_of_ray_train_read_each_sample_once(cluster, tmp_path) -> None:
    pytest.importorskip("pyarrow")  # of Ray Train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.cloudpickle.register_pickle_by_value(train_on_ranks)
    wait_until(lambda: not actors(cluster))

    def loop(config: dict[str, str]) -> None:
        from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

        how = {
            "devices": lambda: "auto",
            "strategy": RayDDPStrategy,
            "plugins": lambda: [RayLightningEnvironment()],
        }
        train_on_ranks.train(config["folder"], how, prepare_trainer)

    TorchTrainer(
        loop,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(tmp_path / "ray"), name="ranks"),
    ).fit()
    ranks = read(tmp_path)
    for rank in ranks:
        assert rank["ray"] == rank["workers"]
    see_each_sample_once(ranks)
    wait_until(lambda: not actors(cluster))
