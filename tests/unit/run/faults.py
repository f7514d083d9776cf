"""The fault matrix over the run's core: a played run is brought into a phase, and struck there."""

from __future__ import annotations

from collections.abc import Callable

from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.run import events as e
from liver_hpc.run.lifecycle import RunState
from tests.fakes import Fault
from tests.unit.run.outside import KILLED
from tests.unit.run.play import Play
from tests.unit.run.scenes import DEADLINES

HEARTBEAT_S, STANDS_STILL_S = DEADLINES["heartbeat_s"], 5.0
MOST_TURNS = 300

IDLE, HALTING, REFILLING, STOPPING = "idle", "HALTING", "REFILLING", "STOPPING"
HANDOFF = tuple(str(phase) for phase in Phase if phase is not Phase.IDLE)
PHASES = (IDLE, *HANDOFF, HALTING, REFILLING, STOPPING)
ASKS = (
    m.ResizeRequest(workers=4),
    m.ResizeRequest(layout="tp=2"),
    m.ResizeRequest(workers=1),
    m.ReplaceRequest(replace=1),
)


def phase_of(play: Play) -> str:
    """Where the run stands, as the matrix has it; empty once it has ended."""
    run = play.run
    recovery = run.recoveries._now
    if recovery is not None:
        return HALTING if recovery.target is None else REFILLING
    if run.handoffs.attempt is not None:
        return str(run.handoffs._machine.phase)
    return {RunState.TRAINING: IDLE, RunState.STOPPING: STOPPING}.get(run.state, "")


def turn(play: Play) -> None:
    """The next thing happens; a step where nothing is on its way, else time passes."""
    if not play.go_on():
        before = len(play.entries)
        play.train()
        if before == len(play.entries) and not [*play.tasks()]:
            play.wait(1.0)


def reach(play: Play, phase: str, words: int) -> bool:
    """Until the run is in a phase, and so many things more have happened in it, if there are; False
    where it does not come there."""
    draw = play.choices
    if phase in (HALTING, REFILLING):
        world = play.run.world
        assert world is not None
        play.close(play.workers[draw.one_of(world.rank_map.workers)], "signal 9")
    elif phase == STOPPING:
        play.ask(m.StopRequest(checkpoint=draw.now_and_then(2)))
    elif phase != IDLE:
        if phase == Phase.ABORT:
            where = draw.one_of((Phase.PREPARE, Phase.ARMED, Phase.TRANSFER))
            play.faults.planned.append((where, Fault.FAIL))
        if not play.ask(draw.one_of(ASKS)).ok:
            return False
    for _ in range(MOST_TURNS):
        if phase_of(play) == phase:
            break
        turn(play)
    for _ in range(words):
        if phase_of(play) == phase and phase != IDLE:
            before = len(play.entries)
            turn(play)
            if phase_of(play) != phase:
                return len(play.entries) > before  # right after it, which counts as well
    return phase_of(play) == phase


# ---- who


def victims(play: Play, role: str) -> list[int]:
    """Living workers of a role in what goes on; where nothing does, all that train stay."""
    run = play.run
    world = run.handoffs.committed_world or run.world
    source = {*world.rank_map.workers} if world is not None else set()
    target = source
    if (attempt := run.handoffs.attempt) is not None:
        source = {*attempt.source_workers}
        target = {*(attempt.target_workers or attempt.request.target.workers)}
    found = {
        "staying": source & target,
        "joining": target - source,
        "leaving": source - target,
        "spare": {*run.agents.kept},
    }[role]
    return sorted(w for w in found if w in play.workers and not play.workers[w].dead)


# ---- what


def dies(play: Play, worker: int) -> None:
    play.close(play.workers[worker], "signal 9")


def agent_dies(play: Play, worker: int) -> None:
    agent = next(each for each in play.agents.values() if play.workers[worker] in each.workers)
    play.end_agent(agent, KILLED)


def node_vanishes(play: Play, worker: int) -> None:
    """Its pool finds out. A run on one node has no other one."""
    name = play.run.agents.node_of(worker)
    if name in play.nodes:
        play.withdraw(name, "it is down")


def freeze(play: Play, workers: list[int]) -> None:
    for worker in workers:
        play.frozen.add(worker)
        play.workers[worker].mute = True


def thaw(play: Play) -> None:
    for worker in play.frozen:
        play.workers[worker].mute = False
    play.frozen.clear()


def stands_still(play: Play, worker: int) -> None:
    """For less than detection takes, and goes on."""
    freeze(play, [worker])
    for _ in range(play.choices.below(20)):
        turn(play)
    thaw(play)


def stands_still_for_ever(play: Play, worker: int) -> None:
    """It is silent for too long; what it says when it wakes, nobody hears."""
    freeze(play, [worker])
    for _ in range(play.choices.below(20)):
        turn(play)
    lost(play, [worker])
    for _ in range(play.choices.below(20)):
        turn(play)
    thaw(play)


def agent_stands_still(play: Play, worker: int) -> None:
    """With it all its workers are silent."""
    agent = next(each for each in play.agents.values() if play.workers[worker] in each.workers)
    mates = [mate.worker for mate in agent.workers if not mate.dead]
    freeze(play, mates)
    for _ in range(play.choices.below(20)):
        turn(play)
    lost(play, mates)
    thaw(play)


def lost(play: Play, workers: list[int]) -> None:
    """Silent for too long, as the shell sees it."""
    play.now_s += HEARTBEAT_S
    for worker in workers:
        if play.run.agents.agent_of(worker):
            play.feed(e.WorkerGone(worker, f"silent for {HEARTBEAT_S:g} s"))


def link_breaks(play: Play, worker: int) -> None:
    """Between the workers of the world that trains: all live, and none can do a step with others.
    Without snapshots that ends them."""
    world = play.run.handoffs.committed_world or play.run.world
    assert world is not None
    for mate in (play.workers[each] for each in world.rank_map.workers):
        if mate.dead or mate.world_generation != world.generation:
            continue
        if play.scene.config.snapshots.every_steps is None:
            play.close(mate, "exit code 1")
        elif mate.doing in ("training", "crossing", "going back"):
            mate.doing = "broken"
            reason = "TransferError: a peer is gone"
            told = m.Broken(worker=mate.worker, generation=world.generation, reason=reason)
            play.say(mate.worker, told)


def fails(play: Play, worker: int) -> None:
    """What it was told to do in a handoff it could not: memory, a disk, anything."""
    attempt = play.run.handoffs.attempt
    generation = attempt.generation if attempt is not None else -1
    if generation == play.workers[worker].generation and not play.run.recoveries._now:
        reason = "RuntimeError: can't allocate memory"
        play.say(worker, m.Failed(worker=worker, generation=generation, reason=reason))


def votes_no(play: Play, worker: int) -> None:
    play.faults.planned.append((Phase.TRANSFER, Fault.VOTE_NO))


def byte_flips(play: Play, worker: int) -> None:
    play.faults.planned.append((Phase.TRANSFER, Fault.WRONG_DIGEST))


def coordinator_dies(play: Play, worker: int) -> None:
    """Another one takes over; somebody may have died meanwhile."""
    play.now_s += play.choices.one_of((0.5, 5.0, 60.0))
    play.journal_error = ""  # until the next one's disk is full, too
    play.feed(e.TookOver(2, 7, "h"))
    for _ in range(play.choices.below(10)):
        turn_without_time(play)
    if play.choices.now_and_then(4):
        dies(play, worker)
    play.feed(e.Regained())


def turn_without_time(play: Play) -> None:
    if not play.go_on():
        play.train()


def coordinator_stands_still(play: Play, worker: int) -> None:
    """What came meanwhile is read first; then it looks at the time."""
    since_s = play.now_s
    play.now_s += STANDS_STILL_S
    play.feed(e.StoodStill(since_s))
    for _ in range(play.choices.below(10)):
        turn_without_time(play)
    play.feed(e.Tick())


def disk_is_full(play: Play, worker: int) -> None:
    """For the journal, and for whatever checkpoint is being written; and then it is not."""
    play.journal_error = "the disk is full"
    play.feed(e.JournalFailed(play.journal_error))
    for _ in range(play.choices.below(20)):
        turn(play)
    if play.journal_error:
        play.journal_recovers()


def launch_is_refused(play: Play, worker: int) -> None:
    play.launches_fail = True


def meeting_breaks_off(play: Play, worker: int) -> None:
    """The agent's joiner is gone, or the acceptor for good."""
    booting = [agent for agent in play.agents.values() if not agent.workers and not agent.ended]
    if booting and play.choices.now_and_then(2):
        play.end_agent(booting[0], 82)
    elif play.run.awaits_joiners:
        play.feed(e.RendezvousFailed("no acceptor opens any more"))


WORKERS = ("staying", "joining", "leaving", "spare")
Strike = Callable[[Play, int], None]
FAULTS: dict[str, Strike] = {
    "worker: killed": dies,
    "worker: stands still": stands_still,
    "worker: stands still for ever": stands_still_for_ever,
    "worker: fails": fails,
    "worker: votes no": votes_no,
    "worker: a byte flips": byte_flips,
    "agent: killed": agent_dies,
    "agent: stands still for ever": agent_stands_still,
    "node: vanishes": node_vanishes,
    "coordinator: killed": coordinator_dies,
    "coordinator: stands still": coordinator_stands_still,
    "link: down between workers": link_breaks,
    "disk: full": disk_is_full,
    "launch: refused": launch_is_refused,
    "meeting: breaks off": meeting_breaks_off,
}
"""By who it befalls, and what: to a worker of any role, or to its agent or node."""
