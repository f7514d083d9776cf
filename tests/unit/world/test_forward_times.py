"""What is timed of forward passes, on a CPU and on a device that is late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from liver_hpc.world import forward_times
from liver_hpc.world.forward_times import ForwardTimer, HostEvent, Total
from tests.late_device import LateDevice, Machines, Work

CHUNK, OTHER = object(), object()


def one_pass(timer: ForwardTimer, chunk: object = CHUNK, seconds: float = 0.0) -> None:
    begun = timer.begin(chunk)
    time.sleep(seconds)
    timer.end(begun)


def warm(timer: ForwardTimer) -> ForwardTimer:
    """After the first batch, which does not count."""
    timer.begin_batch(trains=True)
    one_pass(timer)
    return timer


def test_passes_add_up() -> None:
    timer = warm(ForwardTimer(False, HostEvent))
    assert timer.total == Total(0, 0.0)
    for passes in (1, 3):
        timer.begin_batch(trains=True)
        for _ in range(passes):
            one_pass(timer, seconds=0.01)
    timer.begin_batch(trains=True)
    assert timer.total.passes == 4
    assert 0.04 <= timer.total.seconds < 1.0


def test_a_rehearsal_and_an_evaluation_do_not_count_nor_are_they_the_first() -> None:
    timer = ForwardTimer(False, HostEvent)
    timer.begin_batch(trains=False)
    one_pass(timer)
    warm(timer)
    timer.begin_batch(trains=False)
    one_pass(timer)
    timer.begin_batch(trains=True)
    one_pass(timer)
    timer.begin_batch(trains=True)
    assert timer.total.passes == 1


def test_a_pass_that_waits_for_other_replicas_parameters_does_not_count() -> None:
    timer = warm(ForwardTimer(True, HostEvent))
    for _ in range(2):
        timer.begin_batch(trains=True)
        for chunk in (CHUNK, OTHER, CHUNK, OTHER, OTHER):
            one_pass(timer, chunk)
    timer.begin_batch(trains=True)
    assert timer.total.passes == 2 * 3


# ---- a late device


@dataclass
class LateEvent:
    """A CUDA event of a device that does things when somebody needs them, or looks: each takes it
    a second. waited: whether a host has waited."""

    device: LateDevice
    work: Work | None = None
    at_s: float = -1.0

    def record(self) -> None:
        self.work = self.device.launch("an event", self._pass)

    def _pass(self) -> None:
        self.at_s = float(next(self.device.seconds))  # type: ignore[attr-defined]

    def query(self) -> bool:
        assert self.work is not None
        return self.work.done

    def elapsed_time(self, end_event: LateEvent) -> float:
        assert self.query()
        assert end_event.query()
        return (end_event.at_s - self.at_s) * 1e3


@pytest.fixture
def device() -> Iterator[LateDevice]:
    machines = Machines()
    late = LateDevice(machines, 0)
    late.seconds = iter(range(10_000))  # type: ignore[attr-defined]
    yield late
    machines.stop()


def timer_on(device: LateDevice) -> tuple[ForwardTimer, list[LateEvent]]:
    made: list[LateEvent] = []

    def new_event() -> LateEvent:
        made.append(LateEvent(device))
        return made[-1]

    timer = ForwardTimer(False, new_event)
    warm(timer)
    return timer, made


def catch_up(device: LateDevice) -> None:
    """The device gets to what was launched last."""
    done = device.own_lane().mark()
    while not done():
        pass


def test_nobody_waits_for_the_device_and_what_it_has_done_is_read_in_a_later_step(
    device: LateDevice,
) -> None:
    timer, made = timer_on(device)
    timer.begin_batch(trains=True)
    for _ in range(3):
        one_pass(timer)
    timer.begin_batch(trains=True)
    assert timer.total == Total(0, 0.0), "the device has done nothing yet"
    assert not any(event.query() for event in made)
    catch_up(device)
    one_pass(timer)
    assert timer.total.passes == 0, "it is read between steps"
    timer.begin_batch(trains=True)
    assert timer.total == Total(3, 3.0)


def test_what_the_device_has_not_done_is_read_later_still_and_in_order(device: LateDevice) -> None:
    timer, _ = timer_on(device)
    timer.begin_batch(trains=True)
    one_pass(timer)
    catch_up(device)
    one_pass(timer)
    timer.begin_batch(trains=True)
    assert timer.total == Total(1, 1.0)
    catch_up(device)
    timer.begin_batch(trains=True)
    assert timer.total == Total(2, 2.0)


def test_events_are_used_again(device: LateDevice) -> None:
    timer, made = timer_on(device)
    for _ in range(20):
        timer.begin_batch(trains=True)
        one_pass(timer)
        one_pass(timer)
        catch_up(device)
    assert len(made) == 4


def test_a_device_that_never_gets_there_is_not_measured_any_more(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_times, "MOST_UNREAD", 5)
    timer, made = timer_on(device)
    for _ in range(9):
        timer.begin_batch(trains=True)
        one_pass(timer)
    assert len(made) == 2 * 5
    assert timer.total == Total(0, 0.0)
