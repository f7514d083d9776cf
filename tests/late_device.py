"""Devices that are late: a CUDA device's rules on the CPU, for workers that are threads of a test.

They are as late as a device may be: what is launched is done when a host waits for it, or for what
comes behind it, and not before; in which order, on which device next, is drawn from a seed. So
memory that nobody waited for is stale for sure, and two workers whose devices wait for each other
stay so until a deadline.

The rules are CUDA's and NCCL's: work in a lane runs in order; a collective has its communicator's
lane, begins after what the caller's lane holds, and ends when all members' have begun; `wait` on it
holds up the caller's lane, not its host; a communicator comes to be when all members use it, and
when it is aborted its work ends undone; messages that a thread starts together are a group, and
what it launches while one is open counts as done and never runs. With `queues=1`, as with
CUDA_DEVICE_MAX_CONNECTIONS=1, work of any lane of a device begins only after all that was launched
before it has begun. A thread has the first GPU until it enters its worker's (`Device.enter`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count, cycle
from random import Random
from typing import Any

import torch
from torch._C._distributed_c10d import ErrorType
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from liver_hpc.clock import Deadline
from liver_hpc.transport.lane import Lane
from liver_hpc.transport.streams import Streams
from liver_hpc.world.device import Device, Room
from liver_hpc.world.groups import Group
from liver_hpc.world.network import Network
from tests.nccl_groups import NcclGroups

INIT_S = 10.0
"""How long a communicator may take to come to be."""
END_S = 2.0
"""How long the threads of a test may take to end."""


@dataclass(eq=False)
class Work:
    """One thing that a device has to do. begin: tells the peers; ends: whether they let it end;
    end: its effect. together: the work of its communicator."""

    what: str
    after: Sequence[Work]
    begin: Callable[[], None] = lambda: None
    ends: Callable[[], bool] = lambda: True
    end: Callable[[], None] = lambda: None
    together: Sequence[Work] = ()
    begun: bool = False
    done: bool = False


@dataclass
class LateLane(Lane):
    """One lane. last: the work that was launched on it last; None when it has none."""

    device: LateDevice
    name: str = "a lane of its own"
    last: Work | None = None

    def __hash__(self) -> int:
        return id(self)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        before, self.device.here.lane = self.device.own_lane(), self
        try:
            with _Launching(self.device):
                yield
        finally:
            self.device.here.lane = before

    def follow(self) -> None:
        self.behind(self.device.own_lane().last)

    def behind(self, work: Work | None) -> None:
        """What is launched on this lane from now on begins after `work`, too."""
        if work is not None:
            self.device.launch("a wait", lane=self, after=[work])

    def mark(self) -> Callable[[], bool]:
        last = self.last

        def done() -> bool:
            if last is not None and not last.done:
                self.device.machines.step(last)
            return last is None or last.done

        return done

    def wait(self) -> None:
        """What `tensor.item()` does: the host stands still until the device is there."""
        done = self.mark()
        while not done():
            self.device.machines.over.wait(0.0005)


class _Launching(TorchDispatchMode):
    """Copies of a thread become work of its lane. What a host would read of them is computed at
    once, once the lane is there."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            to, source = args[:2]
            self._device.launch("a copy", lambda: to.copy_(source))
            return to
        if not _is_view(function) and any(isinstance(each, torch.Tensor) for each in args):
            self._device.own_lane().wait()
        return function(*args, **(kwargs or {}))


def _is_view(function: Any) -> bool:
    returned = function._schema.returns
    return bool(returned) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returned
    )


class Machines:
    """The devices of all workers of a test. stopped: names of what is not to be done at all."""

    def __init__(self, seed: int = 0, queues: int | None = None) -> None:
        self.stopped: set[str] = set()
        self.communicators: dict[str, _Communicator] = {}
        self.over = threading.Event()
        self._earlier_threads = set(threading.enumerate())
        self._queues = queues
        self._random = Random(seed)
        self._lock = threading.RLock()
        self._numbers = count()
        self._open: list[tuple[LateDevice, Work]] = []

    def new_name(self) -> str:
        return f"communicator {next(self._numbers)}"

    def stop(self) -> None:
        """Ends all waits; the test is over, and with it its threads, if they can."""
        self.over.set()
        end_s = time.monotonic() + END_S
        for thread in set(threading.enumerate()) - self._earlier_threads:
            with contextlib.suppress(RuntimeError):  # it is about to start
                thread.join(max(0.0, end_s - time.monotonic()))

    def add(self, device: LateDevice, lane: LateLane, work: Work) -> None:
        with self._lock:
            lane.last = work
            self._open.append((device, work))

    def step(self, goal: Work) -> None:
        """Does one thing that `goal` has to wait for, or itself, if one can be done."""
        if self.over.is_set():
            raise RuntimeError("the test is over")
        with self._lock, _disable_current_modes(), torch.no_grad():
            wanted = self._before(goal)
            able = [
                work
                for place, (_, work) in enumerate(self._open)
                if work in wanted and self._able(place, work)
            ]
            if not able:
                return
            work = self._random.choice(able)
            if not work.begun:
                work.begun = True
                work.begin()
            if work.ends():
                work.end()
                work.done = True
                self._open = [entry for entry in self._open if entry[1] is not work]

    def _before(self, goal: Work) -> set[Work]:
        """What has to be done for this, on all devices."""
        found: set[Work] = set()
        ahead = [goal]
        while ahead:
            work = ahead.pop()
            if work.done or work in found:
                continue
            found.add(work)
            ahead += [*work.after, *work.together]
            if self._queues is not None:
                ahead += [other for _, other in self._open]
        return found

    def _able(self, place: int, work: Work) -> bool:
        if work.what in self.stopped:
            return False
        if work.begun:
            return work.ends()
        if not all(before.done for before in work.after):
            return False
        device = self._open[place][0]
        return self._queues is None or all(
            before.begun for other, before in self._open[:place] if other is device
        )

    def give_up(self, works: Sequence[Work]) -> None:
        """Ends work undone."""
        with self._lock:
            for work in works:
                work.begun = work.done = True
            self._open = [entry for entry in self._open if not entry[1].done]

    def unfinished(self) -> list[str]:
        with self._lock:
            return [f"worker {device.worker}: {work.what}" for device, work in self._open]


class LateDevice(Device):
    """The device of one worker."""

    def __init__(self, machines: Machines, worker: int, room: Room | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.machines = machines
        self.worker = worker
        self.training = LateLane(self, "training's lane")
        self.here = threading.local()
        self.told_room = room
        self.dropped_workspaces = 0

    @property
    def backend_name(self) -> str:
        return "nccl"

    @property
    def late(self) -> bool:
        return True

    def enter(self) -> None:
        self.here.entered = True

    def has_work(self) -> bool:
        last = self.training.last
        return last is not None and not last.done

    def own_lane(self) -> LateLane:
        """That of the calling thread."""
        lane: LateLane = getattr(self.here, "lane", self.training)
        return lane

    def new_lane(self) -> Lane:
        return LateLane(self)

    def finish(self, deadline: Deadline) -> None:
        self.own_lane().finish(deadline)

    def room(self) -> Room | None:
        return self.told_room

    def drop_workspaces(self) -> None:
        self.dropped_workspaces += 1

    def return_free_memory(self) -> None:
        """There is none."""

    def launch(
        self,
        what: str,
        end: Callable[[], Any] = lambda: None,
        lane: LateLane | None = None,
        after: Sequence[Work | None] = (),
        **steps: Any,
    ) -> Work:
        """Puts work on a lane, the calling thread's own unless told."""
        thread = threading.current_thread()
        if thread is not threading.main_thread() and not hasattr(self.here, "entered"):
            raise RuntimeError(f"thread {thread.name!r} has the first GPU")
        lane = lane or self.own_lane()
        before = [work for work in (lane.last, *after) if work is not None]
        work = Work(what, before, end=end, **steps)
        self.machines.add(self, lane, work)
        return work


@dataclass
class _Handle:
    """c10d's: waiting holds up the caller's lane."""

    device: LateDevice
    work: Work

    def wait(self, _limit: timedelta | None = None) -> None:
        self.device.own_lane().behind(self.work)


@dataclass(eq=False)
class _Part:
    """One end of a message. bytes: what was sent, once both ends have begun."""

    memory: torch.Tensor
    bytes: torch.Tensor | None = None


@dataclass
class _Communicator:
    """What the members of one group share."""

    size: int
    works: list[Work] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)
    reductions: dict[int, dict[int, torch.Tensor]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    sent: dict[tuple[int, int], deque[_Part]] = field(default_factory=lambda: defaultdict(deque))
    received: dict[tuple[int, int], deque[_Part]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def match(self, pair: tuple[int, int]) -> None:
        while self.sent[pair] and self.received[pair]:
            sent, received = self.sent[pair].popleft(), self.received[pair].popleft()
            received.bytes = sent.bytes = sent.memory.clone()


class LateBackend:
    """One member of a communicator. aborted: its work has ended undone, and there is no more.
    refuses: NCCL starts none of its messages. pairs: the ranks that it has exchanged messages with,
    as NCCL connects each at the first."""

    error: Any = ErrorType.SUCCESS

    def __init__(self, device: LateDevice, name: str, rank: int, size: int) -> None:
        self.name = name
        self.aborted = False
        self._device = device
        self._rank = rank
        self._shared = device.machines.communicators.setdefault(name, _Communicator(size))
        self._lane = LateLane(device, f"lane of {name}")
        self.pairs: set[int] = set()
        self._reductions = 0
        self.works: list[Work] = []
        self._coalesced: list[tuple[bool, int, torch.Tensor]] | None = None
        self.refuses = False

    def allreduce(self, tensors: list[torch.Tensor]) -> _Handle:
        (tensor,), number, shared = tensors, self._reductions, self._shared
        if not self._reductions:
            self._groups.connect()
        self._reductions += 1

        def begin() -> None:
            begun = shared.reductions[number]
            begun[self._rank] = tensor.clone()
            if len(begun) == shared.size:
                shared.sums[number] = torch.stack([*begun.values()]).sum(0)

        return self._launch(
            f"{self.name}: all-reduce",
            lambda: tensor.copy_(shared.sums[number]),
            begin,
            lambda: number in shared.sums,
        )

    def send(self, memory: list[torch.Tensor], peer: int, _tag: int) -> None:
        self._coalesce(True, peer, memory[0])

    def recv(self, memory: list[torch.Tensor], peer: int, _tag: int) -> None:
        self._coalesce(False, peer, memory[0])

    def _coalesce(self, is_send: bool, peer: int, memory: torch.Tensor) -> None:
        assert self._coalesced is not None, "messages of two workers may pass each other"
        self._check_aborted()
        self._groups.message(self.refuses)
        self._coalesced.append((is_send, peer, memory))

    def _start_coalescing(self) -> None:
        self._coalesced = []
        self._groups.start()

    @property
    def _groups(self) -> NcclGroups:
        """The calling thread's."""
        here = self._device.here
        if not hasattr(here, "groups"):
            here.groups = NcclGroups()
        groups: NcclGroups = here.groups
        return groups

    def _end_coalescing(self) -> _Handle | None:
        messages, self._coalesced = self._coalesced, None
        self._groups.end(launches=not (messages and self.aborted))
        if not messages:
            return None
        shared, me = self._shared, self._rank
        self.pairs |= {peer for _, peer, _ in messages}
        parts = [
            (is_send, (me, peer) if is_send else (peer, me), _Part(memory))
            for is_send, peer, memory in messages
        ]

        def begin() -> None:
            for is_send, pair, part in parts:
                (shared.sent if is_send else shared.received)[pair].append(part)
                shared.match(pair)

        def end() -> None:
            for is_send, _, part in parts:
                if not is_send:
                    assert part.bytes is not None
                    part.memory.copy_(part.bytes)

        return self._launch(
            f"{self.name}: messages",
            end,
            begin,
            lambda: all(p.bytes is not None for *_, p in parts),
        )

    def _launch(
        self,
        what: str,
        end: Callable[[], Any],
        begin: Callable[[], None],
        ends: Callable[[], bool],
    ) -> _Handle:
        self.join()
        self._check_aborted()
        if self._groups.open:
            return _Handle(self._device, Work(what, (), begun=True, done=True))
        own = self._device.own_lane().last
        together = self._shared.works
        work = self._device.launch(
            what, end, self._lane, [own], begin=begin, ends=ends, together=together
        )
        self.works.append(work)
        together.append(work)
        return _Handle(self._device, work)

    def _check_aborted(self) -> None:
        if self.aborted:
            raise RuntimeError(f"{self.name}: NCCL communicator was aborted")

    def join(self) -> None:
        """Stands still on the host until all members have come."""
        shared = self._shared
        with shared.changed:
            shared.joined.add(self._rank)
            shared.changed.notify_all()
            if not shared.changed.wait_for(lambda: len(shared.joined) == shared.size, INIT_S):
                raise RuntimeError(f"{self.name}: NCCL timeout")

    def get_error(self) -> Any:
        return self.error

    def fail(self) -> None:
        """NCCL has an error, which torch's watchdog sees."""
        self.error = ErrorType.COMM_ERROR
        self.abort()

    def abort(self) -> None:
        self.aborted = True
        self._device.machines.give_up(self.works)


class LateNetwork(Network):
    """Opens late backends. opened: all of them."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__(device, "127.0.0.1")
        self._late = device
        self._streams = Streams(cycle(range(32)).__next__)
        self.opened: list[LateBackend] = []

    def _new_nccl(self, store: Any, rank: int, size: int, timeout: timedelta) -> LateBackend:
        if rank == 0:  # as it hands out NCCL's unique id
            store.set("name", self._late.machines.new_name())
        backend = LateBackend(self._late, store.get("name").decode(), rank, size)
        self.opened.append(backend)
        return backend


class LateGroup(Group):
    """A group of which c10d knows nothing: both its ends live in this process."""

    def __init__(self, name: str, members: tuple[int, ...], worker: int, device: Device) -> None:
        self.name = name
        self.members = members
        self.rank = members.index(worker)
        self.backend = None
        self.pairs = set()
        self.process_group = object()
        self._device = device

    def attach(self, backend: Any) -> None:
        self._hold(backend)
