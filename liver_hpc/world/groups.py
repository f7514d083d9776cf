"""Process groups without a common ancestor world.

A group is a c10d `ProcessGroup` object that first carries a stand-in backend: collectives return
at once and move nothing, so a model can be built and warmed up without anybody else. `connect`
then puts the real backend in its place, opened from a store, or the very backend that another
world already has for the same members.

All private names of torch that this takes are used here and nowhere else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from functools import cache
from typing import Any

from liver_hpc.world.device import Device, Network

# Any: torch's stubs know few of these names, and some wrongly.
dist: Any = importlib.import_module("torch.distributed")
c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
native: Any = importlib.import_module("torch._C._distributed_c10d")

SENTINEL_SIZE = 1 << 16
"""The size that the sentinel default group pretends to have; worker ids stay below it."""


def lone_store() -> Any:
    """A store for one process."""
    return dist.HashStore()


def install_sentinel(worker: int) -> None:
    """Makes a default group without a backend whose rank is the worker id.

    megatron-core asks `torch.distributed.get_rank()` in places; a stray collective over the
    default group raises instead of hanging.
    """
    _answer_for_stand_ins()
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

    dist.broadcast = broadcast
    dist.all_to_all_single = with_stand_ins(dist.all_to_all_single, lambda output: [output])
    dist.all_gather = with_stand_ins(dist.all_gather, list)


def _is_stand_in(group: Any, device: Any) -> bool:
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
    """One process group of one world; `members` are worker ids in group-rank order."""

    def __init__(self, name: str, members: tuple[int, ...], worker: int, device: Device) -> None:
        self.name = name
        self.members = members
        self.rank = members.index(worker)
        self.backend: Any = None
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
        kind = getattr(dist.ProcessGroup.BackendType, self._device.backend_name.upper())
        self.process_group._register_backend(self._device.torch_device, kind, backend)
        self.process_group._set_default_backend(kind)
        self.backend = backend

    def connect(self, network: Network, store: Any, timeout_s: float) -> None:
        """Opens this group's own backend over `store`. Collective over the members."""
        prefix = dist.PrefixStore(self.name, store)
        self.attach(network.open_backend(prefix, self.rank, len(self.members), timeout_s))

    def close(self) -> None:
        """Forgets the group. Its connections close once nobody holds the backend any more."""
        if self.process_group is None:
            return
        _leave(self.process_group, self.name)
        self.process_group = self.backend = None


class GroupBook:
    """The groups of one world, one for each different set of members."""

    def __init__(self, generation: int, worker: int, device: Device) -> None:
        self._generation = generation
        self._worker = worker
        self._device = device
        self._groups: dict[tuple[int, ...], Group] = {}

    def group(self, members: Iterable[int]) -> Group:
        """The group of these members, which must include this worker; made when first asked."""
        key = tuple(members)
        if key not in self._groups:
            name = f"g{self._generation}/{'-'.join(map(str, key))}"
            self._groups[key] = Group(name, key, self._worker, self._device)
        return self._groups[key]

    def connect(
        self,
        network: Network,
        store: Any,
        timeout_s: float,
        previous: GroupBook | None = None,
    ) -> int:
        """Makes every group real; returns how many of several members took over a backend of
        `previous`. Collective over the world's workers.

        All workers open their groups in the same order (sorted by members), so that no two wait
        for each other. Where members were a group in the previous world, they were so for all of
        them: either all take its backend over or none does.
        """
        kept = 0
        for members in sorted(self._groups):
            group = self._groups[members]
            old = previous._groups.get(members) if previous is not None else None
            if old is not None and old.backend is not None:
                group.attach(old.backend)
                kept += len(members) > 1
            else:
                group.connect(network, store, timeout_s)
        return kept

    def backends(self) -> list[Any]:
        """The backends of all groups that are real."""
        return [group.backend for group in self._groups.values() if group.backend is not None]

    def close(self) -> None:
        """Forgets all groups; backends that another book took over stay open."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()
