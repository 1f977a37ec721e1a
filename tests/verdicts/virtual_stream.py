"""A device of one stream that exists in time alone: work is a duration, and nothing computes.

As on a real one the host queues work and goes on; an event is stamped when the stream gets there.
Durations are given, and the host waits on the clock of the package.
"""

from __future__ import annotations

from lightning_fastdata.host import clock


class VirtualStream:
    """The stream, and the clock that :class:`StepTimeline` takes of a device."""

    def __init__(self):
        self._free_ns = 0

    def launch(self, seconds):
        """Queue work and return at once."""
        self._free_ns = self.mark() + round(seconds * 1e9)

    def synchronize(self, left_s=0.0):
        """Wait until no more than so much is queued, as ``.item()`` or a full queue do."""
        ahead = self._free_ns - clock.monotonic_ns() - left_s * 1e9
        if ahead > 0:
            clock.sleep(ahead / 1e9)

    def mark(self):
        return max(clock.monotonic_ns(), self._free_ns)

    def ready(self, mark):
        return clock.monotonic_ns() >= mark

    def elapsed_ms(self, begin, end):
        return (end - begin) / 1e6

    def reuse(self, marks):
        pass
