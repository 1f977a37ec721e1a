"""Streams for tensors of the CPU, so that what moves batches ahead runs without a device."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

from lightning_fastdata import FastDataModule
from lightning_fastdata.loading import prefetch


@contextmanager
def made_ahead():
    """Have what this process makes be sent ahead, as if workers had made it."""
    with mock.patch.object(prefetch, "is_ready", return_value=True):
        yield


class HostStreams:
    """Streams for real tensors of the CPU, where every order of work is the host's; counted."""

    def __init__(self):
        self.sent = self.landed = 0

    @contextmanager
    def aside(self):
        self.sent += 1
        yield

    def mark(self):
        return self

    def query(self):
        return True

    def synchronize(self):
        pass

    def wait(self, event):
        self.landed += 1

    def keep(self, tensor):
        pass


class OnStreams(FastDataModule):
    """Data on a CPU that has streams like a GPU."""

    streams: HostStreams | None = None

    def device_streams(self, device):
        self.streams = HostStreams()
        return self.streams
