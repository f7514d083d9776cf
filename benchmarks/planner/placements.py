"""`layouts: auto` and placement at size; how far placement is from the best where that is known.

The best is found pair by pair, from the boxes of the ownership functions (exact.py).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

from benchmarks.gpt_spec import gpt_spec
from benchmarks.planner.cases import MODEL, NODE_WORKERS, Case
from benchmarks.planner.exact import bytes_between_nodes, least_bytes_between_nodes
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.candidates import resolve_layouts
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.placement import first_rank_map, place
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.gpt_config import GPTConfig

MEMORY_BYTES = 120 * 2**30
"""What a worker of 141 GB has for its state."""
SMALL = GPTConfig(
    layers=8, hidden=64, ffn_hidden=96, heads=8, vocab_size=256, tied_embeddings=False, dtype="bf16"
)
TPS, PPS, NODES = (1, 2, 4, 8), (1, 2, 4), (2, 3, 4, 6)


def resolve_s(workers: int) -> float:
    """CPU seconds of `layouts: auto` for a 405B model on nodes of eight; its spec is by rule."""
    model = gpt_spec(MODEL)
    component = {"name": "main", "nodes": workers // NODE_WORKERS, "gpus_per_node": NODE_WORKERS}
    config = RunConfig.model_validate(
        {
            "train": {"steps": 1, "global_batch": 2048},
            "workers": {"initial": workers, "max": workers},
            "layouts": "auto",
            "cluster": {"kind": "slurm", "slurm": {"components": [component]}},
            "policy": {"memory_bytes": MEMORY_BYTES},
        }
    )
    began_s = time.process_time()
    resolve_layouts(config, model, model.check_layout)
    return time.process_time() - began_s


def place_s(case: Case, model: ModelSpec) -> float:
    """CPU seconds in which a case's target is seated."""
    began_s = time.process_time()
    case.place(model)
    return time.process_time() - began_s


def distances(count: int) -> Iterator[float]:
    """Of so many handoffs of a small model, drawn with a fixed seed: bytes between nodes over the
    least. The source's seats are placed or drawn, and any of the workers may be lost of which the
    target does not need all, as long as its groups still find room on nodes."""
    model, draw = gpt_spec(SMALL), random.Random(1)
    while count:
        size, nodes = draw.choice((2, 4, 8)), draw.choice(NODES)
        source, target = (_layout(draw, size, size * nodes) for _ in range(2))
        workers = range(size * nodes)
        on = {worker: worker // size for worker in workers}
        available = sorted(draw.sample(workers, draw.randint(target.workers, len(workers))))
        if sum(Counter(map(on.get, available))[node] // target.tp for node in range(nodes)) < (
            target.workers // target.tp
        ):
            continue
        people = first_rank_map(source, workers[: source.workers], on)
        if draw.random() < 0.5:
            people = RankMap(source, tuple(draw.sample(workers, source.workers)))
        least = least_bytes_between_nodes(model, people, target, available, on)
        between = bytes_between_nodes(
            model, people, place(model, people, target, available, on), on
        )
        yield between / least if least else 1.0 + between
        count -= 1


def _layout(draw: random.Random, node: int, most: int) -> Layout:
    tp = draw.choice([size for size in TPS if size <= node])
    pp = draw.choice([size for size in PPS if tp * size <= most])
    return Layout(tp, pp, draw.randint(max(1, most // (2 * tp * pp)), most // (tp * pp)))
