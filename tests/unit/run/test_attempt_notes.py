"""What the coordinator notes of each worker's part in a handoff."""

from __future__ import annotations

import math

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import Requested, StateSaved, WorkerLost, WorldRef
from liver_hpc.run.attempt_notes import AttemptNotes
from liver_hpc.run.records import TrafficRecord

TIMINGS_S = {
    "parameters/wire": 0.25,
    "parameters/pack": 0.5,
    "parameters/unpack": 0.125,
    "parameters/digest": 0.0625,
    "optimizer/wire": 1.0,
    "forward_backward": 0.375,
    "optimizer_after": 0.125,
}
SMALL = m.ScalarState(step=3, consumed_samples=0, optimizer_step=3, loss_scale=1.0, seed=1)


def noted() -> AttemptNotes:
    """Workers 0 and 1 train, 1 is replaced by 2, which joins late; 1 leaves."""
    source = WorldRef(0, RankMap(Layout(1, 1, 2), (0, 1)))
    target = RankMap(Layout(1, 1, 2), (0, 2))
    notes = AttemptNotes(Requested(1, source, target, "test"), 10.0, began_s=10.0)
    hello = m.Hello(worker=2, pid=1, host="h", booted_s=15.0, boot_timings_s={"a": 3, "b": 1})
    notes.observe(hello, 15.1)
    notes.target = target
    notes.entered_s[Phase.PREPARE] = 15.2
    return notes


def prepare(notes: AttemptNotes, worker: int, at_s: float) -> None:
    timings_s = {"build": 0.5, "connect": 0.75, "staging": 0.25}
    message = m.Prepared(
        worker=worker, generation=1, timings_s=timings_s, bytes_to={2: 30} if worker < 2 else {}
    )
    notes.observe(message, at_s)


def cross(notes: AttemptNotes) -> None:
    for worker in (0, 1):
        ended_s = 20.0 + worker / 10
        at = m.AtBoundary(worker=worker, generation=1, scalars=SMALL, last_step_ended_s=ended_s)
        notes.observe(at, 20.2)
    for worker in (0, 1, 2):
        vote = m.Vote(
            worker=worker,
            generation=1,
            ok=True,
            started_s=21.2 + worker / 10,
            timings_s=TIMINGS_S if worker < 2 else {},
        )
        notes.observe(vote, 22.0 + worker / 10)
    notes.entered_s[Phase.RELEASE] = 22.3
    for worker in (0, 2):
        first = m.FirstStep(
            worker=worker,
            generation=1,
            started_s=21.4,
            ended_s=22.5,
            timings_s={"verdict": 0.5, "update": 0.125},
        )
        notes.observe(first, 22.6)
    freed = m.Released(
        worker=0, generation=1, file_descriptors=1, resident_bytes=1, released_s=22.8
    )
    notes.observe(freed, 22.9)
    notes.observe(WorkerLost(1, "exit"), 23.0)


def spans(notes: AttemptNotes) -> dict[tuple[int, str], tuple[float, float]]:
    found = notes.worker_phases(lambda worker: f"n{worker}")
    assert {(each.worker, each.node) for each in found} <= {(0, "n0"), (1, "n1"), (2, "n2")}
    return {
        (each.worker, each.phase): (round(each.started_s, 6), round(each.ended_s, 6))
        for each in found
    }


def test_all_phases_of_a_handoff() -> None:
    notes = noted()
    for worker, at_s in ((0, 17.0), (1, 18.0), (2, 19.0)):
        prepare(notes, worker, at_s)
    cross(notes)
    found = spans(notes)
    assert [phase for worker, phase in found if worker == 2] == [
        "boot", "prepare", "connect", "transfer", "first step", "update", "release"
    ]  # fmt: skip
    assert found[2, "boot"] == (11.0, 15.0)
    assert found[0, "prepare"] == (15.2, 16.0)
    assert found[0, "connect"] == (16.0, 17.0)
    assert found[0, "transfer"] == (20.0, 21.2)
    assert found[2, "transfer"] == (20.1, 21.4)  # from when the last source worker stood there
    assert found[0, "first step"] == (21.2, 22.0)
    assert found[0, "update"] == (22.3, 22.5)
    assert found[0, "release"] == (22.5, 22.8)
    assert (1, "update") not in found
    assert found[1, "release"] == (22.3, 23.0)  # it ended without a word


def test_where_each_workers_time_of_crossing_went() -> None:
    notes = noted()
    assert notes.crossings() == []
    cross(notes)
    stayer, leaver, joiner = notes.crossings()
    assert (stayer.worker, leaver.worker, joiner.worker) == (0, 1, 2)
    assert (stayer.generation, stayer.started_s) == (1, 21.2)
    assert stayer.parameter_wire_s == 0.25
    assert stayer.parameter_pack_s == 0.5 + 0.125, "at both ends"
    assert stayer.parameter_digest_s == 0.0625
    assert stayer.optimizer_wire_s == 1.0
    assert math.isnan(stayer.optimizer_digest_s), "it was not told"
    assert stayer.voted_s == 21.2 + 0.375 + 0.125
    assert (stayer.verdict_s, stayer.update_s, stayer.ended_s) == (0.5, 0.125, 22.5)
    assert math.isnan(leaver.update_s)
    assert math.isnan(leaver.ended_s)
    assert math.isnan(joiner.parameter_wire_s)
    assert (joiner.voted_s, joiner.ended_s) == (21.4, 22.5)


def test_an_attempt_that_was_given_up_has_open_ends() -> None:
    notes = noted()
    prepare(notes, 0, 17.0)
    found = spans(notes)
    assert found[0, "connect"] == (16.0, 17.0)
    assert found[1, "prepare"][0] == 15.2
    assert math.isnan(found[1, "prepare"][1])
    assert (0, "transfer") not in found


def test_an_attempt_without_a_target_shows_who_has_booted() -> None:
    notes = noted()
    notes.target = None
    assert list(spans(notes)) == [(2, "boot")]


def test_traffic_is_what_the_workers_say_they_send() -> None:
    notes = noted()
    for worker in (2, 1, 0):
        prepare(notes, worker, 17.0)
    assert notes.traffic() == [TrafficRecord(1, 0, 2, 30), TrafficRecord(1, 1, 2, 30)]


def test_bytes_by_receiver_survive_the_wire() -> None:
    message = m.Prepared(worker=1, generation=1, bytes_to={0: 5, 12: 7})
    assert m.decode(m.encode(message)) == message


def test_bytes_between_nodes_are_counted_apart() -> None:
    """Workers 0 and 1 send 30 bytes each to worker 2, which is on the node of worker 1."""
    notes = noted()
    for worker in (0, 1, 2):
        prepare(notes, worker, 16.0)
    ended = Ended(1, "aborted", "test", notes.request.source)
    record = notes.record(ended, 30.0, 3, ["n0", "n1", "n1"].__getitem__)
    assert record.bytes_between_nodes == 30
    assert notes.record(ended, 30.0, 3, lambda worker: "").bytes_between_nodes == 0


def test_the_checkpoint_of_the_boundary_alone_is_recorded() -> None:
    notes = noted()
    notes.observe(StateSaved(2), 19.0)
    notes.observe(StateSaved(3, "the disk is full"), 20.5)
    cross(notes)
    ended = Ended(1, "completed", "", WorldRef(1, notes.request.target))
    assert math.isnan(notes.record(ended, 30.0, 3, str).checkpointed_s)
    notes.observe(StateSaved(3), 20.75)
    assert notes.record(ended, 30.0, 3, str).checkpointed_s == 20.75
