"""Whole handoffs between real worlds with either memory: the same bits in the end, whatever the
precision, the experts and the digests."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transitions.pool import Pool, open_seat
from liver_hpc.layout.coordinates import Layout
from tests.integration.runs import run_config

EXPERTS = {"experts": {"number": 4}}
BF16 = {"dtype": "bf16"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp32": ("tp1 pp1 dp2", "tp1 pp2 dp1", {}),
    "bf16 with main parameters": ("tp2 pp1 dp1", "tp1 pp1 dp2", {"model": BF16}),
    "bf16, gradients too": (
        "tp1 pp1 dp2",
        "tp2 pp1 dp1",
        {"model": BF16, "train": {"grad_reduce_in_bf16": True}},
    ),
    "all taken over": ("tp1 pp1 dp2", "tp1 pp1 dp2", {"model": BF16}),
    "experts apart": ("tp1 pp1 dp2 ep2", "tp1 pp1 dp2", {"model": EXPERTS}),
    "experts, bf16, whole digests": (
        "tp1 pp2 dp1",
        "tp1 pp1 dp2 ep2",
        {"model": EXPERTS | BF16, "handoff": {"digests": "whole"}},
    ),
}


@pytest.mark.timeout(180)
def test_bounded_memory_ends_in_the_same_bits(tmp_path: Path) -> None:
    opened = partial(open_seat, tmp_path, kind="benchmarks.memory.seat:Seat")
    with Pool(2, opened) as pool:
        for name, (source, target, sections) in CASES.items():
            layouts = Layout.parse(source), Layout.parse(target)
            ends = []
            for memory in ("both", "bounded"):
                handoff = sections.get("handoff", {}) | {"memory": memory}
                config = run_config(tmp_path, 100, **sections | {"handoff": handoff})
                held = pool.call(f"hand over: {name}", 60.0, "hand_over", config, layouts)
                ends.append([(one.loss, one.digests) for one in held])
            assert ends[0] == ends[1], name
            assert ends[0][0][1], name
