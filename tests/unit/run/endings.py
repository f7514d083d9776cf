"""How a schedule is brought to its end, and what must be true of it then."""

from __future__ import annotations

from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol import messages as m
from liver_hpc.run import events as e
from liver_hpc.run.actions import Ending
from liver_hpc.run.codec import decode_event, memory_of
from liver_hpc.run.decide import MOST_LEAVES
from liver_hpc.run.elastic import MOST_PAUSE_DOUBLINGS
from liver_hpc.run.lifecycle import RunState
from tests.unit.run.choices import Choices
from tests.unit.run.outside import training_world
from tests.unit.run.play import Play
from tests.unit.run.replay import differences
from tests.unit.run.scenes import LONGEST_WAIT_S, POLICY, SCENES
from tests.unit.run.storm import storm

LONG_S = POLICY["retry_s"] * 2**MOST_PAUSE_DOUBLINGS + LONGEST_WAIT_S
"""The run has tried everything once more after so long."""


def comes_to_rest(play: Play) -> None:
    """After a storm the run has the layout that the nodes and the last word allow, or has ended."""
    play.calm(LONG_S)
    if play.run.state is RunState.ENDED or _waits_for_nodes(play):
        return
    _at_rest(play)
    _last_word(play)
    if play.run.state is RunState.ENDED:
        return
    play.ask(m.StopRequest(checkpoint=True))
    play.calm()
    ending = play.run.ending
    assert ending is not None, "told to stop, and goes on"
    assert ending.state in (Ending.STOPPED, Ending.FINISHED), ending


def _waits_for_nodes(play: Play) -> bool:
    """A start without nodes enough waits for burst nodes, for as long as nobody stops it."""
    run = play.run
    waits = run.state is RunState.STARTING and run._may_launch and not run._launched
    return waits and play.scene.config.cluster.slurm.burst is not None


def _at_rest(play: Play) -> None:
    run, elastic = play.run, play.run.elastic
    assert run.state is RunState.TRAINING, f"{run.state}: {run._story()}"
    assert not elastic.queue.waiting, f"still waits: {elastic.queue.waiting}"
    assert not run.agents.ending()
    assert run.world is not None
    assert training_world(play.workers) is not None, "nobody trains"
    assert len(run.agents.kept) <= run.config.workers.standby
    members = {*run.world.rank_map.workers, *run.agents.kept}
    for name, agent in play.watch.agents.items():
        idle = not agent.ended and not members & {*agent.workers}
        assert not idle, f"agent {name} is of no use, and still there"
    hurried = play.watch.hurried()
    used = {play.watch.node_of(worker) for worker in members}
    assert not used & {*hurried}, f"still on {hurried}"
    assert used <= {*play.watch.nodes}
    _is_as_large_as_it_can_be(play, used)


def _is_as_large_as_it_can_be(play: Play, used: set[str]) -> None:
    run, elastic = play.run, play.run.elastic
    assert run.world is not None
    usable = [node for node in elastic.nodes.usable() if not play.watch.to_be_left(node.name)]
    workers = len(run.world.rank_map.workers)
    if used & elastic.nodes.doomed():  # there is nowhere else to run
        stuck = elastic.nodes.stuck == elastic.nodes.situation(run.world)
        assert stuck or elastic.estimates.failed_leaves >= MOST_LEAVES
        return
    if any(node.slots is None for node in usable):
        return
    room = sum(node.slots or 0 for node in usable if node.automatic or node.name in used)
    counts = [
        count for count in play.scene.config.worker_counts if count <= play.scene.config.workers.max
    ]
    fit = [count for count in counts if count <= min(room, elastic.queue.ceiling)]
    free = elastic.nodes.free_slots() or 0  # a slot is free again once its whole agent has ended
    if fit and max(fit) > workers:
        assert max(fit) - workers > free, f"{workers} workers, and {max(fit)} would fit"


def _last_word(play: Play) -> None:
    """A resize for which there are nodes is what the run looks like in the end."""
    run = play.run
    assert run.world is not None
    free = run.elastic.nodes.free_slots()
    if run.elastic.nodes.agents.workers_on(run.elastic.nodes.doomed(), run.world.rank_map.workers):
        return
    present = run.world.rank_map.layout
    allowed = [
        layout
        for count in play.scene.config.worker_counts
        for layout in play.scene.config.allowed_layouts(count)
        if layout != present and count <= play.scene.config.workers.max
    ]
    fit = [each for each in allowed if free is None or each.workers - present.workers <= free]
    if not fit:
        return
    wanted: Layout = fit[len(play.entries) % len(fit)]
    answer = play.ask(m.ResizeRequest(layout=str(wanted)))
    assert answer.ok, answer.text
    play.calm(LONGEST_WAIT_S)
    if run.state is RunState.ENDED:
        assert run.ending is not None
        assert run.ending.state is Ending.FINISHED, run.ending
        return
    assert run.world is not None
    assert run.world.rank_map.layout == wanted, f"{wanted} was wanted; {run._story()}"


def forsaken(play: Play) -> None:
    """Nobody says anything any more: every wait comes to its end."""
    play.perform()
    since_s, where = play.now_s, ""
    for _ in range(12):
        run = play.run
        if run.state is RunState.ENDED or _waits_for_nodes(play):
            return
        here = f"{run.state} {run.handoffs.describe()}"
        if here != where:
            since_s, where = play.now_s, here
        trains = run.state is RunState.TRAINING
        # Longer where steps are.
        wait_s = max(LONGEST_WAIT_S, run.handoffs.limit_s, run.stops_within_s)
        assert trains or play.now_s - since_s <= 2 * wait_s, f"waits for ever: {where}"
        play.now_s += wait_s
        play.feed(e.Tick())


def replays(play: Play) -> None:
    """A reader of the journal comes to the same decisions, and to the same memory."""
    entries = play.journal()
    for entry, (_, event, _) in zip(entries, play.entries, strict=True):
        assert repr(decode_event(entry.event)) == repr(event)  # in which NaN equals NaN
    different = [*differences(entries, play.scene.new_run)]
    assert not different, different[0]
    memory, found = play.run.memory, memory_of(entries)
    assert found.drained in (memory.drained, ())
    told = {entry.event["generation"] for entry in entries if "generation" in entry.event}
    assert found.last_generation >= max(told, default=-1)


def schedule(data: bytes) -> Play:
    """Plays what the bytes say, from the start of a run to an end; raises where something is
    wrong."""
    choices = Choices(data)
    scene = choices.one_of(SCENES)
    ending = choices.one_of((comes_to_rest, forsaken, None))
    is_replayed, starts_in_peace = choices.now_and_then(4), not choices.now_and_then(4)
    play = Play(scene, choices)
    play.begin()
    if starts_in_peace:
        play.settle()
    storm(play)
    if ending is not None:
        ending(play)
    if is_replayed:
        replays(play)
    return play
