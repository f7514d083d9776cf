"""The figures that a dry run prints."""

from __future__ import annotations

import pytest

from liver_hpc.cli.dry_run import _snapshots
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.snapshots import largest_snapshot
from liver_hpc.report.wording import bytes_text
from tests.unit.config.runs import minimal
from tests.unit.layout.models import TIED


@pytest.mark.parametrize(
    ("workers", "slots", "shares", "whose"),
    [(9, 8, 27, "those of up to 8 wards"), (12, 8, 9, "those of up to 2 wards"), (4, 2, 6, "its")],
)
def test_who_holds_more_copies_than_one_needs_more_host_memory(
    workers: int, slots: int, shares: int, whose: str
) -> None:
    layout = Layout(1, 1, workers)
    config = minimal(
        cluster={"kind": "slurm", "workers_per_node": slots},
        train={"steps": 10, "global_batch": workers},
        workers={"initial": workers, "max": workers},
        layouts={workers: [{"dp": workers}]},
        snapshots={"every_steps": 1},
    )
    total, of_what = _snapshots(config, TIED)
    share = largest_snapshot(TIED, layout)
    assert f"a worker holds up to {bytes_text(shares * share)} of" in total
    assert f"its own and {whose}" in of_what
