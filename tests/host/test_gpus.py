"""The GPUs of a machine are told as their driver lists them, and none is touched."""

from __future__ import annotations

import pytest
import torch

from lightning_fastdata.cli import main
from lightning_fastdata.host.machine import read_gpus
from lightning_fastdata.host.memory import DeviceMemory

MIB = 2**20
LISTED = "NVIDIA H100 80GB HBM3, 70000, 81559\nNVIDIA GB10, [N/A], [N/A]\n"


def listing(told, asked):
    def run(command):
        asked.append(list(command))
        return told

    return run


def test_name_and_memory_of_each_gpu_are_those_that_the_driver_lists():
    asked = []
    found = read_gpus(lambda: 2, listing(LISTED, asked), {"CUDA_VISIBLE_DEVICES": "3,GPU-7"})
    assert found == [
        ("NVIDIA H100 80GB HBM3", DeviceMemory(70000 * MIB, 81559 * MIB)),
        ("NVIDIA GB10", None),
    ]
    assert [command[:2] for command in asked] == [["nvidia-smi", "--id=3,GPU-7"]]


def fails(command):
    raise FileNotFoundError(command[0])


@pytest.mark.parametrize("run", [fails, listing(LISTED, [])])
def test_gpus_that_the_driver_does_not_tell_apart_are_counted(run):
    assert read_gpus(lambda: 3, run, {}) == [("GPU 0", None), ("GPU 1", None), ("GPU 2", None)]


CONTEXTS = ("init", "mem_get_info", "get_device_name", "get_device_properties", "current_device")


def test_the_doctor_opens_no_context_on_a_gpu(tmp_path, monkeypatch, capsys):
    """Each of these calls would, and take memory of a GPU that others train on."""

    def opened(*_, **__):
        raise AssertionError("a context was opened")

    for name in CONTEXTS:
        monkeypatch.setattr(torch.cuda, name, opened)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{LISTED.strip()}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    main(["doctor"])
    said = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3, 68.4 GiB of 79.6 GiB free" in said
    assert "NVIDIA GB10, whose driver does not tell its memory" in said
