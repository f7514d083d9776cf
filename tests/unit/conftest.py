"""What all unit tests are spared."""

from __future__ import annotations

import pytest

from liver_hpc.cluster.slurm.commands import SQUEUE_PACE


@pytest.fixture(autouse=True)
def hasty_squeue(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command of Slurm's is real."""
    monkeypatch.setattr(SQUEUE_PACE, "interval_s", 0.02)
