"""Large worlds in simulated time."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.gpt_spec import gpt_spec
from benchmarks.simulate.play import ControlLink
from benchmarks.simulate.scenario import Machine, Simulated, simulate
from benchmarks.simulate.timings import Timings
from benchmarks.simulate.traffic import sampled_traffic
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.memory import handoff_bytes
from liver_hpc.recipes.gpt_config import GPTConfig
from tests.unit.layout.models import TIED, rank_map

MODEL = gpt_spec(
    GPTConfig(layers=4, hidden=64, heads=4, ffn_hidden=96, vocab_size=512, tied_embeddings=False)
)
MACHINE = Machine(
    Timings(7.0, 0.5, 1.5, 0.02, 1e-9, 0.1, 1e-9, 0.2),
    ControlLink(),
    DeadlineSection(),
    worker_flops=1e9,
    batch_tokens=100_000,
    global_batch=256,
)


@pytest.fixture(scope="module", params=[264, 248])
def done(request: pytest.FixtureRequest) -> Simulated:
    return simulate(MODEL, MACHINE, Layout(2, 4, 32), request.param)


def test_no_handoff_gives_time_back(done: Simulated) -> None:
    assert done.outcome.completed
    assert done.outcome.pause_s >= MACHINE.timings.cross_s
    assert done.lost_s >= done.outcome.pause_s
    assert 0 < done.goodput(47, slowdown_s=0.2) <= 1


def test_every_worker_costs_the_same_few_messages(done: Simulated) -> None:
    workers = max(done.source.workers, done.target.workers)
    assert 6 * workers <= done.outcome.messages <= 10 * workers


def test_a_deadline_that_passes_is_told() -> None:
    short = DeadlineSection(prepare_s=0.4)
    with pytest.raises(LiverError, match="PREPARE: waited"):
        simulate(MODEL, dataclasses.replace(MACHINE, deadlines=short), Layout(2, 4, 32), 264)


def test_a_sample_of_all_counts_all_bytes() -> None:
    source, target = rank_map(Layout(2, 2, 2)), rank_map(Layout(2, 1, 4))
    assert (
        sampled_traffic(TIED, source, target, 8).moved_bytes
        == (handoff_bytes(TIED, source, target)[0])
    )
