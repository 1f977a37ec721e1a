"""Every cause of a slow step that the evidence shows, with its remedy and what that would gain.

Pure: measured facts in, findings out: the severe ones first, then the moderate ones, then those
that ask for nothing, each in the order of this table. The first one is the one to act upon. Shares
are of the step unless said otherwise.

===== ========================================================== ==================================
code  holds when                                                 remedy
===== ========================================================== ==================================
FD301 waits above 3 %, but the device stalls for less            none: the waits are hidden
FD325 half of a stream's workers or fewer make 90 % of it        even shares
FD302 slow samples are 30 % of the wait                          in_order, further ahead, the files
FD303 reading blocked is the largest part of the wait            more workers, cache
FD304 as FD303, and all workers read no more than half of them   the lock, cache, local disk
FD305 reading on a CPU is the largest part                       more workers, cheaper transforms
FD306 waiting for CPUs above 20 %, or quota, by own work;        fewer workers, cheaper transforms
      or threads that hold the interpreter's lock in turn        processes
FD307 collation is the largest part                              own executor, batched reading
FD308 hand-over is 20 % of the wait, 1 ms, and 5 % of the step   own executor
FD309 workers busy above 95 %, no part stands out                more workers
FD310 starts of epochs above 5 % of the epoch, of two or more    persistent workers
FD311 page-locking is the largest part                           page_lock="register"
FD312 transfer above 5 %                                         pinned memory, uint8
FD313 augmentation on the device above 10 %                      fewer or cheaper transforms
FD314 device idle 10 % and 1 ms, though no batch was waited for  the host code between steps
FD315 waiting for CPUs above 20 %, but not for own work          the other load
FD316 one rank stalls 3 % more than the mean                     its data or host
FD317 allocator retries, memory never unused above 3 %           smaller batches
FD318 validation stalls above 3 % of its steps                   the validation loader's options
FD319 stall below 1 %                                            none: the model
FD320 callbacks above 5 % of the run                             the slowest callback
FD321 checkpoints above 5 % of the run                           fewer or smaller ones
FD322 logging above 5 % of the run                               log less often
FD323 the sampler is 20 % of the wait, 1 ms, and 5 % of the step a sampler that computes once
FD324 unpickling batches, as FD323                               few large tensors or arrays
===== ========================================================== ==================================

Where the wall time of the run is known, FD310 and FD318 are told by what they took of it, from 5 %
on. The pause that costs most, 10 % of the run or more and more than late batches do, comes first.
FD316 comes first where another rank stalls 3 % longer than this one. FD302 to FD309, FD311, FD315,
FD323 and FD324 are silent while the stall is under 3 %, and so is FD325, which takes the place of
FD302 to FD305 and of FD309: they take it that all workers work. FD302 to FD309, FD311 and FD323 to
FD325 are about one of several loaders, and FD310 is, too, where that begins anew within an epoch. A
code keeps its meaning for ever. These codes say why; those of
:mod:`~lightning_fastdata.insight.verdicts.verdict` say how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.verdicts import (
    late_batches,
    one_of_several,
    own_work,
    pauses,
    step_costs,
    uneven_workers,
)

if TYPE_CHECKING:
    from lightning_fastdata.insight.model.evidence import Evidence
    from lightning_fastdata.insight.model.finding import Finding

_ROWS: Final[tuple[Callable[[Evidence], Finding | None], ...]] = (
    step_costs.hidden,
    uneven_workers.uneven,
    late_batches.slow_samples,
    late_batches.latency,
    late_batches.bandwidth,
    late_batches.few_workers,
    late_batches.few_cpus,
    late_batches.collation,
    own_work.sampler,
    own_work.unpacking,
    own_work.handover,
    late_batches.capacity,
    pauses.epoch_starts,
    step_costs.epoch_starts,
    one_of_several.begins_anew,
    own_work.pinning,
    step_costs.transfer,
    step_costs.augmentation,
    step_costs.host_gap,
    late_batches.neighbours,
    step_costs.this_rank,
    step_costs.memory,
    pauses.validation,
    step_costs.validation,
    pauses.callbacks,
    pauses.checkpoints,
    pauses.logging,
    step_costs.free,
)
_OF_ONE_LOADER: Final = frozenset(
    module.__name__ for module in (late_batches, one_of_several, own_work, uneven_workers)
)
_SEVERITIES: Final = ("high", "moderate", "fine")
_CLEARLY: Final = 1.5
"""One gain is clearly larger than another if it is so many times as large."""


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Return everything that the evidence shows, by severity, then in the order of the table.

    Of two that are as severe, the one that gains clearly more goes first. Another rank that holds
    this one up comes before all of them: nothing done here would help.

    Args:
        evidence: Measured facts; what was not measured gives no findings.
    """
    found = by_weight(_found(evidence))
    found = uneven_workers.without_more_workers(found)
    worst = pauses.worst_pause(evidence)
    if worst is not None:
        found = (worst, *(each for each in found if each != worst))
    held_up = step_costs.other_rank(evidence)
    found = found if held_up is None else (held_up, *found)
    # A loader that was made by hand takes the same settings itself.
    return tuple(
        replace(each, remedy=each.remedy.replace("LoaderOptions(", f"{evidence.settings_in}("))
        for each in found
    )


def _found(evidence: Evidence) -> Iterator[Finding]:
    """Yield what each row finds; of several loaders, what is wrong with one is told of that one."""
    own = one_of_several.own_evidence(evidence)
    for row in _ROWS:
        if row.__module__ not in _OF_ONE_LOADER:
            found = row(evidence)
        elif (found := row(own)) is not None:
            found = one_of_several.told_of_loader(own, found)
        if found is not None:
            yield found


def by_weight(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by severity, then those first that gain clearly more, else in their order."""
    return tuple(
        sorted(found, key=lambda each: (_SEVERITIES.index(each.severity), -_steps_gained(each)))
    )


def _steps_gained(finding: Finding) -> int:
    # That others wait for this rank says nothing of why: its own causes do.
    gain = None if finding.code == "FD316" else finding.gain
    factor = 1.0 if gain is None else gain.factor
    return math.floor(math.log(factor, _CLEARLY)) if 1.0 < factor < math.inf else 0
