"""Brings the pure watch over stragglers what workers tell of their forward passes, which comes with
their signs of life: there are no messages for it."""

from __future__ import annotations

import logging

from liver_hpc.clock import Clock
from liver_hpc.config.schema import RunConfig, StragglersSection
from liver_hpc.protocol import messages as m
from liver_hpc.run.events import NodeKeepsUp, NodeStraggles
from liver_hpc.run.machine import Run
from liver_hpc.run.pace import StragglerWatch

log = logging.getLogger(__name__)


class Stragglers:
    """Used by the event loop alone."""

    def __init__(self, config: RunConfig, clock: Clock, core: Run) -> None:
        section = config.policy.stragglers
        self._clock = clock
        self._core = core
        self._watch = StragglerWatch(section, core.agents.node_of)
        self._is_asked_for = section not in (None, StragglersSection())
        self._told_alone = False

    def beat(self, beat: m.Heartbeat) -> None:
        """A worker's sign of life."""
        if beat.forward is not None:
            self._watch.heard(beat.worker, beat.forward)

    def look(self) -> list[NodeStraggles | NodeKeepsUp]:
        """What the core is to hear. That nodes cannot be compared is logged once, where the run
        file asks for something else than the default."""
        core = self._core
        world, named = core.comparable_world, core.stragglers.named
        found = self._watch.look(world, named, core.recorder.steps_done, self._clock.now_s())
        if self._watch.compared == 0 and self._is_asked_for and not self._told_alone:
            self._told_alone = True
            log.info("policy.stragglers: no nodes can be compared, none is named")
        return found
