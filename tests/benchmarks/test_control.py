"""Simulated agents answer as workers do, and a handoff of some hundred of them succeeds."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.control.__main__ import main
from benchmarks.control.agents import Crossing, Worker, _groups, _peers
from benchmarks.control.runs import ManyWorkers, crossing_of, layouts_of
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.rendezvous.conversation import Conversation

pytestmark = pytest.mark.timeout(120)

WORKERS = 128


def test_a_group_has_one_who_sets_its_key() -> None:
    target = RankMap(Layout(2, 4, 2), tuple(range(16)))
    setters: defaultdict[str, list[int]] = defaultdict(list)
    members: defaultdict[str, list[int]] = defaultdict(list)
    for number in range(16):
        worker = Worker(number, Conversation(number), generation=3, target=target)
        for key, sets in _groups(worker):
            members[key].append(number)
            if sets:
                setters[key].append(number)
    assert {key: len(of) for key, of in setters.items()} == dict.fromkeys(members, 1)
    sizes = sorted(map(len, members.values()))
    # 8 tensor-parallel, 4 pipeline and 8 data-parallel, 4 embedding and 2 model-parallel groups
    assert sizes == sorted([2] * 8 + [4] * 4 + [2] * 8 + [2] * 4 + [8] * 2 + [16])


def test_who_sends_to_a_worker_is_who_it_hears() -> None:
    target, crossing = RankMap(Layout(1, 1, 16), tuple(range(16))), Crossing(3, ("main",))
    workers = [Worker(number, Conversation(number), target=target) for number in range(16)]
    sent = {(w.number, peer) for w in workers for peer in _peers(w, crossing, 1)}
    heard = {(peer, w.number) for w in workers for peer in _peers(w, crossing, -1)}
    assert sent == heard
    assert len(sent) == 3 * 16


def test_the_crossing_is_that_of_the_plan() -> None:
    crossing = crossing_of(WORKERS)
    assert crossing.kinds == ("parameter", "main", "exp_avg", "exp_avg_sq")
    assert 1 < crossing.peers < WORKERS
    assert [str(each) for each in layouts_of(WORKERS)] == ["tp8 pp16 dp1", "tp8 pp8 dp2"]


def test_a_handoff_there_and_back(tmp_path: Path) -> None:
    run = ManyWorkers(tmp_path, WORKERS)
    handoffs = [run.handoff() for _ in range(2)]
    assert all(0 < each.took_s < 60 for each in handoffs)
    assert run.sockets() == run.agents == WORKERS // 8
    run.close()


@pytest.mark.parametrize("workers", ["0", "100", "many"])
def test_a_number_of_workers_that_cannot_be_had(
    workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--workers", workers])
    assert f"wanted a multiple of 512 workers, got {workers}" in capsys.readouterr().err
