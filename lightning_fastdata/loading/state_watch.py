"""Whether a training changes what is read while it is read, seen before it makes a difference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Final

from lightning_fastdata.caches.folders import Kept
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.fingerprint import Fingerprint, fingerprint
from lightning_fastdata.host import clock
from lightning_fastdata.randomness.search import find_composes
from lightning_fastdata.randomness.seeds import lasting

_WITHIN_S: Final = 0.01
_SHARE: Final = 0.01


class StateWatch:
    """Compares what is read before and behind steps: the first, 2nd, 4th, 8th, ..., and others.

    Others as long as that takes a hundredth of the time. What reading itself changes makes no
    difference, nor what cannot be compared.

    Args:
        objects: What is read.
        text: The warning where a step has changed it, with a place for its number.
        caches: Of what is read; used no more where a step has changed what they were made of.
        reads_later: Returns whether what comes next is read as things are by then. Where it was
            read when the epoch began, no step can change it.
    """

    def __init__(
        self,
        objects: tuple[object, ...],
        text: str,
        caches: Sequence[Kept] = (),
        reads_later: Callable[[], bool] = lambda: True,
    ) -> None:
        self._objects = objects
        self._text = text
        self._caches = caches
        self._reads_later = reads_later
        self._count = 0
        self._began_s, self._spent_s = clock.monotonic(), 0.0
        self._looks = False
        self._before: Fingerprint | None = None

    def handed_out(self) -> None:
        """Note that a step begins."""
        self._count += 1
        began_s = clock.monotonic()
        cheap = self._spent_s <= _SHARE * (began_s - self._began_s)
        self._looks = cheap or not self._count & (self._count - 1)
        self._looks &= self._reads_later()
        if self._looks and self._text:
            self._before = self._look()
            self._spent_s += clock.monotonic() - began_s

    def asked(self) -> None:
        """Warn, once, if the step that has ended changed what is read."""
        if not self._looks:
            return
        began_s = clock.monotonic()
        for cache in self._caches:
            cache.notice_change(_WITHIN_S)
        if self._before is not None and self._look() not in (None, self._before):
            warnings.warn(self._text.format(self._count), FastDataWarning, stacklevel=3)
            self._text = ""
        self._looks, self._before = False, None
        self._spent_s += clock.monotonic() - began_s

    def _look(self) -> Fingerprint | None:
        # What a step draws from a pipeline changes no sample, each of which has its own key.
        drawn = lasting(find_composes(self._objects))
        how = {"roughly": True, "with_globals": False}
        return fingerprint(*self._objects, within_s=_WITHIN_S, instead=drawn, **how)
