"""The GPUs of a machine are told as their driver lists them, and none is touched."""

from __future__ import annotations

import pytest
import torch

from lightning_fastdata.cli import main
from lightning_fastdata.host.machine import read_gpus
from lightning_fastdata.host.memory import DeviceMemory

MIB = 2**20
LISTED = "NVIDIA H100 80GB HBM3, 70000, 81559\nNVIDIA GB10, [N/A], [N/A]\n"


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Return what has a driver list two GPUs, or others; it notes what it was asked."""

    def lists(text=LISTED, *, gpus=2, fails=0):
        program = tmp_path / "nvidia-smi"
        asked = tmp_path / "asked"
        program.write_text(f"#!/bin/sh\necho $* > {asked}\necho '{text.strip()}'\nexit {fails}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return asked

    return lists


def test_name_and_memory_of_each_gpu_are_those_that_the_driver_lists(driver, monkeypatch):
    asked = driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    assert read_gpus() == [
        ("NVIDIA H100 80GB HBM3", DeviceMemory(70000 * MIB, 81559 * MIB)),
        ("NVIDIA GB10", None),
    ]
    assert asked.read_text().split()[0] == "--id=3,GPU-7"


@pytest.mark.parametrize("how", [{"fails": 9}, {"text": LISTED}, {"text": ""}])
def test_gpus_that_the_driver_does_not_tell_apart_are_counted(driver, how):
    driver(**how, gpus=3)
    assert read_gpus() == [("GPU 0", None), ("GPU 1", None), ("GPU 2", None)]


def test_without_a_driver_gpus_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert read_gpus() == [("GPU 0", None)]


CONTEXTS = ("init", "mem_get_info", "get_device_name", "get_device_properties", "current_device")


def test_the_doctor_opens_no_context_on_a_gpu(driver, monkeypatch, capsys):
    """Each of these calls would, and take memory of a GPU that others train on."""

    def opened(*_, **__):
        raise AssertionError("a context was opened")

    for name in CONTEXTS:
        monkeypatch.setattr(torch.cuda, name, opened)
    driver()
    main(["doctor"])
    said = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3, 68.36 GiB of 79.65 GiB free" in said
    assert "NVIDIA GB10, whose driver does not tell its memory" in said
