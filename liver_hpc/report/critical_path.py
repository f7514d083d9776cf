"""Where a handoff's lost time went: its critical path, from what each worker timed. Pure.

    boundary -> parameters there -> gradients computed -> voted -> verdict -> updated

In bounded memory a checkpoint comes first, and all state is there before gradients are computed.

Each point is that of the worker that came there last: forward and backward are collective, so the
last one to begin is who the others wait for inside of theirs. Points in time are of the workers'
own clocks, which have to agree between nodes as well as what is told apart here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from liver_hpc.report.worlds import first_known
from liver_hpc.run.records import CrossingRecord, ReconfigurationRecord


@dataclass(frozen=True)
class PathLines:
    """Where the time of a critical path went, in seconds.

    checkpoint_s: until the checkpoint of the boundary stood, in bounded memory; else 0. Of the
    worker whose parameters were there last: wire_s: waiting for their messages. pack_s:
    packing, unpacking and copying them. digest_s: their digests. other_s: what it did besides, the
    remainder. forward_backward_s: from then until the last first gradients. optimizer_s: from these
    to the last vote, for which the optimizer's state has to be there. votes_s: from that until the
    worker that ended last had the verdict. update_s: that one's first update.
    """

    checkpoint_s: float
    wire_s: float
    pack_s: float
    digest_s: float
    other_s: float
    forward_backward_s: float
    optimizer_s: float
    votes_s: float
    update_s: float

    @property
    def sum_s(self) -> float:
        """The lost time and one median step of the target."""
        return math.fsum(vars(self).values())


@dataclass(frozen=True)
class CriticalPath:
    """A handoff's way from the boundary to the end of the target's first step, at each point of the
    worker that came there last. In seconds; `lines` add up to the lost time and one median step.

    last_to_begin (the first forward), last_to_vote, last_to_end: ids of those workers. boundary_s:
    what came before, from the order to stop to the end of the source's last step; the source
    trains. slow_first_step_s: what forward, backward and update took beyond the target's median
    step. lines: `words.md` has them in words.
    """

    last_to_begin: int
    last_to_vote: int
    last_to_end: int
    boundary_s: float
    slow_first_step_s: float
    lines: PathLines


def critical_path(
    record: ReconfigurationRecord, crossings: Sequence[CrossingRecord], median_step_s: float
) -> CriticalPath | None:
    """Of a completed attempt whose workers said where their time went; None of any other.

    crossings: of all its workers. median_step_s: the target's, in seconds.
    """
    ended = [row for row in crossings if math.isfinite(row.ended_s)]
    zero_s, end_s = record.source_last_step_ended_s, record.first_step_ended_s
    if not ended or not math.isfinite(end_s - zero_s):
        return None
    beginner = max(ended, key=lambda row: row.started_s)
    voter = max(crossings, key=lambda row: row.voted_s)
    ender = max(ended, key=lambda row: row.ended_s)
    # What was done before the last worker stood at the boundary took no time of the pause.
    there_s = max(zero_s, beginner.started_s)
    computed_s = max(there_s, *(row.started_s + row.forward_backward_s for row in ended))
    voted_s = max(computed_s, voter.voted_s)
    verdict_s = max(voted_s, first_known(ender.ended_s - ender.update_s, voted_s))
    checkpoint_s, digest_s, pack_s, wire_s, other_s = _shared_out(
        there_s - zero_s, record.checkpointed_s - zero_s, *_moving_s(record, beginner)
    )
    lines = PathLines(
        checkpoint_s=checkpoint_s,
        wire_s=wire_s,
        pack_s=pack_s,
        digest_s=digest_s,
        other_s=other_s,
        forward_backward_s=computed_s - there_s,
        optimizer_s=voted_s - computed_s,
        votes_s=verdict_s - voted_s,
        update_s=end_s - verdict_s,
    )
    return CriticalPath(
        last_to_begin=beginner.worker,
        last_to_vote=voter.worker,
        last_to_end=ender.worker,
        boundary_s=zero_s - record.armed_s,
        slow_first_step_s=lines.forward_backward_s + lines.update_s - median_step_s,
        lines=lines,
    )


def _moving_s(record: ReconfigurationRecord, row: CrossingRecord) -> tuple[float, float, float]:
    """What one worker's digests, packing and wire took of what it needs for its first forward."""
    digest_s, pack_s = row.parameter_digest_s, row.parameter_pack_s
    wire_s = row.parameter_wire_s  # with what it waited before the boundary: it is shared out last
    if math.isfinite(record.checkpointed_s):
        digest_s += first_known(row.optimizer_digest_s, 0.0)
        pack_s += first_known(row.optimizer_pack_s, 0.0)
        wire_s += first_known(row.optimizer_wire_s, 0.0)
    return digest_s, pack_s, wire_s


def _shared_out(total_s: float, *told_s: float) -> list[float]:
    """`total_s` in shares as long as was told, in this order, and what is left of it."""
    shares: list[float] = []
    for each_s in told_s:
        shares.append(min(max(0.0, first_known(each_s, 0.0)), total_s))
        total_s -= shares[-1]
    return [*shares, total_s]
