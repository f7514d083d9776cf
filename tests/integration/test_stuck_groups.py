"""Who waits in a group for a peer that is silent is freed from outside, and who computes for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.errors import TransferError
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.random_tokens import tiny_recipe
from tests.integration.toys import build_world

GIVES_UP_S, AT_ONCE_S = 20.0, 1.0


def _wait_in_groups(process: WorkerProcess) -> dict[str, float]:
    """The first worker waits in two groups that the second one is in, and never comes. How long it
    waited, by group, when its second world was aborted in vain and in earnest."""
    import torch

    from liver_hpc.world.groups import GroupBook

    book = GroupBook(1, process.worker, process.device)
    kept = book.group((0, 1))
    book.connect(process.network, process.store, GIVES_UP_S)
    target = GroupBook(2, process.worker, process.device)
    target.group((0, 1))
    own = target.group((1, 0))
    target.connect(process.network, process.store, GIVES_UP_S, previous=book)
    waited_s = {}
    ones = torch.ones(1000, device=process.device.torch_device)
    if process.worker == 0:
        timers = [threading.Timer(at_s, target.abort, (at_s > 1,)) for at_s in (0.5, 2.0)]
        for timer in timers:
            timer.start()
        for name, group in (("own", own), ("kept", kept)):
            began_s = time.monotonic()
            try:
                group.process_group.allreduce([ones]).wait()
                process.device.synchronize()  # a late device waits, not the host
            except RuntimeError:
                pass
            waited_s[name] = time.monotonic() - began_s
    process.store.add("done", 1)
    while process.store.add("done", 0) < 2:
        time.sleep(0.02)
    target.close()
    book.close()
    return waited_s


def test_an_abort_frees_whoever_waits_for_a_silent_peer(tmp_path: Path) -> None:
    """In a group that the source world has, too, only when that is to be built again."""
    waited_s, _ = run_workers(_wait_in_groups, 2, tmp_path)
    assert 0.4 < waited_s["own"] < 0.5 + AT_ONCE_S
    assert 1.0 < waited_s["kept"] < 1.5 + AT_ONCE_S


def test_a_world_whose_groups_are_aborted_computes_no_further_micro_batch(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe()
    world = build_world(recipe, device)
    plain, computed = recipe.loss, []

    def loss(model: Any, samples: Any) -> Any:
        computed.append(len(samples))
        if len(computed) == 2:
            world.book.abort(shared=True)
        return plain(model, samples)

    monkeypatch.setattr(recipe, "loss", loss)
    with pytest.raises(TransferError, match=f"generation {world.generation} were aborted"):
        world.forward_backward(0)
    assert len(computed) == 2
    world.close()
