"""Every kind of state on its way: through handoffs, an ABORT, a checkpoint and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from liver_hpc.checkpoint.index import Checkpoint
from liver_hpc.checkpoint.newest import newest_checkpoint
from liver_hpc.checkpoint.torch_dist.files import Reader, read_table
from liver_hpc.cli.client import stop
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


def saved(checkpoint: Checkpoint, prefix: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors by their keys behind a prefix; those of all layers are one, [layer, ...]."""
    found = {}
    with Reader(checkpoint.path) as reader:
        for key, tensor in read_table(checkpoint.path).tensors.items():
            if not key.startswith(prefix) or (not prefix and key.startswith("optimizer.")):
                continue
            whole = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for box, place in tensor.chunks:
                whole[tuple(slice(a, a + n) for a, n in box)] = reader.read(place)
            found[key.removeprefix(prefix)] = whole
    return found


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
    kinds = {
        "calls": torch.int64,
        "parity": torch.bool,
        "expert_bias": torch.float32,
        "average": torch.bfloat16,
    }
    tensors = saved(checkpoint)
    for name, values in counted(calls).items():
        whole = tensors[f"decoder.layers.{name}"]
        assert (len(whole), whole.dtype) == (LAYERS, kinds[name])
        for layer in whole:
            assert sorted({float(value) for value in layer.flatten()}) == values


def frozen(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Bits of what is frozen, whole tensors."""
    tensors = saved(checkpoint)
    return {
        key: tensor.view(torch.uint8).numpy().tobytes()
        for key, tensor in tensors.items()
        if key.endswith(FROZEN)
    }


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
        model={"dtype": "bf16"}, train={"grad_reduce_in_bf16": True},
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
    trained = saved(first, "optimizer.state.exp_avg.")
    assert trained
    assert trained.keys().isdisjoint(frozen(first))
    go_on(run, pp=2)
    watch(run, lambda status: status.step >= first.index.scalars.step + 3, 60.0)
    second = stopped(run)
    further = second.index.scalars.step - first.index.scalars.step
    check_buffers(second, calls + further * GLOBAL_BATCH)
    assert frozen(second) == frozen(first)
    assert len(frozen(first)) == 2  # one of all layers, and the embedding
