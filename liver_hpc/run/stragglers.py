"""Nodes that were found to straggle (`pace.py`), and what is done about them."""

from __future__ import annotations

from liver_hpc.clock import Clock
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import RequestRefused
from liver_hpc.protocol.events import WorldRef
from liver_hpc.run.actions import Action, Note, Record
from liver_hpc.run.elastic import ElasticPolicy
from liver_hpc.run.events import NodeKeepsUp, NodeStraggles
from liver_hpc.run.records import StragglerRecord
from liver_hpc.run.requests import STRAGGLING

NAMED = " straggles: "
"""What the note of one has behind its name."""
NAMED_ALONE, DRAINED = "named alone", "drained"


class Stragglers:
    """Names a node once, and drains it where the policy says so, as an operator would.

    named: the nodes that straggle, as far as is known. They are in no `Memory`: another start finds
    them anew, and does not use those that were drained.
    """

    def __init__(
        self, config: RunConfig, clock: Clock, elastic: ElasticPolicy, out: list[Action]
    ) -> None:
        self.named: set[str] = set()
        section = config.policy.stragglers
        self._drains = section is not None and section.drain
        self._observes = config.policy.observe
        self._clock = clock
        self._elastic = elastic
        self._out = out

    def straggles(self, found: NodeStraggles, world: WorldRef, step: int) -> None:
        """A node of the world that trains, after `step` steps."""
        node = found.node
        self.named.add(node)
        self._out.append(
            Note(
                f"node {node}{NAMED}forward passes of its worker {found.worker} take "
                f"{found.ratio:.1f} times as long as the others' for {found.for_s:.0f} s"
            )
        )
        self._out.append(
            Record(
                StragglerRecord(
                    at_s=self._clock.now_s(),
                    step=step,
                    generation=world.generation,
                    node=node,
                    worker=found.worker,
                    ratio=found.ratio,
                    for_s=found.for_s,
                    compared=found.compared,
                    action=self._act(found, world, step),
                )
            )
        )

    def _act(self, found: NodeStraggles, world: WorldRef, step: int) -> str:
        """What is done, in words."""
        if not self._drains:
            return NAMED_ALONE
        node, layout = found.node, world.rank_map.layout
        best = self._elastic.best_without(node, world)
        if best is not None and best.workers < layout.workers:
            slowdown = self._elastic.estimates.policy.slowdown(layout, best)
            if slowdown >= found.ratio:
                why = f"without it steps in {best} would take {slowdown:.1f} times as long"
                self._out.append(Note(f"node {node} is not drained: {why}"))
                return f"not drained: {why}"
        if self._observes and best is not None:
            self._elastic.observer.drain(node, STRAGGLING, world, best, step)
            return "would have drained it"
        try:
            self._elastic.drain(node, None, world, STRAGGLING)
        except RequestRefused as error:
            self._out.append(Note(f"node {node} is not drained: {error}"))
            return f"not drained: {error}"
        self._elastic.estimates.policy.forget(layout)  # its steps so far were of that node
        return DRAINED

    def keeps_up(self, found: NodeKeepsUp) -> None:
        """Of one that was named."""
        if found.node in self.named:
            self.named.discard(found.node)
            text = f"node {found.node} straggles no longer: it has kept up for {found.for_s:.0f} s"
            self._out.append(Note(text))
