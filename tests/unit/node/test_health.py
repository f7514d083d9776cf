"""A node's health check: its exit code counts, its last words are told, nothing of it is left."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from liver_hpc.errors import DeadlineError
from liver_hpc.host.child import Child
from liver_hpc.host.marks import marked_processes
from liver_hpc.node.health import Unhealthy, check_health

pytestmark = pytest.mark.timeout(30)


def test_a_node_that_is_well_says_nothing(tmp_path: Path) -> None:
    check_health("echo fine; test -d /", tmp_path / "health-a0.log", 20.0)
    assert (tmp_path / "health-a0.log").read_text() == "fine\n"


def test_the_last_lines_of_a_check_that_fails_are_told(tmp_path: Path) -> None:
    command = "for n in 1 2 3 4 5 6; do echo line $n; done; echo no GPU >&2; exit 3"
    with pytest.raises(
        Unhealthy, match=r"^node \S+ fails its health check \(exit code 3\): line 3 \| "
    ) as told:
        check_health(command, tmp_path / "health-a0.log", 20.0)
    assert str(told.value).endswith("line 6 | no GPU; see logs/health-a0.log")
    with pytest.raises(Unhealthy, match="it said nothing"):
        check_health("false", tmp_path / "other.log", 20.0)


def test_no_command_line_has_the_check(tmp_path: Path) -> None:
    check_health("TOKEN='a b'; tr '\\0' ' ' < /proc/$$/cmdline", tmp_path / "health.log", 20.0)
    assert "TOKEN" not in (tmp_path / "health.log").read_text()


def test_a_check_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("LIVER_TEST_MARK", mark)
    with pytest.raises(Unhealthy, match=r"\(no end in 0.5 s \(deadlines.health_s\)\): waits"):
        check_health("echo waits; setsid sleep 60", tmp_path / "health-a0.log", 0.5)
    assert marked_processes("LIVER_TEST_MARK", mark) == []


def test_a_check_that_cannot_be_killed_is_a_node_that_is_not_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(child: Child, limit_s: float) -> list[int]:
        ended(child, limit_s)
        raise DeadlineError("process 7 is stuck in the kernel")

    ended = Child.end
    monkeypatch.setattr(Child, "end", end)
    with pytest.raises(Unhealthy, match=r"no end in 0\.1 s .*; process 7 is stuck in the kernel"):
        check_health("sleep 60", tmp_path / "health-a0.log", 0.1)
