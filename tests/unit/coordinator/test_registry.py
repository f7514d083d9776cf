"""The registry of workers: who is expected, who is refused, and how everybody goes."""

from __future__ import annotations

from typing import cast

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.coordinator.registry import WorkerRegistry
from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.messages import Exit, Hello, Stop, ToWorker
from liver_hpc.rendezvous.base import Identity
from liver_hpc.rendezvous.channel import Channel, ChannelClosed
from liver_hpc.run.node_events import Node
from liver_hpc.run.nodes import Capacity
from tests.fakes import tiny_run
from tests.memory_launcher import MemoryLauncher

DP2 = Layout(1, 1, 2)


class Line:
    """A channel's end that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.closed = False

    def send(self, message: ToWorker) -> None:
        if self.closed:
            raise ChannelClosed("closed")
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


class Scene:
    """A registry of two workers to an agent, limits of 10 s for an exit and 30 s for silence."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.launcher = MemoryLauncher()
        self.registry = WorkerRegistry(tiny_run(), self.launcher, self.clock)
        self.capacity = Capacity(workers_per_agent=2)
        self.capacity.grant(Node("", "machine"))

    def launch(self, generation: int, count: int) -> None:
        seats = self.capacity.seats(count, self.registry.taken())
        self.registry.launch(generation, DP2, seats)

    def meet(self, agent: str, workers: int = 2) -> tuple[int, ...]:
        return self.registry.meet(Identity(agent=agent, host="h", pid=1, workers=workers))

    def join(self, worker: int) -> Line:
        line = Line()
        hello = Hello(worker=worker, pid=1, host="h", booted_s=0.0)
        self.registry.join(cast(Channel, line), hello)
        return line


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_ids_are_given_in_the_order_of_the_meetings_and_never_again(scene: Scene) -> None:
    scene.launch(0, 4)
    assert scene.meet("a1") == (0, 1)
    assert scene.meet("a0") == (2, 3)
    scene.join(0)
    scene.registry.leave(0)
    scene.launch(1, 1)
    assert scene.meet("a2", workers=1) == (4,)


def test_missing_names_agents_first_and_then_workers(scene: Scene) -> None:
    scene.launch(0, 3)
    assert scene.registry.missing(0) == "agent a0 to meet, agent a1 to meet"
    scene.meet("a0")
    scene.join(1)
    assert scene.registry.missing(0) == "Hello of workers [0], agent a1 to meet"
    scene.join(0)
    scene.meet("a1", workers=1)
    scene.join(2)
    assert scene.registry.missing(0) == ""
    assert scene.registry.arrived(0) == (0, 1, 2)


def test_agents_that_are_not_expected_are_turned_away(scene: Scene) -> None:
    scene.launch(0, 2)
    with pytest.raises(MeetingError, match="agent a7 is not expected"):
        scene.meet("a7")
    with pytest.raises(MeetingError, match="wanted 2 workers, got 3"):
        scene.meet("a0", workers=3)
    scene.meet("a0")
    with pytest.raises(MeetingError, match="has met already"):
        scene.meet("a0")
    scene.launch(1, 2)
    scene.registry.dismiss(1)
    with pytest.raises(MeetingError, match="agent a1 is not expected"):
        scene.meet("a1")


def test_workers_that_are_not_expected_are_turned_away(scene: Scene) -> None:
    scene.launch(0, 2)
    scene.meet("a0")
    assert scene.join(5).closed
    scene.join(0)
    assert scene.join(0).closed


def test_a_launch_that_fails_leaves_nothing_to_wait_for(scene: Scene) -> None:
    scene.launcher.close()
    with pytest.raises(LiverError):
        scene.launch(1, 2)
    assert scene.registry.missing(1) == ""
    scene.registry.dismiss(1)
    assert scene.registry.reap() == []


def test_a_worker_that_was_told_to_exit_has_exit_s_for_it(scene: Scene) -> None:
    scene.launch(0, 2)
    scene.meet("a0")
    lines = [scene.join(0), scene.join(1)]
    scene.registry.send((0,), Exit(reason="test"))
    scene.clock.advance(9.0)
    assert scene.registry.reap() == []
    scene.clock.advance(1.0)
    assert scene.registry.reap() == [0]
    assert lines[0].closed
    assert scene.launcher.alive("a0"), "worker 1 is still there"

    scene.registry.send((1,), Exit(reason="test"))
    assert scene.registry.leave(1)
    assert scene.registry.reap() == []
    scene.clock.advance(10.0)
    scene.registry.reap()
    assert not scene.launcher.alive("a0")


def test_agents_of_an_aborted_handoff_go_at_once_unless_all_their_workers_came(
    scene: Scene,
) -> None:
    scene.launch(1, 4)
    scene.meet("a0")
    scene.join(0)
    scene.join(1)
    scene.registry.dismiss(1)
    scene.registry.reap()
    assert not scene.launcher.alive("a1")
    assert scene.launcher.alive("a0")
    scene.clock.advance(10.0)
    scene.registry.reap()
    assert not scene.launcher.alive("a0")


def test_silence_is_noticed_but_not_of_those_who_leave(scene: Scene) -> None:
    scene.launch(0, 2)
    scene.meet("a0")
    lines = [scene.join(0), scene.join(1)]
    scene.clock.advance(20.0)
    assert scene.registry.hear(cast(Channel, lines[0]), 0)
    assert not scene.registry.hear(cast(Channel, lines[0]), 1), "not worker 1's channel"
    scene.clock.advance(20.0)
    assert scene.registry.silent() == [1]
    scene.registry.send((1,), Exit(reason="test"))
    assert scene.registry.silent() == []


def test_sending_to_the_dead_is_no_error(scene: Scene) -> None:
    scene.launch(0, 2)
    scene.meet("a0")
    broken = scene.join(0)
    broken.closed = True
    scene.registry.send((0, 1, 9), Stop())
    assert broken.sent == []


def test_fallen_agents_are_named(scene: Scene) -> None:
    scene.launch(0, 4)
    scene.meet("a0")
    scene.join(0)
    scene.join(1)
    assert scene.registry.fallen(0) == ""
    scene.launcher.end("a0", 1)
    assert scene.registry.fallen(0) == "", "its workers had come; their connections tell"
    scene.launcher.end("a1", 1)
    wanted = "agent a1 ended with exit code 1 before its workers were ready; see logs/*-a1.log"
    assert scene.registry.fallen(0) == wanted
