"""The transfers that are measured, and what of them can be known without making them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.config.schema import HandoffSection
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.placement import place
from liver_hpc.layout.plan import common_boxes, transfer_plan
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.transport.buckets import plan_buckets

LARGE = GPTConfig(layers=8, hidden=512, ffn_hidden=1408, heads=8, vocab_size=8192, seq_length=128)
"""About 30M parameters; 350 MB of state with Adam's moments."""
SMALL = GPTConfig(layers=2, hidden=64, ffn_hidden=128, heads=4, vocab_size=256, seq_length=32)


@dataclass(frozen=True)
class Transfer:
    """One handoff's bytes, all of it, between `workers` processes with ids 0 .. workers - 1."""

    name: str
    model: GPTConfig
    source: RankMap
    target: RankMap
    handoff: HandoffSection

    @property
    def workers(self) -> int:
        return len({*self.source.workers, *self.target.workers})

    def spec(self) -> ModelSpec:
        return gpt_spec(self.model)


def transfers(model: GPTConfig, handoff: HandoffSection) -> list[Transfer]:
    """One way between two; both grow and reshape among four, seated by placement."""

    def seated(name: str, source: RankMap, target: Layout) -> Transfer:
        people = place(gpt_spec(model), source, target, range(4))
        return Transfer(name, model, source, people, handoff)

    one = RankMap(Layout(1, 1, 1), (0,))
    four = RankMap(Layout(2, 1, 2), (0, 1, 2, 3))
    return [
        Transfer("replace", model, one, RankMap(Layout(1, 1, 1), (1,)), handoff),
        seated("grow", RankMap(Layout(2, 1, 1), (0, 1)), Layout(2, 1, 2)),
        seated("reshape", four, Layout(1, 2, 2)),
    ]


def pair_bytes(transfer: Transfer) -> dict[tuple[int, int], int]:
    """Bytes on the wire from each sender to each receiver, with the gaps between boxes."""
    spec = transfer.spec()
    found: dict[tuple[int, int], int] = {}
    for worker in range(transfer.workers):
        plan = transfer_plan(spec, transfer.source, transfer.target, worker)
        for bucket in plan_buckets(plan, spec.element_bytes, transfer.handoff.bucket_bytes):
            if bucket.sender == worker:
                pair = (worker, bucket.receiver)
                found[pair] = found.get(pair, 0) + bucket.num_bytes
    return found


def least_bytes(transfer: Transfer) -> int:
    """What the receivers lack: boxes that they need and do not hold. No plan is asked."""
    spec, lacking_bytes = transfer.spec(), 0
    for worker in transfer.target.workers:
        to, at = transfer.target.coordinate_of(worker), transfer.source.coordinate_of(worker)
        assert to is not None
        for kind in (PARAMETER, *spec.optimizer_kinds):
            for index in spec.held_tensors(transfer.target.layout, to):
                needed = owned_boxes(spec, transfer.target.layout, to, kind, index)
                held = (
                    owned_boxes(spec, transfer.source.layout, at, kind, index)
                    if at is not None
                    else ()
                )
                elements = sum(box.elements for box in needed)
                elements -= sum(box.elements for box in common_boxes(held, needed))
                lacking_bytes += elements * spec.element_bytes(kind, index)
    return lacking_bytes
