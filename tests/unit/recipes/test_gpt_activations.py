"""What a rehearsal keeps, by rule; tests/integration/test_rehearsed_memory.py compares."""

from __future__ import annotations

from typing import Any

from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.gpt_activations import rehearsal_bytes
from liver_hpc.recipes.gpt_config import GPTConfig

SIZES = {"layers": 4, "hidden": 64, "ffn_hidden": 128, "heads": 4, "seq_length": 32}


def kept(layout: str, counts: tuple[int, ...], micro_batch: int = 1, **model: Any) -> int:
    config = GPTConfig.model_validate(SIZES | model)
    return rehearsal_bytes(config, Layout.parse(layout), counts, micro_batch)


def test_a_sample_more_takes_as_much_again() -> None:
    assert kept("dp1", (4,), 3) == 3 * kept("dp1", (4,))


def test_a_stage_holds_one_micro_batch_and_in_an_interleaved_pipeline_one_for_each_stage() -> None:
    small = kept("dp1", (4,), vocab_size=1)
    stage = kept("pp2", (2, 2), vocab_size=1)
    assert small * 0.4 < stage < small * 0.6
    assert kept("pp2 vpp2", (2, 2), vocab_size=1) == 2 * stage


def test_tensor_and_context_parallelism_share() -> None:
    whole = kept("dp1", (4,))
    assert whole / 2 < kept("tp2", (4,)) < whole
    assert kept("tp2 sp", (4,)) == whole // 2
    assert kept("cp2", (4,)) == whole // 2


def test_what_is_computed_again_is_not_kept() -> None:
    plain = kept("dp1", (4,), vocab_size=1)
    without_scores = kept("dp1", (4,), vocab_size=1, recompute="selective")
    boundaries = kept("dp1", (4,), vocab_size=1, recompute="full")
    assert boundaries < without_scores < plain
    assert plain / 4 < boundaries < plain / 2  # one layer is computed again at a time


def test_transformer_engine_keeps_no_scores() -> None:
    short, long = ({"implementation": "te", "seq_length": length} for length in (32, 64))
    assert kept("dp1", (4,), **long) == 2 * kept("dp1", (4,), **short)
    assert kept("dp1", (4,), seq_length=64) > 2 * kept("dp1", (4,), seq_length=32)
