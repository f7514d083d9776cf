"""What may befall a run, drawn: nodes, operators, signals, deaths, faults, and time."""

from __future__ import annotations

from collections.abc import Callable

from liver_hpc.protocol import messages as m
from liver_hpc.run import events as e
from liver_hpc.run.events import EndNear, NodeGranted, NodeWarned, PoolNote
from liver_hpc.run.lifecycle import RunState
from tests.unit.run.outside import KILLED
from tests.unit.run.play import FAULTS, REASONS, WAITS_S, WINDOWS_S, Play
from tests.unit.run.remembered import remembered

Blow = Callable[[Play], None]


def members(play: Play) -> set[int]:
    """Whose death is the end of this start: spared as a rule, or little else would be played. With
    snapshots it is not."""
    world = play.run.handoffs.committed_world or play.run.world
    recovers = play.scene.config.snapshots.every_steps is not None
    often = 2 if recovers else 8
    spared = world is not None and not play.choices.now_and_then(often)
    return {*world.rank_map.workers} if world is not None and spared else set()


def go_on(play: Play) -> None:
    if not play.go_on():
        play.train()


def a_few_things(play: Play) -> None:
    for _ in range(4):
        go_on(play)


def train(play: Play) -> None:
    play.train()


def wait(play: Play) -> None:
    play.wait(play.choices.one_of(WAITS_S))


def tick(play: Play) -> None:
    play.wait(0.0)


def grant(play: Play) -> None:
    """A node comes, or comes again: a warning is lifted."""
    node = play.choices.one_of([*play.scene.more, *play.scene.first])
    known = play.nodes.get(node.name)
    if known is None or not known.returning:
        play.grant(node)


def warn(play: Play) -> None:
    nodes = [node for node in play.nodes.values() if not node.returning]
    if nodes:
        node, window_s = play.choices.one_of(nodes), play.choices.one_of(WINDOWS_S)
        node.deadline_s = None if window_s is None else play.now_s + window_s
        reason = play.choices.one_of(REASONS)
        play.tell(NodeWarned(node.node.name, reason, play.now_s, node.deadline_s))


def withdraw(play: Play) -> None:
    used = {play.run.agents.node_of(worker) for worker in members(play)}
    nodes = [name for name in play.nodes if name not in used]
    if nodes:
        play.withdraw(play.choices.one_of(nodes), "it is down")


def resize(play: Play) -> None:
    play.ask(play.choices.one_of(play.scene.asks))


def replace(play: Play) -> None:
    world = play.run.world
    workers = (*world.rank_map.workers, 99) if world is not None else (0, 99)
    play.ask(m.ReplaceRequest(replace=play.choices.one_of(workers)))


def drain(play: Play) -> None:
    names = [node.name for node in (*play.scene.first, *play.scene.more)]
    within_s = play.choices.one_of((None, 1.0, 30.0))
    play.ask(m.DrainRequest(node=play.choices.one_of([*names, "n9"]), within_s=within_s))


def undo_drain(play: Play) -> None:
    names = [*play.run.elastic.drained, "n9"]
    play.ask(m.DrainRequest(node=play.choices.one_of(names), undo=True))


def straggles(play: Play) -> None:
    """The shell tells of a node of a world that can be compared; of one at a time."""
    world, agents = play.run.comparable_world, play.run.agents
    nodes = sorted({agents.node_of(worker) for worker in world.rank_map.workers} if world else ())
    if world is None or len(nodes) < 2:
        return
    node = play.choices.one_of(nodes)
    if node in play.run.stragglers.named:
        play.feed(e.NodeKeepsUp(node, 60.0))
    else:
        worker = agents.workers_on({node}, world.rank_map.workers)[0]
        play.feed(e.NodeStraggles(node, 1.8, 60.0, worker, len(nodes)))


def stop(play: Play) -> None:
    play.ask(m.StopRequest(checkpoint=play.choices.now_and_then(2)))


def end_near(play: Play) -> None:
    play.feed(EndNear("time limit", play.now_s, play.now_s + 60.0))


def stop_signalled(play: Play) -> None:
    play.feed(e.StopSignalled("SIGTERM"))


def worker_dies(play: Play) -> None:
    spared = members(play)
    living = [w for w in play.workers.values() if not w.dead and w.worker not in spared]
    if living:
        play.close(play.choices.one_of(living), "signal 9")


def step_breaks(play: Play) -> None:
    """Some of a world notice first that one of theirs is gone."""
    world = play.run.world
    if world is None or play.scene.config.snapshots.every_steps is None:
        return
    mates = [
        w for w in play.workers.values() if w.world == world.rank_map and w.doing == "training"
    ]
    living = [worker for worker in mates if not worker.dead and not worker.mute]
    if len(living) < len(mates) and living:
        generation = world.generation
        mate = play.choices.one_of(living).worker
        play.say(mate, m.Broken(worker=mate, generation=generation, reason="a peer is gone"))


def worker_is_silent(play: Play) -> None:
    """Its machine has vanished, as far as the shell can tell."""
    others = play.registered - members(play)
    here = sorted(worker for worker in others if play.run.agents.agent_of(worker))
    if here:
        play.feed(e.WorkerGone(play.choices.one_of(here), "silent for 30 s"))


def agent_dies(play: Play) -> None:
    spared = members(play)
    living = [
        agent
        for agent in play.agents.values()
        if not agent.ended and not {worker.worker for worker in agent.workers} & spared
    ]
    if living:
        play.end_agent(play.choices.one_of(living), play.choices.one_of((87, 143, KILLED, 0)))


def fault(play: Play) -> None:
    play.faults.planned.append(play.choices.one_of(FAULTS))


def launches_fail(play: Play) -> None:
    play.launches_fail = True


def journal(play: Play) -> None:
    if play.journal_error:
        play.journal_recovers()
    else:
        play.journal_error = "the disk is full"
        play.feed(e.JournalFailed(play.journal_error))


def checkpoint(play: Play) -> None:
    """One of those that the run file asks for."""
    step = play.run.recorder.steps_done
    if play.run.world is not None and play.run.state is not RunState.ENDED:
        play.feed(e.CheckpointWritten(step, f"/checkpoints/step-{step}", 100, 0.5, 200))


def stranger(play: Play) -> None:
    """Somebody meets whom nobody expects, or again."""
    known = [agent for agent in play.agents.values() if agent.workers or agent.ended]
    name = play.choices.one_of(["x", *(agent.name for agent in known)])
    play.feed(e.AgentMet(name, 1))


def rendezvous_fails(play: Play) -> None:
    if play.run.awaits_joiners:
        play.feed(e.RendezvousFailed("the rendezvous has ended"))


def shell_fails(play: Play) -> None:
    if play.choices.now_and_then(4):
        play.feed(e.ShellFailed("worker 0 sent what it may not"))


def rogue(play: Play) -> None:
    """A worker says what nobody has asked it for."""
    attempt = play.run.handoffs.attempt
    here = sorted(play.registered)
    if attempt is not None and here and play.choices.now_and_then(4):
        worker, generation = play.choices.one_of(here), attempt.generation
        play.rogue = True
        play.feed(m.FirstStep(worker=worker, generation=generation, started_s=1.0, ended_s=2.0))


def look(play: Play) -> None:
    """Whoever asks how it stands changes nothing."""
    before = remembered(play.run)
    run = play.run
    run.snapshot(play.now_s, "", "")
    assert run.identity()
    assert run.memory == run.memory
    assert run.expects(99) is False
    assert run.world_of(99) is None
    assert remembered(run) == before
    if run.state is RunState.HANDING_OVER:
        generation = run.handoffs.generation
        run.handoffs.progress(m.Progress(worker=0, generation=generation, bytes_done=1))


def pool_note(play: Play) -> None:
    play.feed(PoolNote("the Slurm controller is away"))


def lift(play: Play) -> None:
    """The pool takes a warning back."""
    for name, node in play.nodes.items():
        if node.deadline_s is not None and not node.returning:
            node.deadline_s = None
            play.tell(NodeGranted(play.nodes[name].node))
            return


_WEIGHTS: tuple[tuple[int, Blow], ...] = (
    (52, a_few_things),
    (58, go_on),
    (24, train),
    (12, wait),
    (6, tick),
    (11, grant),
    (13, warn),
    (6, withdraw),
    (15, resize),
    (5, replace),
    (6, drain),
    (4, undo_drain),
    (4, straggles),
    (1, stop),
    (1, end_near),
    (1, stop_signalled),
    (4, worker_dies),
    (4, step_breaks),
    (1, worker_is_silent),
    (3, agent_dies),
    (6, fault),
    (2, launches_fail),
    (3, journal),
    (4, checkpoint),
    (2, stranger),
    (1, rendezvous_fails),
    (1, shell_fails),
    (1, rogue),
    (1, look),
    (1, pool_note),
    (3, lift),
)
BLOWS: tuple[Blow, ...] = tuple(blow for weight, blow in _WEIGHTS for _ in range(weight))
assert len(BLOWS) == 256


def storm(play: Play) -> None:
    """Whatever comes, until nothing is left to draw from, over some starts of the run."""
    while not play.choices.used_up:
        play.choices.one_of(BLOWS)(play)
        if play.run.state is RunState.ENDED:
            play.choices.one_of(BLOWS)(play)
            play.choices.one_of(BLOWS)(play)
            if not play.may_begin_again:
                return
            play.begin_again()
