"""Every kind of state on its way: through handoffs, an ABORT, a checkpoint and a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from liver_hpc.checkpoint.index import Checkpoint
from liver_hpc.cli.client import stop
from liver_hpc.coordinator.checkpoints import newest_checkpoint
from liver_hpc.layout.coordinates import Layout
from liver_hpc.report.store import read_run
from liver_hpc.run.directory import RunDirectory
from tests.integration.keeping import FROZEN, LAYERS, counted
from tests.integration.runs import ENDLESS, run_config, start, tails, watch
from tests.integration.test_checkpoint import go_on

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("unhurried_steps")]

GLOBAL_BATCH = 4


def stopped(run: RunDirectory) -> Checkpoint:
    outcome = stop(run, checkpoint=True)
    assert outcome.state == "stopped", f"{outcome.reason}\n{tails(run)}"
    checkpoint = newest_checkpoint(run.path / "checkpoints")
    assert checkpoint is not None
    return checkpoint


def saved(checkpoint: Checkpoint, kind: str) -> Iterator[tuple[str, Any]]:
    """(tensor's name, box and elements) of all that a checkpoint holds of a kind."""
    for part in checkpoint.index.parts:
        with h5py.File(checkpoint.path / part.file) as file:
            for name, boxes in file.get(kind, {}).items():
                for box, dataset in boxes.items():
                    values = torch.from_numpy(dataset[...])
                    dtype = str(dataset.attrs["dtype"])
                    yield name, (box, dtype, values.view(getattr(torch, dtype)).double().numpy())


def forwards(run: RunDirectory) -> int:
    """How often each layer went forward on a worker, by the layouts of the steps."""
    records, layout, calls = read_run(run.path), Layout(1, 1, 2), 0
    changes = {r.step: r.target for r in records.reconfigurations if r.outcome == "completed"}
    for step in records.steps:
        layout = Layout.parse(changes.get(step.step, str(layout)))
        calls += GLOBAL_BATCH // layout.dp
    return calls


def check_buffers(checkpoint: Checkpoint, calls: int) -> None:
    """Every layer's are there once, with the values after so many forwards, in their dtypes."""
    dtypes = {"calls": "int64", "parity": "bool", "expert_bias": "float32", "average": "bfloat16"}
    found = {
        name: (dtype, sorted({float(value) for value in values.flatten()}))
        for name, (_, dtype, values) in saved(checkpoint, "parameter")
        if name.rpartition(".")[2] in dtypes
    }
    assert found == {
        f"decoder.layers.{layer}.{name}": (dtypes[name], values)
        for layer in range(LAYERS)
        for name, values in counted(calls).items()
    }


def frozen(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Bits of what is frozen, whole tensors."""
    whole: dict[str, Any] = {}
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.index.model.tensors}
    for name, (box, _, values) in saved(checkpoint, "parameter"):
        if name.endswith(FROZEN):
            rows, cols = (slice(*map(int, part.split(":"))) for part in box.split(","))
            whole.setdefault(name, np.full(shapes[name], 99.0))[rows, cols] = values
    return {name: tensor.tobytes() for name, tensor in whole.items()}


def test_every_kind_comes_through_an_abort_handoffs_a_checkpoint_and_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIVER_TEST_FAULT", "2:FORWARD")
    notices = [
        {"at_step": 2, "layout": {"tp": 2, "dp": 2}},
        {"at_step": 3, "layout": {"pp": 2}},
        {"at_step": 4, "layout": {"tp": 2}},
    ]
    config = run_config(
        tmp_path, ENDLESS, notices=notices, recipe="tests.integration.keeping:KeepingGPT",
        model={"dtype": "bf16"},
    )  # fmt: skip
    run = start(config)
    watch(run, lambda status: status.handoffs_done + status.handoffs_aborted == 3, 150.0)
    watch(run, lambda status: status.handoff is None, 20.0)
    first = stopped(run)
    rows = [(r.outcome, r.digest_equal) for r in read_run(run.path).reconfigurations]
    assert [row[0] for row in rows] == ["aborted", "completed", "completed"]
    assert [row[1] for row in rows[1:]] == [True, True]
    assert "rebuilt tp1 pp1 dp2" in tails(run, lines=200)
    calls = forwards(run)
    check_buffers(first, calls)
    assert {name for name, _ in saved(first, "exp_avg")}.isdisjoint(frozen(first))
    go_on(run, pp=2)
    watch(run, lambda status: status.step >= first.index.scalars.step + 3, 60.0)
    second = stopped(run)
    further = second.index.scalars.step - first.index.scalars.step
    check_buffers(second, calls + further * GLOBAL_BATCH)
    assert frozen(second) == frozen(first)
    assert len(frozen(first)) == LAYERS + 1
