"""The CPU stand-in does what it stands for: collectives in place, Adam in one pass, no dynamo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.processes import WorkerProcess, run_workers

pytestmark = pytest.mark.timeout(180)
ELEMENTS = 12
WORKERS = 3


def _collectives(process: WorkerProcess) -> dict[str, Any]:
    import torch.distributed as dist

    members = tuple(range(WORKERS))
    group = process.transfer_group("all", members).process_group
    found: dict[str, Any] = {}

    def whole() -> torch.Tensor:
        return torch.arange(ELEMENTS, dtype=torch.float32) * (process.worker + 1)

    def part_of(values: torch.Tensor) -> torch.Tensor:
        return values.view(WORKERS, -1)[process.worker]

    apart = torch.zeros(ELEMENTS // WORKERS)
    dist.reduce_scatter_tensor(apart, whole(), group=group)
    within = whole()
    dist.reduce_scatter_tensor(part_of(within), within, group=group)
    found["reduced"] = (apart.tolist(), part_of(within).tolist())

    largest = whole()
    dist.reduce_scatter_tensor(part_of(largest), largest, op=dist.ReduceOp.MAX, group=group)
    found["largest"] = part_of(largest).tolist()

    gathered = torch.zeros(ELEMENTS)
    dist.all_gather_into_tensor(gathered, part_of(whole()).clone(), group=group)
    within = whole()
    dist.all_gather_into_tensor(within, part_of(within), group=group)
    found["gathered"] = (gathered.tolist(), within.tolist())
    return found


def test_collectives_in_place_equal_those_of_separate_tensors(tmp_path: Path) -> None:
    found = run_workers(_collectives, WORKERS, tmp_path)
    share = ELEMENTS // WORKERS
    for worker, answers in enumerate(found):
        own = [float(value) for value in range(worker * share, (worker + 1) * share)]
        assert answers["reduced"][0] == answers["reduced"][1] == [6 * value for value in own]
        assert answers["largest"] == [3 * value for value in own]
        everything = [float(value * (value // share + 1)) for value in range(ELEMENTS)]
        assert answers["gathered"][0] == answers["gathered"][1] == everything


def _adams(_process: WorkerProcess) -> list[tuple[str, list[float]]]:
    found = []
    for options in ({}, {"foreach": False}):
        parameter = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 1001))
        adam: Any = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, **options)
        for step in range(5):
            parameter.grad = torch.cos(parameter.detach() * (step + 1))
            adam.step()
        found.append((str(adam.param_groups[0]["fused"]), parameter.tolist()))
    return found


def test_adam_is_fused_unless_told_otherwise_and_is_the_same_adam(tmp_path: Path) -> None:
    ((fused, one), (plain, other)) = run_workers(_adams, 1, tmp_path)[0]
    assert (fused, plain) == ("True", "None")
    assert one == pytest.approx(other, rel=1e-5, abs=1e-7)


def _without_dynamo(_process: WorkerProcess) -> dict[str, Any]:
    import sys

    from torch.utils.checkpoint import checkpoint

    found: dict[str, Any] = {}
    layer = torch.nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(layer.parameters(), lr=1.0)
    for reentrant in (False, True):
        inputs = torch.ones(2, 3, requires_grad=True)
        checkpoint(layer, inputs, use_reentrant=reentrant).sum().backward()
        found[f"gradient {reentrant}"] = inputs.grad.tolist() == layer.weight.tolist() * 2
    before = layer.bias.item()
    optimizer.step()
    found["moved"] = before - layer.bias.item()

    @torch.compile(mode="reduce-overhead")  # type: ignore[untyped-decorator]
    def double(value: int) -> int:
        return 2 * value

    found["compiled"] = [double(4), torch.compile(abs)(-5), torch.compiler.disable(abs)(-6)]
    found["compiling"] = torch.compiler.is_compiling()
    found["real"] = "torch._dynamo.symbolic_convert" in sys.modules
    try:
        found["missing"] = torch._dynamo.no_such_thing
    except AttributeError as error:
        found["missing"] = str(error)
    return found


def test_compiling_is_the_identity_and_dynamo_is_not_imported(tmp_path: Path) -> None:
    """What torch itself asks of dynamo on the way of eager code is answered."""
    (found,) = run_workers(_without_dynamo, 1, tmp_path)
    assert "no_such_thing" in found.pop("missing")
    assert found == {
        "gradient False": True,
        "gradient True": True,
        "moved": pytest.approx(4.0),  # two inputs, twice
        "compiled": [8, 5, 6],
        "compiling": False,
        "real": False,
    }
