"""Checkpoints written beside training.

From a step boundary to the next update the state stands still: in that time a worker copies what is
its to write into host memory. A thread then writes the copy while training goes on. The coordinator
makes a checkpoint of the parts once all workers of the world have told it of theirs.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from liver_hpc.checkpoint.copied import HostCopy
from liver_hpc.checkpoint.parts import Save
from liver_hpc.clock import Deadline
from liver_hpc.errors import DeadlineError
from liver_hpc.protocol.messages import ClassDigest, Saved
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.host_memory import NewMemory, plain_memory
from liver_hpc.world.state import WorldState
from liver_hpc.world.world import World

log = logging.getLogger(__name__)

YIELDS_S = 5.0
"""How long a handoff, or a checkpoint that training waits for, waits for one that is being written;
then that one is given up."""
SHORTEST_S, LONGEST_S = 60.0, 3600.0
"""Between checkpoints whose interval is chosen here."""
_ENDS_S = 10.0
"""How long the copy of a world's state may take once nobody wants it."""
_LOOKS_S = 0.2
"""How often who waits for one looks whether it still has to."""
_LOST = "a worker was lost"


def interval_s(took_s: float, cost: float) -> float:
    """From the beginning of one checkpoint to that of the next, by how long one takes and the share
    of the time that writing may take."""
    return min(max(took_s / cost, SHORTEST_S), LONGEST_S)


class Saving:
    """A worker's checkpoints; used by its training thread. One at most is being written."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._writing: _Writing | None = None
        self._waited_for: Save | None = None
        self._kept = plain_memory(0)
        self._asked_by = -1
        self._asked_for: _Writing | None = None
        self._yields = Deadline.after(context.clock, 0.0, "the checkpoint")
        self._waited_in_vain = False
        self._began_s = -math.inf
        self._took_s = 0.0

    def start(self) -> None:
        """Training begins; whoever joins later has no reason to have a checkpoint wait."""
        self._began_s = self._context.clock.now_s()

    def wants(self) -> bool:
        """Where the run file leaves the interval to us, whether this worker would have a checkpoint
        at the boundary that comes: it is written where all would, so the slowest one decides."""
        options, writing = self._context.config.checkpoint, self._writing
        if options.every_steps != "auto" or (writing is not None and writing.is_alive()):
            return False
        if writing is not None and 0 < writing.took_s != self._took_s:
            self._took_s = writing.took_s
            chosen_s = interval_s(self._took_s, options.cost)
            log.info("checkpoints every %.3g s: one takes %.3g s", chosen_s, self._took_s)
        since_s = self._context.clock.now_s() - self._began_s
        return since_s >= interval_s(self._took_s, options.cost)

    def begin(self, world: World, step: int) -> None:
        """Begins to save the boundary after `step` steps, under the run's own directory.

        Waits for the one before. Where that takes too long, as on a disk that does not answer, this
        one is given up. Collective over the world where `train.overlap_param_gather` is set.
        """
        context = self._context
        world.settle()
        made = Save(context, world, step, context.checkpoints)
        if not self._ended(context.config.deadlines.collective_s / 2):
            context.send(made.give_up("the checkpoint before is still being written"))
            return
        self._began_s = context.clock.now_s()
        if self._writing is not None and self._writing.late:
            self._kept = plain_memory(0)
        self._writing = _Writing(context, made, world, self._memory)

    def _memory(self, num_bytes: int) -> torch.Tensor:
        """For a copy, of which there is one at a time. A GPU's is kept for the next one: to make it
        takes longer than to copy."""
        if self._kept.numel() < num_bytes:
            self._kept = plain_memory(0)  # it goes before the other one comes
            made = self._context.device.host_memory(num_bytes)
            if self._context.device.torch_device.type != "cuda":
                return made
            self._kept = made
        return self._kept[:num_bytes]

    def _ended(self, limit_s: float) -> bool:
        """Whether the last one has come to its end, waiting for that; but not again and again, nor
        once its world is to be let go."""
        writing = self._writing
        if writing is None:
            return True
        limit_s = 0.0 if self._waited_in_vain else limit_s
        deadline = Deadline.after(self._context.clock, limit_s, "the checkpoint before")
        while writing.is_alive() and not writing.in_vain and not deadline.expired():
            writing.join(min(_LOOKS_S, deadline.remaining_s()))
        ended = not writing.is_alive()
        self._waited_in_vain = not ended and not writing.in_vain
        return ended

    def taken(self) -> None:
        """Returns once the state may change again. Raises DeadlineError."""
        if self._writing is None:
            return
        limit_s = self._context.config.deadlines.collective_s
        what = "the state to be copied for a checkpoint"
        deadline = Deadline.after(self._context.clock, limit_s, what)
        if not self._writing.taken.wait(deadline.remaining_s()):
            raise deadline.error()

    def now(self, world: World, step: int, directory: Path, check: Callable[[], None]) -> None:
        """Saves a boundary while training waits, also for the next coordinator. check: raises where
        the world is to be let go; `interrupt` ends what is waited for after that."""
        world.settle()
        made = self._waited_for = Save(self._context, world, step, directory, waits=True)
        try:
            check()
            self._context.send(made.now(world))
        finally:
            self._waited_for = None

    def interrupt(self, generation: int) -> None:
        """Has training wait for nobody's part any more in worlds up to `generation`; from any
        thread, which may be late."""
        if (made := self._waited_for) is not None and made.generation <= generation:
            made.interrupt()
        if (writing := self._writing) is not None and writing.generation <= generation:
            writing.in_vain = True
            writing.give_up(_LOST)

    def lets_cross(self, generation: int) -> bool:
        """Whether the handoff to a generation, which is ready, may have the next boundary.

        While the checkpoint is being written that was when this was asked first, training goes on;
        one that has begun since is waited for: they may be due at every boundary.
        """
        writing = self._writing
        if self._asked_by != generation:
            self._asked_by, self._asked_for = generation, writing
            self._yields = Deadline.after(self._context.clock, YIELDS_S, "the checkpoint")
        if writing is None or writing.told:
            return True
        if writing is not self._asked_for:
            writing.join(YIELDS_S)
        elif not self._yields.expired():
            return False
        writing.give_up(f"a handoff has waited {YIELDS_S:g} s for it")
        return True

    def finish(self, limit_s: float) -> None:
        """Returns once the coordinator knows what has become of the one that is being written. It
        is given up where that takes too long."""
        if self._writing is not None and not self._ended(limit_s):
            self._writing.give_up(f"the run has waited {limit_s:g} s for it")

    def halt(self) -> None:
        """Gives up, as the world is let go; returns once nothing is read of that any more."""
        if self._writing is not None:
            self._writing.give_up(_LOST)
            self._writing.in_vain = False
            self._writing.taken.wait(_ENDS_S)


class _Writing(threading.Thread):
    """Writes one part of a checkpoint.

    taken: the state may change. told: the coordinator knows what has become of it. took_s: how long
    it took to be on the disk; 0 where it is not. late: the device may still copy into its memory.
    in_vain: nobody is to wait for its end.
    """

    def __init__(
        self, context: WorkerContext, made: Save, world: World, new_memory: NewMemory
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.generation = made.generation
        self.taken = threading.Event()
        self.told = False
        self.took_s = 0.0
        self.late = False
        self.in_vain = False
        self._context = context
        self._made = made
        self._state: WorldState | None = world.state.standing()
        self._copy = HostCopy(world.recipe.spec, world.rank_map.layout, world.at, new_memory)
        self._lane = context.device.new_lane()
        self._lane.follow()
        self._telling = threading.Lock()
        self.start()

    def run(self) -> None:
        try:
            self._context.device.enter()
            self._tell(self._made.done(self._take))
        finally:
            self.taken.set()
            if not self.late:
                self._copy.release()

    def _take(self) -> tuple[HostCopy, tuple[ClassDigest, ...]]:
        limit_s = self._context.config.deadlines.collective_s
        what = "the device to copy the state for a checkpoint"
        deadline = Deadline.after(self._context.clock, limit_s, what)
        state, self._state = self._state, None  # which is the world's memory, that others free
        assert state is not None
        try:
            with self._lane.entered():
                self._copy.take(state)
                digests = state.digests(state.model.kinds)
            self._lane.finish(deadline)
        except DeadlineError:
            self.late = True
            self._context.device.park(self._copy, self._lane)
            raise
        finally:
            self.taken.set()
        return self._copy, digests

    def give_up(self, reason: str) -> None:
        """What it still does comes to nothing, where the coordinator has not been told yet."""
        self._copy.given_up = self._copy.given_up or reason
        if not self.told:
            self._tell(self._made.give_up(f"given up: {reason}"))

    def _tell(self, saved: Saved) -> None:
        with self._telling:
            if not self.told:
                self._context.send(saved)
                self.took_s = saved.took_s
            self.told = True
