"""What differs between megatron-core releases."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from liver_hpc.world import megatron

Told = list[tuple[str, float]]


def heard(monkeypatch: pytest.MonkeyPatch, router_records: bool, helper_counts: bool) -> Told:
    """What is told of a loss of experts and one of prediction by a release that has its records so:
    the router calls a function of its own or a tracker's method; the helper is told how many
    predictions were right or not."""
    told: Told = []
    router: Any = importlib.import_module("megatron.core.transformer.moe.router")
    logging: Any = types.ModuleType("megatron.core.transformer.moe.moe_logging")
    logging.MoEMetricsTracker = type("MoEMetricsTracker", (), {"record": lambda *_: None})
    monkeypatch.setitem(sys.modules, logging.__name__, logging)
    monkeypatch.setattr(router, "save_to_aux_losses_tracker", None, raising=False)
    if router_records:
        monkeypatch.delattr(router, "save_to_aux_losses_tracker")
    mtp: Any = type("MTPLossLoggingHelper", (), {"tracker": {}})
    name = "save_metrics_to_tracker" if helper_counts else "save_loss_to_tracker"
    setattr(mtp, name, staticmethod(lambda *_args, **_options: None))
    monkeypatch.setattr(megatron, MTPLossLoggingHelper.__name__, mtp)

    megatron.tell_auxiliary_losses(lambda name, loss, _group: told.append((name, float(loss))))
    loss = torch.tensor(2.0)
    if router_records:
        logging.MoEMetricsTracker().record("z_loss", loss, 1, 2)
    else:
        router.save_to_aux_losses_tracker("z_loss", loss, 1, 2)
    counts = (torch.tensor(1), torch.tensor(1)) if helper_counts else ()
    getattr(mtp, name)(loss, *counts, 0, 1, avg_group=None)
    return told


@pytest.mark.parametrize(
    ("router_records", "helper_counts"),
    [
        pytest.param(False, False, id="0.16 and 0.17"),
        pytest.param(True, False, id="0.18"),
        pytest.param(True, True, id="0.19"),
    ],
)
def test_auxiliary_losses_are_told_by_every_release(
    monkeypatch: pytest.MonkeyPatch, router_records: bool, helper_counts: bool
) -> None:
    assert heard(monkeypatch, router_records, helper_counts) == [
        ("z_loss", 2.0),
        ("mtp_1_loss", 2.0),
    ]
