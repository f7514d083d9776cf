"""The model and the rank maps that are planned for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.placement import first_rank_map, place
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.gpt_config import GPTConfig

STAGES = 16
TENSOR_RANKS = 8
NODE_WORKERS = 8
RESHAPED_STAGES = 9

MODEL = GPTConfig(
    layers=126,
    hidden=16384,
    ffn_hidden=53248,
    heads=128,
    query_groups=8,
    seq_length=8192,
    vocab_size=128256,
    tied_embeddings=False,
    dtype="bf16",
)
"""The shape of a 405B model; its last stage holds fewer layers, beside the output layer."""


def fresh_model() -> ModelSpec:
    """A new object each time: nothing is remembered about it."""
    return gpt_spec(MODEL, (RESHAPED_STAGES, STAGES))


@dataclass(frozen=True)
class Case:
    """One handoff of one world. Workers by rank, and their nodes, as they come in a Prepare
    message."""

    name: str
    workers: int
    source: Layout
    target: Layout
    source_workers: tuple[int, ...]
    target_workers: tuple[int, ...]
    source_nodes: tuple[int, ...]
    target_nodes: tuple[int, ...]

    def rank_maps(self) -> tuple[RankMap, RankMap]:
        """New objects each time: nothing is remembered about them."""
        return (
            RankMap(self.source, self.source_workers, self.source_nodes),
            RankMap(self.target, self.target_workers, self.target_nodes),
        )

    def place(self, model: ModelSpec) -> RankMap:
        """Seats the target's workers, as the coordinator does."""
        source, _ = self.rank_maps()
        everybody = range(max(*self.source_workers, *self.target_workers) + 1)
        return place(model, source, self.target, everybody, nodes_of(everybody))

    def sample(self, count: int) -> list[int]:
        """Workers at even distances through all that take part, the first and last included."""
        everybody = sorted({*self.source_workers, *self.target_workers})
        if count >= len(everybody):
            return everybody
        step = (len(everybody) - 1) / (count - 1)
        return [everybody[round(number * step)] for number in range(count)]


def cases(workers: int) -> Iterator[Case]:
    """Grow and shrink by one data-parallel replica, and another tp and pp at once."""
    tp = min(TENSOR_RANKS, workers // STAGES)
    source = Layout(tp, STAGES, workers // (tp * STAGES))
    replica = tp * STAGES
    yield _case("grow", source, Layout(tp, STAGES, source.dp + 1), workers + replica)
    if source.dp > 1:
        yield _case("shrink", source, Layout(tp, STAGES, source.dp - 1), workers)
    half, stages = tp // 2, RESHAPED_STAGES
    yield _case("reshape", source, Layout(half, stages, workers // (half * stages)), workers)


def nodes_of(workers: Iterable[int]) -> dict[int, int]:
    """`NODE_WORKERS` on each node, in the order of their ids."""
    return {worker: worker // NODE_WORKERS for worker in workers}


def _case(name: str, source: Layout, target: Layout, available: int) -> Case:
    nodes = nodes_of(range(available))
    people = first_rank_map(source, range(source.workers), nodes)
    seated = place(fresh_model(), people, target, range(available), nodes)
    workers, maps = source.workers, (people, seated)
    return Case(name, workers, source, target, *(m.workers for m in maps), *(m.nodes for m in maps))
