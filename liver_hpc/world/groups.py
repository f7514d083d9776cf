"""Process groups without a common ancestor world.

A group is a c10d `ProcessGroup` object that first carries a stand-in backend: collectives return
at once and move nothing, so a model can be built and warmed up without anybody else. `connect`
then puts the real backend in its place, opened from a store, or the very backend that another
world already has for the same members. A group of one member keeps the stand-in: what a collective
moves is there already.

All private names of torch that this takes are used here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import TransferError
from liver_hpc.host.process import all_at_once
from liver_hpc.layout.coordinates import ids_text
from liver_hpc.transport import gloo_sockets, gloo_waits
from liver_hpc.transport.wire import end_batch, group_wire
from liver_hpc.world.device import Device
from liver_hpc.world.network import Network

# Any: torch's stubs know few of these names, and some wrongly.
dist: Any = importlib.import_module("torch.distributed")
c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
native: Any = importlib.import_module("torch._C._distributed_c10d")

_users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many groups use a backend; guarded by `_counting`."""
_counting = threading.Lock()

ENDS_S = 60.0
"""How long is waited for what ends backends; it goes on beside where it takes longer."""
SENTINEL_SIZE = 1 << 16
"""The size that the sentinel default group pretends to have; worker ids stay below it."""
_TOGETHER = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "all_gather_single_coalesced": "_allgather_base",  # from torch 2.13 on
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
}
"""Methods of torch's groups: what launches collectives together, and what launches one of them."""


def lone_store() -> Any:
    """A store for one process."""
    return dist.HashStore()


def install_sentinel(worker: int) -> None:
    """Makes a default group without a backend whose rank is the worker id.

    megatron-core asks `torch.distributed.get_rank()` in places; a stray collective over the
    default group raises instead of hanging.
    """
    _answer_for_stand_ins()
    _end_failed_batches()
    group = dist.ProcessGroup(lone_store(), worker, SENTINEL_SIZE)
    group._set_group_name("sentinel")
    _enter(group, "sentinel", {worker: worker}, "gloo")
    c10d._update_default_pg(group)


@cache
def _answer_for_stand_ins() -> None:
    """Makes the collectives whose parts differ in size give zeros in a group that has a stand-in
    only: that refuses sizes which no peer has agreed to."""

    def with_stand_ins(plain: Any, outputs_of: Any) -> Any:
        @functools.wraps(plain)
        def collective(output: Any, *args: Any, group: Any = None, **options: Any) -> Any:
            outputs = outputs_of(output)
            if group is None or not outputs or not _is_stand_in(group, outputs[0].device):
                return plain(output, *args, group=group, **options)
            for each in outputs:
                each.zero_()
            return None

        return collective

    plain_broadcast = dist.broadcast

    @functools.wraps(plain_broadcast)
    def broadcast(
        tensor: Any, src: Any = None, group: Any = None, *args: Any, **options: Any
    ) -> Any:
        """What would be received is zeros: it may say how much memory is to be made."""
        is_root = src == dist.get_rank() or options.get("group_src") == dist.get_rank(group)
        if group is not None and not is_root and _is_stand_in(group, tensor.device):
            tensor.zero_()
        return plain_broadcast(tensor, src, group, *args, **options)

    plain_batch = dist.batch_isend_irecv

    @functools.wraps(plain_batch)
    def batch_isend_irecv(messages: Any) -> Any:
        """What a stage would receive is ones: a model may check what it computes of it."""
        for each in messages:
            if each.op is dist.irecv and _is_stand_in(each.group, each.tensor.device):
                each.tensor.detach().fill_(1)
        return plain_batch(messages)

    dist.broadcast, dist.batch_isend_irecv = broadcast, batch_isend_irecv
    for name in ("reduce_scatter_tensor", "reduce_scatter", "all_to_all_single", "all_to_all"):
        setattr(dist, name, _also_alone(getattr(dist, name)))
    dist.all_to_all_single = with_stand_ins(dist.all_to_all_single, lambda output: [output])
    dist.all_gather = with_stand_ins(dist.all_gather, list)


def _also_alone(plain: Any) -> Any:
    """A collective whose outputs come first, and then its inputs: in a group of one a member gets
    what it gives, which torch 2.11's stand-ins leave out."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def collective(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        group, (outputs, inputs, *_) = given.get("group"), given.values()
        if group is not None and group.size() == 1:
            outputs, inputs = (x if isinstance(x, list) else [x] for x in (outputs, inputs))
            if _is_fake(group, inputs[0].device):
                for output, its in zip(outputs, inputs, strict=False):  # one alone, and its part
                    output.copy_(its.view_as(output))
        return plain(*args, **options)

    return collective


@cache
def _end_failed_batches() -> None:
    """Makes a batch of messages, as Megatron's between stages, end NCCL's group where one of them
    raises, as all do after an abort: torch leaves it open, and what the thread launches later, in
    whatever communicator, never runs. So do collectives of experts, of which torch makes a batch:
    those whose parts differ in size, as with tensor parallelism, and all-to-all."""
    for name in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"):
        setattr(dist, name, _ending_its_batch(getattr(dist, name)))
    plain = dist.batch_isend_irecv

    @functools.wraps(plain)
    def batch_isend_irecv(messages: Any) -> Any:
        try:
            return plain(messages)
        except BaseException:
            first = messages[0]
            if c10d._world.pg_coalesce_state.pop(first.group, None) is not None:  # it was begun
                end_batch(functools.partial(first.group._end_coalescing, first.tensor.device))
            raise

    dist.batch_isend_irecv = batch_isend_irecv


def _ending_its_batch(plain: Any) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def collective(*args: Any, **options: Any) -> Any:
        try:
            return plain(*args, **options)
        except BaseException:
            given = signature.bind(*args, **options).arguments
            group, (first, *_) = given.get("group"), given.values()
            tensors = first if isinstance(first, list) else [first]
            if group is not None and tensors:
                end_batch(functools.partial(group._end_coalescing, tensors[0].device))
            raise

    return collective


@cache
def _launch_one_by_one() -> None:
    """Makes what Megatron gathers and reduces of several buckets one launch of NCCL's each. Where
    NCCL refuses one of those that torch launches together, as the next one in a communicator in
    which a peer was lost, torch throws twice at once, which ends the process."""
    for together, alone in _TOGETHER.items():
        if hasattr(dist.ProcessGroup, together):
            setattr(dist.ProcessGroup, together, _one_by_one(getattr(dist.ProcessGroup, alone)))


def _one_by_one(alone: Any) -> Any:
    """Returns the last one's work: those of a communicator end in their order."""

    def collective(group: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return [alone(group, output, its, *options) for output, its in pairs][-1]

    return collective


def _is_stand_in(group: Any, device: Any) -> bool:
    """Whether others would be in this group, who are not."""
    return group.size() > 1 and _is_fake(group, device)


def _is_fake(group: Any, device: Any) -> bool:
    return isinstance(group._get_backend(device), native.FakeProcessGroup)


def _enter(group: Any, name: str, ranks: dict[int, int], backend_name: str) -> None:
    world = c10d._world
    world.pg_map[group] = (backend_name, None)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = ranks
    world.pg_backend_config[group] = f"cpu:{backend_name}"
    tag = f"user:{name}"
    world.pg_to_tag[group] = tag
    world.tags_to_pg.setdefault(tag, []).append(group)


def _leave(group: Any, name: str) -> None:
    world = c10d._world
    for registry in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.pg_coalesce_state,
    ):
        registry.pop(group, None)
    world.tags_to_pg.pop(f"user:{name}", None)
    native._unregister_process_group(name)


class Group:
    """One process group of one world; `members` are worker ids in group-rank order.

    backend: the real one; None before the group is connected, and of a group of one.
    pairs: the members with whom this one exchanges messages, as with a neighbouring stage. NCCL
    connects a pair at its first message: that is when the group connects, and not in a step.
    """

    def __init__(self, name: str, members: tuple[int, ...], worker: int, device: Device) -> None:
        self.name = name
        self.members = members
        self.rank = members.index(worker)
        self.backend: Any = None
        self.pairs = set[int]()
        self._device = device
        self._prefix = dist.PrefixStore(name, lone_store())
        self.process_group = dist.ProcessGroup(self._prefix, self.rank, len(members))
        stand_in = native.FakeProcessGroup._create_internal(
            self.rank, len(members), native.FakeProcessGroup.Options()
        )
        custom = dist.ProcessGroup.BackendType.CUSTOM
        self.process_group._register_backend(device.torch_device, custom, stand_in)
        self.process_group._set_default_backend(custom)
        self.process_group._set_group_name(name)
        ranks = {member: rank for rank, member in enumerate(members)}
        _enter(self.process_group, name, ranks, device.backend_name)
        native._register_process_group(name, self.process_group)

    def attach(self, backend: Any) -> None:
        """Replaces the stand-in by a real backend, so that collectives are real from here on."""
        if self._device.backend_name == "nccl":
            _launch_one_by_one()
        kind = getattr(dist.ProcessGroup.BackendType, self._device.backend_name.upper())
        self.process_group._register_backend(self._device.torch_device, kind, backend)
        self.process_group._set_default_backend(kind)
        self._hold(backend)

    def _hold(self, backend: Any) -> None:
        with _counting:
            _users[backend] = _users.get(backend, 0) + 1
        self.backend = backend

    def connect(
        self,
        network: Network,
        store: Any,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens this group's own backend over `store`. Collective over the members. check: called
        while the device connects; it may raise."""
        if len(self.members) == 1:
            return
        prefix, peers = dist.PrefixStore(self.name, store), f"workers {ids_text(self.members)}"
        self.attach(
            network.open_backend(prefix, self.rank, len(self.members), timeout_s, peers, check)
        )
        if self._device.late and self.pairs:
            ranks = {member: rank for rank, member in enumerate(self.members)}
            device, lane = self._device.torch_device, self._device.new_lane()
            wire = group_wire(self.backend, ranks, device, lane)
            wire.meet(self.pairs, Deadline.after(SystemClock(), timeout_s, f"{peers} to meet"))

    def pair_with_all(self) -> None:
        """All members will exchange messages."""
        self.pairs |= {*self.members} - {self.members[self.rank]}

    def pair_with_neighbours(self) -> None:
        """Each member will exchange messages with the next one, and the last with the first."""
        size = len(self.members)
        self.pairs |= {self.members[(self.rank + way) % size] for way in (1, -1)}
        self.pairs -= {self.members[self.rank]}

    def close(self) -> None:
        """Forgets the group. Its connections close once nobody holds the backend any more; NCCL's
        are ended when no group uses them, as they hold memory of the device."""
        end_all(self.forget())

    def forget(self) -> list[Any]:
        """Does as `close` but for ending the backend; returns that where it is to be ended."""
        if self.process_group is None:
            return []
        _leave(self.process_group, self.name)
        backend, self.process_group, self.backend = self.backend, None, None
        if backend is None:
            return []
        with _counting:
            _users[backend] -= 1
            unused = not _users[backend]
        return [backend] if unused and self._device.backend_name == "nccl" else []


def end(backend: Any) -> None:
    """Ends what a backend has under way, and gives up its connections; from any thread."""
    gloo_sockets.shut_down(backend)
    with contextlib.suppress(RuntimeError):
        backend.abort()


def end_all(backends: Iterable[Any]) -> None:
    """Ends backends, all at once: NCCL waits for the device as it gives up a communicator, and so
    for a peer that never comes to another one, until that is given up too."""
    all_at_once([functools.partial(end, backend) for backend in backends], "end", ENDS_S)


class GroupBook:
    """The groups of one world, one for each different set of members.

    aborted: whether what they have under way was ended, so that there is no point in going on.
    """

    def __init__(self, generation: int, worker: int, device: Device) -> None:
        self._generation = generation
        self._worker = worker
        self._device = device
        self._groups: dict[tuple[int, ...], Group] = {}
        self._kept: set[tuple[int, ...]] = set()
        self._never_end: list[Any] = []
        self.aborted = False

    def group(self, members: Iterable[int]) -> Group:
        """The group of these members, which must include this worker; made when first asked."""
        key = tuple(members)
        if key not in self._groups:
            self._groups[key] = Group(self._name(key), key, self._worker, self._device)
        return self._groups[key]

    def _name(self, members: tuple[int, ...]) -> str:
        """As long for thousands of members as for two: every key of its store begins with it."""
        hashed = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
        return f"g{self._generation}/{len(members)}-{hashed}"

    def connect(
        self,
        network: Network,
        store: Any,
        timeout_s: float,
        previous: GroupBook | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> int:
        """Makes every group real; returns how many took over a backend of `previous`. Collective
        over the world's workers. check: called while the device connects; it may raise.

        All workers open their groups in the same order (sorted by members), so that no two wait
        for each other. Where members were a group in the previous world, they were so for all of
        them: either all take its backend over or none does.
        """
        for members in sorted(self._groups):
            group = self._groups[members]
            old = previous._groups.get(members) if previous is not None else None
            if old is not None and old.backend is not None:
                self._kept.add(members)  # before `abort` may see the backend
                group.attach(old.backend)
            else:
                group.connect(network, store, timeout_s, check)
        return len(self._kept)

    def backends(self) -> list[Any]:
        """The backends of all groups that are real."""
        return [group.backend for group in self._groups.values() if group.backend is not None]

    def abort(self, shared: bool) -> None:
        """Ends what these groups have under way, from any thread: who waits in it fails promptly.
        shared: also in groups whose backends another book uses.
        """
        self.aborted = True
        end_all(
            group.backend
            for members, group in [*self._groups.items()]
            if group.backend is not None and (shared or members not in self._kept)
        )

    def check(self) -> None:
        """Raises TransferError where NCCL's work in these groups may have ended undone, for which
        no wait raises: it was aborted, by this book or by torch, which has seen an error or a
        timeout and notes it before it aborts. Work that the device has come to the end of before
        this call was done, if it does not raise. It asks the host alone."""
        if not self._device.late:
            return
        if self.aborted:
            raise TransferError(f"the groups of generation {self._generation} were aborted")
        for members, group in [*self._groups.items()]:
            backend = group.backend
            if backend is None or (error := backend.get_error()) == native.ErrorType.SUCCESS:
                continue
            raise TransferError(
                f"NCCL between workers {ids_text(members)} has failed: {error.name}"
            )

    def have_ended(self) -> bool:
        """Whether gloo has closed all connections of these groups, so that nothing in them ends any
        more but at their timeout."""
        connections = [each for b in self.backends() for each in gloo_sockets.connections_of(b)]
        return self.aborted and gloo_sockets.are_closed(connections)

    def never_ends(self, work: Any) -> None:
        """See `gloo_waits.Groups`."""
        self._never_end.append(work)

    def close(self) -> None:
        """Forgets all groups; backends that another book took over stay open."""
        if self._never_end:
            gloo_waits.keep(self._never_end, self.backends())
        end_all([backend for group in self._groups.values() for backend in group.forget()])
        self._groups.clear()
