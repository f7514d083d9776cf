"""Digests of the state that are taken beside a step which fails."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.clock import SystemClock
from liver_hpc.errors import TransferError
from liver_hpc.worker.trainer import Trainer
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.device import Device
from tests.unit.config.runs import MINIMAL, minimal


def test_they_come_to_their_end_before_the_failure_is_known() -> None:
    """As the state's memory is freed next."""
    sent: list[Any] = []
    unused: Any = None
    context = WorkerContext(
        checkpoints=Path("checkpoints"),
        worker=0,
        config=minimal(train={**MINIMAL["train"], "verify_every_steps": 1}),
        recipe=unused,
        device=Device(torch.device("cpu")),
        network=unused,
        clock=SystemClock(),
        send=sent.append,
        open_store=unused,
    )
    ended: list[str] = []

    def digests(_kinds: Any) -> tuple[()]:
        time.sleep(0.2)
        ended.append("of a state whose buffers stand")
        return ()

    recipe = SimpleNamespace(spec=SimpleNamespace(kinds=("parameter",)))
    state = SimpleNamespace(standing=lambda: SimpleNamespace(digests=digests))
    world: Any = SimpleNamespace(settle=lambda: None, recipe=recipe, state=state, generation=0)
    trainer = Trainer(context)
    trainer.step = 1
    with pytest.raises(TransferError, match="a peer is gone"), trainer._verification(world):
        raise TransferError("a peer is gone")
    assert ended == ["of a state whose buffers stand"]
    assert not sent
    with trainer._verification(world):
        pass
    assert len(ended) == 2
    assert [message.step for message in sent] == [1]
