"""Groups without an ancestor world, on two threads of one process that play two workers."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as native
from torch.distributed import distributed_c10d as c10d

from liver_hpc.host.interfaces import address_towards
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.world import groups as its
from liver_hpc.world.device import Device
from liver_hpc.world.groups import Group, GroupBook, _ending_its_batch, install_sentinel
from liver_hpc.world.network import Network
from tests.nccl_groups import NcclGroups

CPU = Device(torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_default_group() -> Iterator[None]:
    """Another test of this process may have left a sentinel, whose rank is none of ours."""
    previous = c10d.GroupMember.WORLD
    c10d._update_default_pg(None)
    yield
    c10d._update_default_pg(previous)


def in_two_threads(work: Callable[[int], Any]) -> list[Any]:
    """`work(0)` and `work(1)` at once; raises what either raised."""
    results: dict[int, Any] = {}

    def run(worker: int) -> None:
        try:
            results[worker] = work(worker)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            results[worker] = error

    threads = [threading.Thread(target=run, args=(worker,)) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[0], results[1]]


@pytest.fixture
def pair() -> Any:
    """Two ends of one group, named apart because both live in this process."""
    networks = [Network(CPU, "127.0.0.1") for _ in range(2)]
    store = dist.HashStore()
    groups: list[Group] = [Group(f"test/{w}", (0, 1), w, CPU) for w in (0, 1)]

    def connect(worker: int) -> None:
        prefix = dist.PrefixStore("pair", store)
        groups[worker].attach(networks[worker].open_backend(prefix, worker, 2, 10.0))

    yield groups, connect
    for group in groups:
        group.close()


def test_private_names_of_torch_are_where_this_module_expects_them() -> None:
    """Fails loudly when a new torch moves them; world/groups.py is the one place to mend."""
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag"):
        assert hasattr(c10d._world, name), name
    assert hasattr(c10d._world, "tags_to_pg")
    assert hasattr(c10d._world, "pg_coalesce_state")
    assert callable(c10d._update_default_pg)


def test_nothing_is_called_that_torch_has_done_nothing_in_for_years(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 2.14 on it warns, and says that it goes."""

    def gone(_backend: Any) -> None:
        raise AssertionError("_set_sequence_number_for_group")

    monkeypatch.setattr(native.Backend, "_set_sequence_number_for_group", gone)
    _, connect = pair
    in_two_threads(connect)


def test_collectives_of_a_stand_in_return_at_once_and_move_nothing(pair: Any) -> None:
    groups, _ = pair
    tensor = torch.full((3,), 7.0)
    dist.all_reduce(tensor, group=groups[0].process_group)
    assert tensor.tolist() == [7.0, 7.0, 7.0]
    gathered = torch.empty(6)
    dist.all_gather_into_tensor(gathered, tensor, group=groups[0].process_group)
    received = torch.zeros(2)
    operations = [
        dist.P2POp(dist.isend, tensor, 1, groups[0].process_group),
        dist.P2POp(dist.irecv, received, 1, groups[0].process_group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def test_the_same_group_object_is_real_once_a_backend_is_attached(pair: Any) -> None:
    groups, connect = pair
    in_two_threads(connect)

    def reduce(worker: int) -> list[float]:
        tensor = torch.full((2,), float(worker + 1))
        dist.all_reduce(tensor, group=groups[worker].process_group)
        return tensor.tolist()

    assert in_two_threads(reduce) == [[3.0, 3.0], [3.0, 3.0]]


def test_another_world_takes_over_a_backend_and_it_outlives_the_first(pair: Any) -> None:
    groups, connect = pair
    in_two_threads(connect)
    heirs = [Group(f"heir/{w}", (0, 1), w, CPU) for w in (0, 1)]
    for heir, group in zip(heirs, groups, strict=True):
        heir.attach(group.backend)
        group.close()

    def reduce(worker: int) -> float:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=heirs[worker].process_group)
        return tensor.item()

    assert in_two_threads(reduce) == [2.0, 2.0]
    for heir in heirs:
        heir.close()


def test_a_peer_that_forgets_its_group_frees_one_that_waits_in_it(pair: Any) -> None:
    groups, connect = pair
    in_two_threads(connect)
    failed = threading.Event()

    def wait_for_peer() -> None:
        with pytest.raises(RuntimeError, match="Connection"):
            dist.all_reduce(torch.ones(1), group=groups[0].process_group)
        failed.set()

    waiter = threading.Thread(target=wait_for_peer)
    waiter.start()
    groups[1].close()
    gc.collect()
    assert failed.wait(5.0)
    waiter.join(5.0)


def test_closed_groups_leave_no_descriptors_and_free_their_names() -> None:
    networks = [Network(CPU, "127.0.0.1") for _ in range(2)]
    counts = []
    for number in range(4):
        groups = [Group(f"again/{worker}", (0, 1), worker, CPU) for worker in (0, 1)]
        store = dist.HashStore()

        def use(worker: int, groups: Any = groups, store: Any = store) -> None:
            groups[worker].attach(networks[worker].open_backend(store, worker, 2, 10.0))
            dist.all_reduce(torch.ones(1), group=groups[worker].process_group)

        in_two_threads(use)
        for group in groups:
            group.close()
        gc.collect()
        if number:  # the first one opens what stays
            counts.append(len(os.listdir("/proc/self/fd")))
    assert len(set(counts)) == 1


def test_a_group_of_one_meets_nobody_and_gives_what_is_there() -> None:
    install_sentinel(7)
    nothing: Any = None
    one = Group("one", (7,), 7, CPU)
    one.connect(nothing, nothing, 1.0)
    assert one.backend is None
    group, given = one.process_group, torch.arange(4.0)

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        reduced = given.clone()
        dist.all_reduce(reduced, op, group=group)
        assert torch.equal(reduced, given)

    def filled(collective: Callable[..., Any], *arguments: Any, many: bool = False) -> None:
        output = torch.zeros(4)
        work = collective([output] if many else output, *arguments, group=group, async_op=True)
        if work is not None:
            work.wait()
        assert torch.equal(output, given), collective

    filled(dist.all_gather_into_tensor, given)
    filled(dist.reduce_scatter_tensor, given)
    filled(dist.all_to_all_single, given)
    filled(dist.all_to_all_single, given, [4], [4])
    filled(dist.all_gather, given, many=True)
    filled(dist.reduce_scatter, [given])
    broadcast = given.clone()
    dist.broadcast(broadcast, 7, group=group)
    assert torch.equal(broadcast, given)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"a": 1}, group=group)
    assert objects == [{"a": 1}]
    dist.barrier(group=group)
    one.close()


def test_the_sentinel_gives_a_rank_and_refuses_collectives() -> None:
    install_sentinel(42)
    assert dist.get_rank() == 42
    with pytest.raises(RuntimeError, match=r"[Nn]o backend"):
        dist.all_reduce(torch.ones(1))


def test_own_address_towards_this_machine_is_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("refused_by", ["torch", "NCCL"])
@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_batch_of_messages_that_fails_leaves_no_group_of_nccls_open(
    fails_at: int, refused_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has torch collect what is reduced in that group later."""
    install_sentinel(0)
    group, groups = Group(f"test/batch/{fails_at}", (0, 1), 0, CPU), NcclGroups()

    def send(*_args: Any, **_options: Any) -> None:
        if refused_by == "torch":
            raise dist.DistBackendError("NCCL error: the communicator was aborted")
        groups.message(refused=True)

    monkeypatch.setattr(native.FakeProcessGroup, "supports_coalescing", True)
    monkeypatch.setattr(dist.ProcessGroup, "_start_coalescing", lambda *_of: groups.start())
    monkeypatch.setattr(dist.ProcessGroup, "_end_coalescing", lambda *_of: groups.end())
    messages = [
        dist.P2POp(op, torch.ones(1), 1, group.process_group) for op in (dist.isend, dist.irecv)
    ]
    messages[fails_at].op = send
    with pytest.raises(RuntimeError, match="NCCL error"):
        dist.batch_isend_irecv(messages)
    assert (groups.open, groups.counted) == (0, 0)
    assert group.process_group not in c10d._world.pg_coalesce_state
    group.close()


PARTS, WHOLE = [torch.ones(1), torch.ones(2)], torch.ones(3)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("all_gather", (PARTS, WHOLE)),
        ("reduce_scatter", (WHOLE, PARTS)),
        ("all_to_all", (PARTS, PARTS)),
        ("all_to_all_single", (WHOLE, WHOLE)),
    ],
)
def test_a_collective_in_parts_that_fails_leaves_no_group_of_nccls_open(
    name: str, given: tuple[Any, ...]
) -> None:
    """torch's own code begins one there, and does not end it: a batch, which it counts, or, in
    all-to-all, one that it does not count."""
    groups = NcclGroups()
    group = SimpleNamespace(_end_coalescing=lambda _device: groups.end())

    @functools.wraps(getattr(c10d, name))
    def fail(*_args: Any, **_options: Any) -> None:
        if "all_to_all" in name:
            groups.message(refused=True)
        groups.start()
        raise dist.DistBackendError("NCCL error: the communicator was aborted")

    collective = _ending_its_batch(fail)
    with pytest.raises(RuntimeError, match="NCCL error"):
        collective(*given, group=group)
    assert (groups.open, groups.counted) == (0, 0)

    install_sentinel(0)
    installed, codes = getattr(dist, name), set()
    while installed is not None:
        codes.add(getattr(installed, "__code__", None))  # a stand-in for CUDA's has none
        installed = getattr(installed, "__wrapped__", None)
    assert collective.__code__ in codes


@pytest.mark.parametrize(
    ("name", "alone", "args"),
    [
        ("reduce_scatter_tensor", "_reduce_scatter_base", (torch.ones(1), torch.ones(2))),
        ("all_gather_into_tensor", "_allgather_base", (torch.ones(2), torch.ones(1))),
    ],
)
def test_over_nccl_buckets_that_come_together_are_launched_one_by_one(
    name: str, alone: str, args: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that torch launches together, one that NCCL refuses ends the process."""
    install_sentinel(0)
    launched: list[Any] = []

    def launch(_group: Any, output: Any, _input: Any, options: Any) -> str:
        launched.append((output, options.asyncOp))
        return f"work {len(launched)}"

    for together in its._TOGETHER:
        if hasattr(dist.ProcessGroup, together):
            monkeypatch.setattr(dist.ProcessGroup, together, None)
    monkeypatch.setattr(dist.ProcessGroup, alone, launch)
    its._launch_one_by_one.__wrapped__()  # its cache is the process's
    group = Group(f"test/one by one/{name}", (0, 1), 0, CPU)
    with c10d._coalescing_manager(group.process_group, async_ops=True) as handle:
        for _ in range(2):
            getattr(c10d, name)(*args, group=group.process_group, async_op=True)
    assert launched == [(args[0], True)] * 2
    assert handle.works == ["work 2"]
    group.close()


def test_a_batch_that_never_began_ends_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    install_sentinel(0)
    one, other = (Group(f"test/{name}", (0, 1), 0, CPU) for name in ("one", "other"))
    ended: list[Any] = []
    monkeypatch.setattr(dist.ProcessGroup, "_end_coalescing", lambda *_of: ended.append(_of))
    messages = [
        dist.P2POp(dist.isend, torch.ones(1), 1, group.process_group) for group in (one, other)
    ]
    with pytest.raises(ValueError, match="same group"):
        dist.batch_isend_irecv(messages)
    assert not ended
    for group in (one, other):
        group.close()


def test_stages_contexts_and_experts_know_their_pairs() -> None:
    """Worker 0 of tp2 pp4, two data-parallel replicas of two contexts each, experts over both."""
    from liver_hpc.world.megatron import group_collection

    layout = Layout(tp=2, pp=4, dp=2, cp=2, ep=4)
    rank_map, first = RankMap(layout, tuple(range(layout.workers))), layout.coordinate(0)
    install_sentinel(0)
    book = GroupBook(0, 0, Device(torch.device("cpu")))
    group_collection(rank_map, first, book)

    def worker(pp: int, replica: int) -> int:
        return rank_map.worker_at(Coordinate(0, pp, replica))

    pairs = {group.members: group.pairs for group in book._groups.values() if group.pairs}
    assert pairs == {
        tuple(worker(pp, 0) for pp in range(4)): {worker(1, 0), worker(3, 0)},
        (0, worker(0, 1)): {worker(0, 1)},
        tuple(worker(0, r) for r in range(4)): {worker(0, 1), worker(0, 2), worker(0, 3)},
    }
    book.close()


# ---- stand-ins


@pytest.mark.parametrize("sizes", [([2, 2], [1, 2]), ([2, 2], [0, 0]), ([0, 0], [3, 0])])
def test_a_stand_in_answers_parts_of_any_sizes_with_zeros(
    sizes: tuple[list[int], list[int]],
) -> None:
    """A rehearsal sends experts as many tokens as it happens to have, and gets any number."""
    install_sentinel(0)
    group = Group("test/stand-in", (0, 1), 0, CPU)
    received, sent = sizes
    output = torch.full((sum(received), 3), 7.0)
    dist.all_to_all_single(
        output, torch.ones(sum(sent), 3), received, sent, group=group.process_group
    )
    assert not output.any()
    outputs = [torch.full((size,), 7.0) for size in received]
    dist.all_gather(outputs, torch.ones(sent[0]), group=group.process_group)
    assert not torch.cat(outputs).any()
    group.close()


class Stuck:
    """A backend whose end waits for the device, and so for the end of another one."""

    def __init__(self, both: threading.Barrier) -> None:
        self.ended = False
        self._both = both

    def abort(self) -> None:
        self._both.wait(5.0)
        self.ended = True


@pytest.mark.parametrize("how", ["abort", "close"])
def test_all_backends_of_a_world_are_ended_at_once(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    stuck = [Stuck(both), Stuck(both)]
    monkeypatch.setattr(Device, "backend_name", "nccl")
    device = Device(torch.device("cpu"))
    book = GroupBook(77, 0, device)
    groups = [book.group(members) for members in ((0, 1), (0, 1, 2))]
    for group, backend in zip(groups, stuck, strict=True):
        group._hold(backend)
    if how == "abort":
        book.abort(shared=True)
    book.close()
    assert [each.ended for each in stuck] == [True, True]
