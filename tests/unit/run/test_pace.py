"""Which node straggles, by what its workers tell of their forward passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.config.schema import StragglersSection
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import ForwardTimes
from liver_hpc.run.events import NodeKeepsUp, NodeStraggles
from liver_hpc.run.pace import LEAST_STEPS, StragglerWatch, paces

WINDOW_S = 5.0
STEPS = 2
"""In a window."""


def on(per_node: int) -> Mapping[int, str]:
    return {worker: f"n{worker // per_node}" for worker in range(64)}


def world_of(layout: str, generation: int = 0) -> WorldRef:
    parsed = Layout.parse(layout)
    return WorldRef(generation, RankMap(parsed, tuple(range(parsed.workers))))


@dataclass
class Told:
    """What is told window by window. slow: of some workers, the time of a pass; of others it is a
    second."""

    world: WorldRef
    per_node: int = 1
    section: StragglersSection = field(default_factory=StragglersSection)
    now_s: float = 100.0
    step: int = 0
    named: set[str] = field(default_factory=set)
    found: list[NodeStraggles | NodeKeepsUp] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.totals = dict.fromkeys(self.world.rank_map.workers, (0, 0.0))
        self.again()

    def again(self) -> None:
        """Another coordinator watches from now on."""
        self.watch = StragglerWatch(self.section, on(self.per_node).__getitem__)
        self.look()
        self.tell({})

    def look(self, paused: bool = False) -> None:
        world = None if paused else self.world
        found = self.watch.look(world, self.named, self.step, self.now_s)
        self.named |= {each.node for each in found if isinstance(each, NodeStraggles)}
        self.named -= {each.node for each in found if isinstance(each, NodeKeepsUp)}
        self.found += found

    def tell(self, slow: Mapping[int, float], silent: int | None = None) -> None:
        for worker, (passes, seconds) in self.totals.items():
            if worker == silent:
                continue
            self.totals[worker] = passes + 4, seconds + 4 * slow.get(worker, 1.0)
            generation = self.world.generation
            passes, seconds = self.totals[worker]
            told = ForwardTimes(generation=generation, passes=passes, seconds=seconds)
            self.watch.heard(worker, told)

    def windows(self, number: int, slow: Mapping[int, float]) -> list[NodeStraggles | NodeKeepsUp]:
        """What is told in so many windows."""
        before = len(self.found)
        for _ in range(number):
            self.now_s, self.step = self.now_s + WINDOW_S, self.step + STEPS
            self.tell(slow)
            self.look()
        return self.found[before:]

    def pause(self, seconds: float, generation: int | None = None) -> None:
        """A handoff, to another world where one is given."""
        self.look(paused=True)
        self.now_s += seconds
        if generation is not None:
            self.world = WorldRef(generation, self.world.rank_map)
            self.totals = dict.fromkeys(self.totals, (0, 0.0))
        self.look()
        self.tell({})


# ---- what is compared


def test_a_nodes_ratio_is_that_of_its_slowest_worker_to_its_stages_median_elsewhere() -> None:
    world = world_of("pp2 dp4").rank_map  # stage 0 is workers 0 to 3, stage 1 is 4 to 7
    pass_s = dict(zip(range(8), (1.0, 1.0, 2.0, 1.0, 3.0, 3.0, 3.0, 3.0), strict=True))
    nodes = {worker: "abcd"[worker % 4] for worker in range(8)}
    found = paces(world, pass_s, nodes.__getitem__)
    assert {node: pace.ratio for node, pace in found.items()} == {
        "a": 1.0,
        "b": 1.0,
        "c": 2.0,
        "d": 1.0,
    }
    assert found["c"].worker == 2


def test_one_slow_gpu_of_many_is_enough() -> None:
    world = world_of("dp16").rank_map
    pass_s = dict.fromkeys(range(16), 1.0) | {11: 1.7}
    found = paces(world, pass_s, on(8).__getitem__)
    assert (found["n1"].ratio, found["n1"].worker, found["n0"].ratio) == (1.7, 11, 1.0)


@pytest.mark.parametrize("layout", ["pp4", "dp1"])
def test_workers_without_a_peer_elsewhere_are_not_compared(layout: str) -> None:
    world = world_of(layout).rank_map
    assert paces(world, dict.fromkeys(world.workers, 1.0), on(1).__getitem__) == {}


def test_peers_of_the_same_node_and_nodes_without_a_name_are_none() -> None:
    world = world_of("dp4").rank_map
    pass_s = dict.fromkeys(world.workers, 1.0)
    assert paces(world, pass_s, on(4).__getitem__) == {}
    assert paces(world, pass_s, lambda _worker: "") == {}


@pytest.mark.parametrize(
    ("layout", "ratios"),
    [
        ("tp2 dp4", {"n0": 2.0, "n1": 1.0, "n2": 1.0, "n3": 1.0}),  # a group on each node
        ("tp4 dp2", {}),
        ("cp4 dp2", {}),
        ("ep2 dp8", {"n0": 2.0, "n1": 1.0, "n2": 1.0, "n3": 1.0}),
        ("ep4 dp8", {}),
    ],
)
def test_who_waits_for_another_node_in_its_passes_is_not_compared(
    layout: str, ratios: dict[str, float]
) -> None:
    world = world_of(layout).rank_map
    pass_s = dict.fromkeys(world.workers, 1.0) | {0: 2.0, 1: 2.0}
    found = paces(world, pass_s, on(2).__getitem__)
    assert {node: pace.ratio for node, pace in found.items()} == ratios


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=2, max_size=16))
def test_the_median_is_that_of_the_others(workers: list[tuple[int, int]]) -> None:
    world = world_of(f"dp{len(workers)}").rank_map
    nodes = {number: f"n{node}" for number, (node, _) in enumerate(workers)}
    pass_s = {number: float(seconds) for number, (_, seconds) in enumerate(workers)}
    found = paces(world, pass_s, nodes.__getitem__)
    for node in {*nodes.values()}:
        others = [pass_s[w] for w, its in nodes.items() if its != node]
        if not others:
            assert node not in found
            continue
        slowest = max(pass_s[w] for w, its in nodes.items() if its == node)
        assert found[node].ratio == pytest.approx(slowest / median(others))


def test_thousands_of_workers_take_no_time_that_anybody_waits_for() -> None:
    world = world_of("tp8 pp4 dp128").rank_map
    pass_s = {worker: 1.0 + worker % 7 / 100 for worker in world.workers}
    nodes = {worker: f"n{worker // 8}" for worker in world.workers}
    begun_s = time.perf_counter()
    assert len(paces(world, pass_s, nodes.__getitem__)) == 512
    assert time.perf_counter() - begun_s < 1.0


# ---- when it is named


def test_a_node_is_named_once_after_so_long_with_the_figures() -> None:
    told = Told(world_of("dp4"))
    assert told.windows(11, {2: 1.8}) == []
    (named,) = told.windows(9, {2: 1.8})
    assert isinstance(named, NodeStraggles)
    assert (named.node, named.worker, named.compared, named.for_s) == ("n2", 2, 4, 60.0)
    assert named.ratio == pytest.approx(1.8)


def test_less_than_the_factor_is_never_named() -> None:
    told = Told(world_of("dp4"))
    assert told.windows(50, {2: 1.49}) == []
    told = Told(world_of("dp4"), section=StragglersSection(factor=1.2))
    assert [each.node for each in told.windows(50, {2: 1.49})] == ["n2"]


def test_one_window_at_full_speed_begins_the_time_anew() -> None:
    told = Told(world_of("dp4"))
    told.windows(11, {2: 1.8})
    told.windows(1, {})
    assert told.windows(11, {2: 1.8}) == []
    assert len(told.windows(1, {2: 1.8})) == 1


def test_a_few_steps_at_least_however_long_they_take() -> None:
    told = Told(world_of("dp4"), section=StragglersSection(for_s=1.0))
    windows = 1 + LEAST_STEPS // STEPS
    assert told.windows(windows, {2: 3.0}) == []
    assert len(told.windows(1, {2: 3.0})) == 1


def test_a_window_lasts_until_all_have_told_of_a_pass() -> None:
    told = Told(world_of("dp4"), section=StragglersSection(for_s=1.0))
    for _ in range(20):
        told.now_s, told.step = told.now_s + WINDOW_S, told.step + STEPS
        told.tell({2: 3.0}, silent=3)
        told.look()
    assert told.found == []


def test_named_again_only_after_it_has_kept_up() -> None:
    told = Told(world_of("dp4"))
    told.windows(12, {2: 1.8})
    assert told.windows(3, {}) == []
    assert told.windows(30, {2: 1.8}) == []
    (well,) = told.windows(12, {})
    assert well == NodeKeepsUp("n2", 60.0)
    (again,) = told.windows(12, {2: 1.8})
    assert isinstance(again, NodeStraggles)


def test_of_several_the_slowest_comes_first_one_at_a_time() -> None:
    told = Told(world_of("dp8"))
    (first,) = told.windows(12, {2: 1.8, 5: 2.5})
    (second,) = told.windows(1, {2: 1.8, 5: 2.5})
    assert (first.node, second.node) == ("n5", "n2")


def test_nobody_is_named_where_more_than_half_straggle() -> None:
    """Of five nodes three take thrice as long, which for each of them is 1.5 times the median."""
    told = Told(world_of("dp5"))
    assert told.windows(50, {0: 3.0, 1: 3.0, 2: 3.0}) == []
    assert len(told.windows(13, {0: 3.0, 1: 3.0})) == 2  # of two, one after the other


def test_who_was_named_does_not_keep_up_while_more_than_half_straggle() -> None:
    told = Told(world_of("dp5"))
    told.windows(12, {0: 3.0})
    assert told.named == {"n0"}
    assert told.windows(30, {0: 3.0, 1: 3.0, 2: 3.0}) == []
    assert told.named == {"n0"}


def test_time_stands_still_while_a_handoff_is_tried() -> None:
    told = Told(world_of("dp4"))
    told.windows(11, {2: 1.8})
    told.tell({2: 9.0})  # beside what is prepared
    told.pause(1000.0)
    (named,) = told.windows(1, {2: 1.8})
    assert isinstance(named, NodeStraggles)
    assert named.for_s == 60.0
    assert named.ratio == pytest.approx(1.8)


def test_another_world_begins_anew() -> None:
    told = Told(world_of("dp4"))
    told.windows(11, {2: 1.8})
    told.pause(10.0, generation=1)
    assert told.windows(11, {2: 1.8}) == []
    assert len(told.windows(1, {2: 1.8})) == 1


def test_what_is_told_of_another_world_does_not_count() -> None:
    told = Told(world_of("dp4"), section=StragglersSection(for_s=1.0))
    for _ in range(20):
        told.now_s, told.step = told.now_s + WINDOW_S, told.step + STEPS
        told.tell({})
        passes = 10**6 + told.step
        told.watch.heard(2, ForwardTimes(generation=7, passes=passes, seconds=9.0 * passes))
        told.look()
    assert told.found == []


def test_another_coordinator_begins_anew_and_knows_who_is_named() -> None:
    told = Told(world_of("dp4"))
    told.windows(11, {2: 1.8})
    told.again()
    assert told.windows(11, {2: 1.8}) == []
    assert len(told.windows(1, {2: 1.8})) == 1
    told.again()
    assert told.windows(50, {2: 1.8}) == []


def test_without_the_section_nobody_is_named_and_without_peers_that_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "liver_hpc.run.pace")
    watch = StragglerWatch(None, on(1).__getitem__)
    watch.heard(0, ForwardTimes(generation=0, passes=1, seconds=1.0))
    assert watch.look(world_of("dp2"), (), 1, 1.0) == []
    told = Told(world_of("dp4"), per_node=4)
    told.windows(2, {2: 9.0})
    assert (told.found, caplog.text) == ([], ""), "the default asks for nothing"
    told = Told(world_of("dp4"), section=StragglersSection(for_s=1.0), per_node=4)
    told.windows(2, {2: 9.0})
    assert told.found == []
    assert caplog.text.count("no nodes can be compared") == 1
