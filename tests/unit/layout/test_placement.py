"""Who sits where: groups within nodes, and few bytes between them."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.gpt_spec import gpt_spec
from benchmarks.planner.exact import bytes_between_nodes, least_bytes_between_nodes
from liver_hpc.layout import assignment
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.memory import handoff_bytes
from liver_hpc.layout.placement import first_rank_map, place
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.gpt_config import GPTConfig
from tests.unit.layout.models import MODELS, TIED, rank_map
from tests.unit.layout.test_overlap import EXPERTS

SMALL = [
    layout
    for tp in (1, 2, 4)
    for pp in (1, 2, 4)
    for dp in (1, 2, 3, 4, 5)
    if (layout := Layout(tp, pp, dp)).workers <= 12
]
LARGE = gpt_spec(
    GPTConfig(
        layers=32,
        hidden=4096,
        ffn_hidden=14336,
        heads=32,
        query_groups=8,
        vocab_size=128256,
        dtype="bf16",
        tied_embeddings=False,
    )
)


def on_nodes(workers: int, per_node: int) -> dict[int, int]:
    return {worker: worker // per_node for worker in range(workers)}


def whole_groups(placed: RankMap, nodes: dict[int, int], replicas: int = 1) -> int:
    """How many blocks of all tp ranks of so many neighbouring replicas are on one node."""
    layout, found = placed.layout, {}
    for worker, at in zip(placed.workers, layout.coordinates(), strict=True):
        found.setdefault((at.pp, at.replica // replicas), set()).add(nodes[worker])
    return sum(len(names) == 1 for names in found.values())


# ---- few bytes between nodes


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, RankMap, Layout, list[int], dict[int, int]]:
    """Two to four nodes of two to four workers, of which some may be lost."""
    model, per_node = draw(st.sampled_from(MODELS)), draw(st.sampled_from([2, 3, 4]))
    nodes = on_nodes(per_node * draw(st.sampled_from([2, 3, 4])), per_node)
    before, after = draw(st.sampled_from(SMALL)), draw(st.sampled_from(SMALL))
    assume(max(before.tp, after.tp) <= per_node)
    assume(max(before.workers, after.workers) <= len(nodes))
    order = random.Random(draw(st.integers(0, 1000)))
    sources = draw(st.sampled_from([sorted(nodes), order.sample(sorted(nodes), len(nodes))]))
    available = order.sample(sorted(nodes), order.randint(after.workers, len(nodes)))
    room = sum(
        sum(nodes[worker] == name for worker in available) // after.tp for name in {*nodes.values()}
    )
    assume(room >= after.pp * after.dp)
    source = RankMap(before, tuple(sources[: before.workers]))
    return model, source, after, sorted(available), nodes


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(cases())
def test_bytes_between_nodes_are_near_the_least(
    case: tuple[ModelSpec, RankMap, Layout, list[int], dict[int, int]],
) -> None:
    model, source, after, available, nodes = case
    placed = place(model, source, after, available, nodes)
    assert whole_groups(placed, nodes) == after.pp * after.dp
    least = least_bytes_between_nodes(model, source, after, available, nodes)
    # In models so small, the copies of tied embeddings, each pair of which counts, weigh much.
    assert bytes_between_nodes(model, source, placed, nodes) <= 1.1 * least


def test_experts_that_stay_on_their_node_do_not_move() -> None:
    source, after = rank_map(Layout(1, 1, 8, ep=2)), Layout(1, 1, 8, ep=4)
    nodes = on_nodes(8, 4)
    placed = place(EXPERTS, source, after, range(8), nodes)
    assert whole_groups(placed, nodes, replicas=4) == 2
    least = least_bytes_between_nodes(EXPERTS, source, after, range(8), nodes)
    assert bytes_between_nodes(EXPERTS, source, placed, nodes) <= 1.05 * least


@settings(max_examples=25, deadline=None)
@given(cases())
def test_many_units_are_assigned_as_well_as_few(
    case: tuple[ModelSpec, RankMap, Layout, list[int], dict[int, int]],
) -> None:
    """What is solved as flows gains what the assignment pair by pair gains."""
    model, source, after, available, nodes = case
    few = place(model, source, after, available, nodes)
    dense, assignment.DENSE_PAIRS = assignment.DENSE_PAIRS, 0
    try:
        many = place(model, source, after, available, nodes)
    finally:
        assignment.DENSE_PAIRS = dense
    assert whole_groups(many, nodes) == after.pp * after.dp
    between = [bytes_between_nodes(model, source, each, nodes) for each in (few, many)]
    assert between[1] <= 1.05 * between[0]


def test_within_a_node_the_fewest_bytes_move_between_workers() -> None:
    source = RankMap(Layout(2, 1, 2), (3, 1, 0, 2))
    nodes = dict.fromkeys(range(4), 0)
    assert place(TIED, source, source.layout, range(4), nodes) == source
    placed = place(TIED, source, Layout(2, 2, 1), range(4), nodes)
    plain = RankMap(Layout(2, 2, 1), (0, 1, 2, 3))
    assert handoff_bytes(TIED, source, placed) < handoff_bytes(TIED, source, plain)


def test_whoever_stays_keeps_the_seat_and_the_joiner_gets_the_free_one() -> None:
    source = rank_map(Layout(2, 1, 2))
    assert place(TIED, source, source.layout, [0, 2, 3, 7]).workers == (0, 7, 2, 3)
    nodes = {**on_nodes(4, 2), 7: 0}
    assert place(TIED, source, source.layout, [0, 2, 3, 7], nodes).workers == (0, 7, 2, 3)


# ---- groups within nodes


def test_a_group_is_within_a_node_also_where_more_bytes_move_for_it() -> None:
    """Node 0 has lost a worker: one that stayed there cannot be of a pair with node 1."""
    source, nodes = rank_map(Layout(2, 1, 3)), on_nodes(9, 3)
    placed = place(TIED, source, Layout(2, 1, 3), [0, 2, 3, 4, 5, 6, 7, 8], nodes)
    assert whole_groups(placed, nodes) == 3


def test_what_fits_no_node_is_placed_in_the_largest_parts_that_fit() -> None:
    nodes = on_nodes(8, 2)
    placed = place(TIED, rank_map(Layout(1, 1, 8)), Layout(4, 1, 2), range(8), nodes)
    pairs = [placed.workers[rank : rank + 2] for rank in range(0, 8, 2)]
    assert all(nodes[a] == nodes[b] for a, b in pairs)
    nodes = {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 2, 7: 2}
    placed = place(TIED, rank_map(Layout(1, 1, 8)), Layout(4, 1, 2), range(8), nodes)
    assert whole_groups(placed, nodes) == 1


def test_workers_without_a_node_are_each_alone() -> None:
    source = rank_map(Layout(2, 1, 2))
    known = {worker: 10 + worker for worker in range(6)}
    for target in (Layout(2, 2, 1), Layout(1, 1, 4), Layout(4, 1, 1)):
        assert place(TIED, source, target, range(6)) == place(TIED, source, target, range(6), known)


def test_the_first_world_is_in_order_on_one_node() -> None:
    for layout in (Layout(2, 2, 2), Layout(1, 1, 8, ep=4), Layout(1, 2, 4)):
        placed = first_rank_map(layout, range(8), dict.fromkeys(range(8), 0))
        assert placed == rank_map(layout)


def test_the_first_world_has_its_groups_and_then_its_pipelines_within_nodes() -> None:
    nodes = on_nodes(8, 4)
    mixed = [0, 4, 1, 5, 2, 6, 3, 7]
    placed = first_rank_map(Layout(2, 2, 2), mixed, nodes)
    assert whole_groups(placed, nodes) == 4
    assert {nodes[w] for w in placed.workers[:2]} == {nodes[w] for w in placed.workers[4:6]}
    experts = first_rank_map(Layout(1, 2, 4, ep=4), mixed, nodes)
    assert whole_groups(experts, nodes, replicas=4) == 2
    contexts = first_rank_map(Layout(2, 2, 1, cp=2), mixed, nodes)
    assert whole_groups(contexts, nodes, replicas=2) == 2


def test_a_world_that_grows_has_the_new_pipelines_within_nodes() -> None:
    source, nodes = first_rank_map(Layout(2, 2, 2), range(8), on_nodes(8, 4)), on_nodes(16, 4)
    placed = place(TIED, source, Layout(2, 2, 4), range(16), nodes)
    layout = placed.layout
    on = {at: nodes[w] for w, at in zip(placed.workers, layout.coordinates(), strict=True)}
    assert whole_groups(placed, nodes) == 8
    assert sum(on[at] == on[at._replace(pp=0)] for at in on if at.pp == 1) == 8


def test_too_few_workers_are_refused() -> None:
    with pytest.raises(Exception, match="wants 2 workers, available are"):
        first_rank_map(Layout(2, 1, 1), [0], {})


# ---- large worlds


def test_a_large_model_is_placed_while_the_coordinator_waits() -> None:
    source, nodes = rank_map(Layout(4, 2, 8)), on_nodes(64, 8)
    began_s = time.process_time()
    placed = place(LARGE, source, Layout(8, 2, 4), range(64), nodes)
    assert sorted(placed.workers) == list(range(64))
    assert whole_groups(placed, nodes) == 8
    assert time.process_time() - began_s < 1.0  # tens of milliseconds, on a machine at rest


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout(8, 16, 32), Layout(8, 16, 31)),
        (Layout(8, 16, 32), Layout(4, 8, 127)),
        (Layout(1, 16, 256), Layout(1, 8, 511)),
    ],
)
def test_thousands_of_workers(before: Layout, after: Layout) -> None:
    nodes, source = on_nodes(4096, 8), rank_map(before)
    left = [worker for worker in range(4096) if worker // 8 != 100]
    began_s = time.process_time()
    placed = place(LARGE, source, after, left, nodes)
    assert {*placed.workers} <= {*left}
    assert whole_groups(placed, nodes) == after.pp * after.dp
    assert time.process_time() - began_s < 10.0  # about one, on a machine at rest


def test_thousands_of_workers_with_a_thousand_kinds_of_seats() -> None:
    """A node in the place of a lost one: of the pairs of a node's seats and what another node has,
    which experts make a million, few gain anything, and no others are looked at."""
    sizes = {"layers": 16, "hidden": 64, "heads": 8, "ffn_hidden": 64, "vocab_size": 64}
    config = GPTConfig(**sizes, tied_embeddings=False, experts={"number": 64, "topk": 2})
    layout = Layout(8, 16, 64, ep=64, sequence_parallel=True)
    nodes, source = on_nodes(8200, 8), rank_map(layout)
    left = [worker for worker in range(8200) if worker // 8 != 100]
    began_s = time.process_time()
    placed = place(gpt_spec(config, (16,), eps=(64,)), source, layout, left, nodes)
    moved = [old for old, new in zip(source.workers, placed.workers, strict=True) if old != new]
    assert moved == [worker for worker in range(8200) if worker // 8 == 100]
    assert time.process_time() - began_s < 20.0  # about two, on a machine at rest


def test_a_lost_node_of_many_moves_little_more_than_its_own_share() -> None:
    """The rest of the optimizer's state stays where most of it is needed."""
    model = gpt_spec(GPTConfig(layers=8, hidden=256, heads=8, ffn_hidden=512, vocab_size=512))
    source, nodes = rank_map(Layout(8, 4, 16)), on_nodes(512, 8)
    placed = place(model, source, Layout(8, 4, 15), range(8, 512), nodes)
    same = RankMap(Layout(8, 4, 15), tuple(_by_seat(source, placed.layout)))
    ours, theirs = (bytes_between_nodes(model, source, each, nodes) for each in (placed, same))
    assert ours < 0.6 * theirs


def _by_seat(source: RankMap, target: Layout) -> list[int]:
    """Whoever can keeps the seat, the lost node's seats go to the last replica's workers."""
    seats = dict(zip(source.layout.coordinates(), source.workers, strict=True))
    spare = [seats[at] for at in seats if at.replica == target.replicas]
    return [seats[at] if seats[at] >= 8 else spare.pop() for at in target.coordinates()]
