"""The stream's benchmark: what it counts without sending, and one small run."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from benchmarks.stream.__main__ import SMALL_HANDOFF, durations_s, main
from benchmarks.stream.process import PeakMemory, Report, Span
from benchmarks.stream.transfers import SMALL, Transfer, least_bytes, pair_bytes, transfers
from benchmarks.transitions.pool import forking
from liver_hpc.layout.memory import handoff_bytes
from tests.unit.layout.models import state_bytes

ALL = transfers(SMALL, SMALL_HANDOFF)


@pytest.mark.parametrize("transfer", ALL, ids=lambda transfer: transfer.name)
def test_the_bound_is_what_the_plan_moves_and_the_wire_adds_gaps_only(transfer: Transfer) -> None:
    least = least_bytes(transfer)
    assert least == handoff_bytes(transfer.spec(), transfer.source, transfer.target)[0]
    assert least <= sum(pair_bytes(transfer).values()) < 1.05 * least


def test_a_replacement_moves_the_whole_state() -> None:
    assert least_bytes(ALL[0]) == state_bytes(ALL[0].spec())


def test_a_repeat_lasts_from_the_first_start_to_the_last_end() -> None:
    one = Report((Span("transfer", 1.0, 2.0), Span("raw whole", 5.0, 5.5)), 0, 0, 0)
    two = Report((Span("transfer", 1.5, 4.0), Span("raw whole", 5.25, 5.5)), 0, 0, 0)
    assert durations_s([one, two]) == {
        "transfer": [3.0],
        "digested": [],
        "raw whole": [0.5],
        "raw buckets": [],
    }


def test_peak_memory_sees_what_was_freed_again() -> None:
    with PeakMemory(torch.device("cpu")) as memory:
        held = bytearray(64 << 20)
        held[:: 1 << 12] = b"x" * len(range(0, len(held), 1 << 12))
        for _ in range(20):
            sum(held[: 1 << 18])
        del held
    assert 60 << 20 < memory.extra_bytes < 100 << 20


@pytest.mark.timeout(180)
def test_the_quick_run_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that are forked here, which spares each of them the import of torch."""
    context = forking()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _how: context)
    assert main(["--quick", "--json", str(tmp_path / "r.json")]) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert set(written["figures"]) == {
        "link_share",
        "link_share_digested",
        "memory_over_budget",
        "bytes_over_bound",
    }
    assert written["figures"]["link_share"] > 0
    assert 1 <= written["figures"]["bytes_over_bound"] < 1.05
    assert [row["transfer"] for row in written["rows"]] == ["replace", "grow", "reshape"]
