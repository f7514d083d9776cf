"""A run with `policy.observe` says what it would have done to its shape, and does not.

The elastic policy decides as always. What somebody has asked for is done: an operator, or a notice
of the run file. A node that is taken away cannot be stayed on; the run leaves it as a job without
liver would: its state goes to disk, and it begins again from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from liver_hpc.clock import Clock
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.events import WorldRef
from liver_hpc.run.actions import Action, Note, Record
from liver_hpc.run.decide import Begin, Estimates, ToDisk
from liver_hpc.run.nodes import HeldNodes
from liver_hpc.run.notices import NoticeBook
from liver_hpc.run.records import ObservationRecord
from liver_hpc.run.requests import GROWTH, IN_PLACE, OPERATOR, RequestQueue

WOULD_HAVE = "would have"
"""What every note of it begins with."""


class Observer:
    """What the elastic policy has decided and the run has not done. count: how often; last: the
    newest, in words."""

    def __init__(
        self,
        config: RunConfig,
        clock: Clock,
        parts: tuple[RequestQueue, HeldNodes, Estimates, NoticeBook],
        out: Callable[[Action], None],
    ) -> None:
        self.count = 0
        self.last = ""
        self._observes = config.policy.observe
        self._asks_for_burst = config.cluster.slurm.burst is not None
        self._clock = clock
        self._queue, self._nodes, self._estimates, self._notices = parts
        self._out = out
        self._would_want = 0

    def only_watches(self, decision: Begin) -> bool:
        """Whether a handoff is the policy's own idea. Growing is not once somebody has asked for so
        many workers, nor is leaving a node that an operator drains."""
        if not self._observes or decision.request.asked_for:
            return False
        if decision.request.origin in (GROWTH, IN_PLACE):
            return self._queue.asked is None
        warnings = [self._nodes[name].warning for name in decision.nodes]
        return {each.reason for each in warnings if each is not None} != {OPERATOR}

    def instead_of(self, decision: Begin, world: WorldRef, step: int) -> ToDisk | None:
        """Tells of a handoff that does not begin, after `step` steps; it is decided anew once
        something has changed. Returns what the run does: nothing, or where a node will be taken its
        state goes to disk."""
        request, handoffs = decision.request, self._estimates.handoffs
        source, target = world.rank_map, decision.target
        to_boot = max(0, request.joiners(source) - len(self._nodes.kept()))
        price = handoffs.price(source, target, to_boot)
        stays = request.deadline_s is None
        row = ObservationRecord(
            at_s=self._clock.now_s(),
            step=step,
            notice=request.origin,
            source=str(source.layout),
            target=str(target.layout),
            nodes=",".join(decision.nodes),
            ready_s=price.ready_s,
            cost_s=price.cost_s,
            instead="stays as it is" if stays else "to disk",
        )
        self._tell(row, f"begun {request}, from {source.layout}")
        if not decision.nodes:
            self._nodes.grow_at_s = math.inf
        elif stays:
            self._nodes.stuck = self._nodes.situation(world)
        action = f"{WOULD_HAVE} gone live to {target.layout}; {row.instead}"
        self._notices.decided(decision.nodes, action, -1)
        if stays:
            return None
        reason = f"{request.origin}; to disk, as policy.observe is set"
        return ToDisk(decision.nodes, reason, action, handoffs.checkpoint_s(source))

    def drain(self, node: str, reason: str, world: WorldRef, best: Layout, step: int) -> None:
        """Tells of a node that the policy would have drained, for the layout `best`."""
        notice, source = f"leaving {node}: {reason}", str(world.rank_map.layout)
        known = notice, source, str(best), node, math.nan, math.nan, "stays as it is"
        row = ObservationRecord(self._clock.now_s(), step, *known)
        self._tell(row, f"drained node {node}: {reason}")

    def burst_wanted(self, world: WorldRef, step: int) -> None:
        """Tells of burst nodes that are not asked for, whenever that is for another number than was
        told last."""
        if not (self._observes and self._asks_for_burst):
            return
        policy, queue = self._estimates.policy, self._queue
        best, bound = policy.best(queue.ceiling), policy.best(queue.bound)
        has = max(0 if bound is None else bound.workers, self._nodes.steady_slots(with_burst=True))
        wanted = 0 if best is None else max(0, best.workers - has)
        if wanted and wanted != self._would_want:
            self._would_want = wanted
            source, now_s = str(world.rank_map.layout), self._clock.now_s()
            known = "burst nodes", source, str(best), "", math.nan, math.nan, "asks for none"
            row = ObservationRecord(now_s, step, *known)
            self._tell(row, f"asked for burst nodes, for {wanted} more workers")

    def _tell(self, row: ObservationRecord, what: str) -> None:
        self.count += 1
        self.last = f"{WOULD_HAVE} {what}; {row.instead}"
        self._out(Record(row))
        self._out(Note(self.last))
