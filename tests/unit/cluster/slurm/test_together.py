"""Who was started together, from the file that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.cluster.slurm.together import note_together, own_agent, together_path, told_together
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import Seat

LAYOUT = Layout(1, 1, 1)


def test_each_task_finds_its_agent_and_a_later_coordinator_the_step(tmp_path: Path) -> None:
    path = together_path(tmp_path, "liver-a0")
    launches = [
        LaunchAgent("a0", Seat("n1", (0, 1)), LAYOUT),
        LaunchAgent("a1", Seat("n2", ()), LAYOUT),
    ]
    note_together(path, launches)
    assert own_agent(path, {"SLURMD_NODENAME": "n1"}) == ("a0", (0, 1))
    assert own_agent(path, {"SLURMD_NODENAME": "n2"}) == ("a1", ())
    note_together(together_path(tmp_path, "liver-a2"), [LaunchAgent("a2", Seat("n1", ()), LAYOUT)])
    together = ("liver-a0", {"n1": "a0", "n2": "a1"})
    alone = ("liver-a2", {"n1": "a2"})
    assert told_together(tmp_path) == {"a0": together, "a1": together, "a2": alone}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_task_on_another_node_says_what_it_wanted(tmp_path: Path) -> None:
    path = together_path(tmp_path, "liver-a0")
    note_together(path, [LaunchAgent("a0", Seat("n1", (0,)), LAYOUT)])
    with pytest.raises(LiverError, match=r"liver-a0.json: wanted .*'n7'.*, got n1"):
        own_agent(path, {"SLURMD_NODENAME": "n7"})
    path.write_text("{")
    with pytest.raises(LiverError, match="cannot be read"):
        own_agent(path, {"SLURMD_NODENAME": "n1"})


def test_what_was_started_together_is_not_taken_for_nothing_where_it_cannot_be_read(
    tmp_path: Path,
) -> None:
    assert told_together(tmp_path) == {}
    together_path(tmp_path, "liver-a0").parent.touch()
    with pytest.raises(LiverError, match="steps: which agents run where cannot be read"):
        told_together(tmp_path)
