from __future__ import annotations

import pytest
from hypothesis import given

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap, ids_text
from tests.unit.layout.models import LAYOUTS, rank_map


@given(LAYOUTS)
def test_rank_and_coordinate_are_inverse(layout: Layout) -> None:
    seats = list(layout.coordinates())
    assert len(set(seats)) == layout.workers
    assert [layout.rank(seat) for seat in seats] == list(range(layout.workers))
    assert [layout.coordinate(rank) for rank in range(layout.workers)] == seats


@given(LAYOUTS)
def test_parse_reads_what_str_writes(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_rank_order_is_megatrons_tp_cp_dp_pp() -> None:
    layout = Layout(2, 2, 2, cp=2, ep=4)
    assert layout.rank(Coordinate(tp=1, pp=0, replica=0)) == 1
    assert layout.rank(Coordinate(tp=0, pp=1, replica=0)) == 8
    seats = [Coordinate(0, 0, replica) for replica in range(4)]
    assert [layout.rank(seat) for seat in seats] == [0, 2, 4, 6]
    assert [layout.cp_rank(seat) for seat in seats] == [0, 1, 0, 1]
    assert [layout.dp_rank(seat) for seat in seats] == [0, 0, 1, 1]
    assert [layout.ep_rank(seat) for seat in seats] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"ep": 4}, "ep must divide dp x cp, which is 2"),
        ({"pp": 1, "vpp": 2}, "an interleaved pipeline wants pp of at least 2"),
        ({"tp": 1, "sequence_parallel": True}, "sequence parallelism wants tp of at least 2"),
        ({"cp": 0}, "every axis must be at least 1"),
    ],
)
def test_axes_that_do_not_go_together(axes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Layout(**({"tp": 2, "pp": 2, "dp": 2} | axes))


@pytest.mark.parametrize(
    "text", ["", "tp=0", "tp=2,tp=4", "xp=2", "tp2pp1", "tp=-1", "tp=1.5", "sp=2", "tp2 sp sp"]
)
def test_parse_names_what_it_got(text: str) -> None:
    with pytest.raises(ConfigError):
        Layout.parse(text)


def test_rank_map_refuses_wrong_or_repeated_workers() -> None:
    with pytest.raises(ConfigError, match="wants 2 different workers"):
        RankMap(Layout(2, 1, 1), (3, 3))
    with pytest.raises(ConfigError, match="wants 4"):
        RankMap(Layout(2, 1, 2), (0, 1))


def test_rank_map_finds_workers_and_seats() -> None:
    seated = rank_map(Layout(2, 1, 2), first=5)
    assert seated.worker_at(Coordinate(1, 0, 1)) == 8
    assert seated.coordinate_of(8) == Coordinate(1, 0, 1)
    assert seated.coordinate_of(0) is None


@pytest.mark.parametrize(
    ("workers", "text"),
    [((), "none"), ((3,), "3"), ((2, 0, 1), "0-2"), ((0, 1, 4, 7, 6), "0-1, 4, 6-7")],
)
def test_ids_are_runs_of_ids(workers: tuple[int, ...], text: str) -> None:
    assert ids_text(workers) == text


def test_of_many_runs_of_ids_the_first_are_told() -> None:
    """As in an error of a group of 2,048 workers, which all of them send."""
    text = ids_text(range(0, 16384, 8))
    assert text.startswith("0, 8, 16, ")
    assert text.endswith(", 248, and 2016 more")


def test_a_rank_map_tells_its_order() -> None:
    assert str(RankMap(Layout(2, 1, 2), (0, 1, 3, 2))) == "tp2 pp1 dp2 on workers 0-1, 3, 2"
