from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.cli import check
from liver_hpc.cli.check import check_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError
from liver_hpc.layout.budget import Budget
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.memory import fullest_worker
from liver_hpc.recipes.base import load_recipe
from tests.unit.config.runs import minimal
from tests.unit.config.test_indexed_data import write_pair
from tests.unit.layout.models import TIED


class FourHeads:
    """A recipe's word on layouts: tp divides 4 heads."""

    spec, knows_spec = TIED, True

    def check_layout(self, layout: Layout) -> None:
        if 4 % layout.tp:
            raise ConfigError(f"tp={layout.tp} does not divide 4 heads")

    def check_data(self) -> None:
        pass

    def rehearsal_bytes(self, layout: Layout) -> int:
        return 1000


def problems(config: RunConfig) -> list[str]:
    """What check_run says, without the count above several problems."""
    with pytest.raises(ConfigError) as raised:
        check_run(config, FourHeads())
    lines = str(raised.value).splitlines()
    return [line.strip() for line in (lines if len(lines) == 1 else lines[1:])]


def test_a_right_run_passes() -> None:
    check_run(minimal(cluster={"kind": "local"}), FourHeads())


def test_all_problems_are_told_at_once() -> None:
    layouts = {2: [{"dp": 2}, {"tp": 2, "pp": 2}], 3: [{"tp": 3}]}
    handoff = {"bucket_bytes": 1000, "staging_bytes": 1500}
    assert problems(minimal(layouts=layouts, handoff=handoff)) == [
        "layouts.2.1 (tp2 pp2 dp1): tp x pp x dp x cp is 4, wanted 2",
        "layouts.3.0 (tp3 pp1 dp1): tp=3 does not divide 4 heads",
        "handoff.bucket_bytes is 1000, below the smallest bucket of 65536 bytes",
        "handoff.staging_bytes is 1500, wanted at least two buckets "
        "(one to fill, one on the wire): 2 x bucket_bytes = 2000",
    ]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"layouts": {4: [{"dp": 4}]}},
         "workers.initial is 2, but layouts has no entry for 2 workers (entries: 4)"),
        ({"layouts": {}},
         "workers.initial is 2, but layouts has no entry for 2 workers (entries: none)"),
        ({"layouts": {2: [{"dp": 2}], 8: [{"dp": 8}]}},
         "layouts.8: more workers than workers.max, which is 4"),
        ({"layouts": {2: [{"dp": 2}], 4: []}}, "layouts.4: wanted at least one layout, got none"),
        ({"layouts": {2: [{"dp": 2}, {"dp": 2}]}}, "layouts.2.1 (tp1 pp1 dp2): given twice"),
        ({"train": {"steps": 9, "global_batch": 7, "micro_batch": 2}},
         "layouts.2.0 (tp1 pp1 dp2): train.global_batch 7 is not a multiple of micro_batch 2"),
        ({"train": {"steps": 9, "global_batch": 8,
                    "rampup": {"start": 1, "increment": 1, "samples": 28}}},
         "layouts.2.0 (tp1 pp1 dp2): train.rampup: global batch of step 0, 1: 1 micro-batches in "
         "the global batch are too few for dp=2"),
        ({"train": {"steps": 9, "global_batch": 8,
                    "rampup": {"start": 4, "increment": 4, "samples": 24}},
          "schedule": {"warmup_steps": 6}},
         "schedule.warmup_steps is 6, wanted less than train.steps in steps of train.global_batch "
         "samples, 6"),
        ({"schedule": {"warmup_steps": 10}},
         "schedule.warmup_steps is 10, wanted less than train.steps, 10"),
        ({"schedule": {"warmup_steps": 5, "decay_steps": 5}},
         "schedule.warmup_steps is 5, wanted less than schedule.decay_steps, 5"),
        ({"schedule": {"style": "WSD"}},
         "schedule.wsd_decay_steps is not given, wanted with schedule.style WSD, and only with it; "
         "schedule.style is WSD"),
        ({"schedule": {"wsd_decay_steps": 2}},
         "schedule.wsd_decay_steps is 2, wanted with schedule.style WSD, and only with it; "
         "schedule.style is cosine"),
        ({"schedule": {"style": "WSD", "wsd_decay_steps": 8.5, "warmup_steps": 2}},
         "schedule.wsd_decay_steps is 8.5, wanted at most what comes after the warm-up, 8"),
        ({"optimizer": {"lr": 1e-4, "min_lr": 1e-3}},
         "optimizer.min_lr is 0.001, more than optimizer.lr 0.0001"),
        ({"optimizer": {"lr": 1e-5}, "schedule": {"style": "constant"}},
         "optimizer.min_lr is 0.0001, more than optimizer.lr 1e-05"),
        ({"policy": {"memory_bytes": 64 * 2**20}},
         "policy.memory_bytes is 67108864, wanted more than handoff.staging_bytes, 67108864"),
        ({"network": {"ib_hca": "mlx5_0,,mlx5_1"}},
         "network.ib_hca: wanted names with commas between, got 'mlx5_0,,mlx5_1'"),
        ({"schedule": {"warmup_init": 0.1}},
         "schedule.warmup_init is 0.1, more than optimizer.lr 0.001"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_together(sections: dict[str, Any], said: str) -> None:
    assert said in problems(minimal(**sections))


def test_a_tracker_whose_package_is_missing_is_told_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("liver_hpc.tracking.base.find_spec", lambda name: None)
    assert problems(minimal(tracking={"tensorboard": {}})) == [
        "tracking.tensorboard: this Python lacks the package tensorboard; "
        "pip install 'liver_hpc[tensorboard]'"
    ]


def test_layouts_are_held_against_the_memory() -> None:
    """The fullest of two replicas holds more than the fuller half of a split model."""
    half = sum(fullest_worker(TIED, Layout(2, 1, 1)).values())
    run = minimal(policy={"memory_bytes": minimal().handoff.staging_bytes + half})
    (said,) = problems(run)
    assert said.startswith("layouts.2.0 (tp1 pp1 dp2): its fullest worker holds ")


def test_a_change_for_which_there_is_no_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "change_fault", lambda budget, layouts: f"{layouts[0]} to itself")
    assert problems(minimal()) == ["handoff tp1 pp1 dp2 to itself"]


def test_what_is_at_its_limit_passes() -> None:
    smallest = {"bucket_bytes": check.SMALLEST_BUCKET_BYTES}
    smallest["staging_bytes"] = 2 * smallest["bucket_bytes"]
    optimizer = {"lr": 1e-3, "min_lr": 1e-3}
    schedule = {"style": "WSD", "warmup_steps": 2, "warmup_init": 1e-3, "wsd_decay_steps": 8}
    check_run(minimal(handoff=smallest, optimizer=optimizer, schedule=schedule), FourHeads())


# ---- notices


def with_notices(*notices: dict[str, Any]) -> RunConfig:
    return minimal(notices=list(notices))


def test_notices_that_work_out() -> None:
    check_run(
        with_notices(
            {"at_step": 7, "layout": {"tp": 2}},
            {"at_step": 1, "workers": 4},
            {"at_step": 3, "replace": 3},
            {"at_step": 4, "replace": 4},
            {"at_step": 8, "workers": 2},
        ),
        FourHeads(),
    )


ALLOWED = "allowed are tp1 pp1 dp2, tp2 pp1 dp1, tp2 pp1 dp2"


@pytest.mark.parametrize(
    ("notice", "said"),
    [
        ({"at_step": 10, "workers": 4}, "the run ends at step 10, before it"),
        ({"at_step": 5, "layout": {"dp": 8}},
         "layout tp1 pp1 dp8 wants 8 workers, workers.max is 4; " + ALLOWED),
        ({"at_step": 5, "layout": {"dp": 4}}, "layout tp1 pp1 dp4 is not allowed; " + ALLOWED),
        ({"at_step": 5, "layout": {"dp": 3}}, "layout tp1 pp1 dp3 is not allowed; " + ALLOWED),
        ({"at_step": 5, "workers": 3}, "no layout of 3 workers is allowed; " + ALLOWED),
        ({"at_step": 5, "workers": 8}, "no layout of 8 workers is allowed; " + ALLOWED),
        ({"at_step": 5, "workers": 2},
         "tp1 pp1 dp2 is the layout in force by then; nothing would change"),
        ({"at_step": 5, "replace": 2}, "there is no worker 2 by then; the newest is 1"),
    ],
)  # fmt: skip
def test_notice_that_cannot_be_followed(notice: dict[str, Any], said: str) -> None:
    assert problems(with_notices(notice)) == [f"notices.0 (at step {notice['at_step']}): {said}"]


def test_notices_are_played_in_order_of_their_steps() -> None:
    later, sooner = {"at_step": 6, "workers": 4}, {"at_step": 2, "workers": 4}
    assert problems(with_notices(later, sooner)) == [
        "notices.0 (at step 6): tp2 pp1 dp2 is the layout in force by then; nothing would change"
    ]


def test_worker_replaced_twice() -> None:
    twice = with_notices({"at_step": 2, "replace": 1}, {"at_step": 3, "replace": 1})
    assert problems(twice) == ["notices.1 (at step 3): worker 1 has been replaced by then"]


# ---- data


def test_indexed_data_is_looked_at(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    write_pair(prefix, [3, 4])
    check_run(minimal(data={"prefix": prefix}), FourHeads())
    Path(f"{prefix}.bin").unlink()
    assert problems(minimal(data={"prefix": prefix})) == [
        f"data.prefix: {prefix}.bin is missing; wanted corpus.bin and .idx"
    ]


def test_each_part_of_a_blend_is_looked_at(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for prefix in (first, second):
        write_pair(prefix, [3, 4])
    blend = {"blend": [{"prefix": first, "weight": 2}, {"prefix": second}]}
    check_run(minimal(data=blend), FourHeads())
    Path(f"{second}.idx").unlink()
    assert problems(minimal(data=blend)) == [
        f"data.blend.1.prefix: {second}.idx is missing; wanted second.bin and .idx"
    ]


EVALUATED = {"every_steps": 5, "steps": 1}
SAMPLE = "a sample of 128 wants one more than that many"


@pytest.mark.parametrize(
    ("lengths", "split", "said"),
    [
        ([129], None, ""),
        ([128], None, f" has 128 tokens; {SAMPLE}"),
        ([500, 2, 500, 129], "75,25", ""),
        ([500, 2, 500, 128], "75,25", f" has 128 tokens for valid, by the split 75,25; {SAMPLE}"),
        ([100, 500], "50,50", f" has 100 tokens for train, by the split 50,50; {SAMPLE}"),
        ([1_000_000], "90,10", f" has 0 tokens for valid, by the split 90,10; {SAMPLE}"),
    ],
)
@pytest.mark.parametrize("source", ["prefix", "blend", "text"])
def test_each_share_that_is_read_has_a_sample(
    lengths: list[int], split: str | None, said: str, source: str, tmp_path: Path
) -> None:
    write_pair(tmp_path / "corpus", lengths)
    write_pair(tmp_path / "other", [500] * 10)
    for number, length in enumerate(lengths):
        (tmp_path / f"{number}.txt").write_text("x" * (length - 1))
    given: dict[str, Any] = {
        "prefix": tmp_path / "corpus",
        "blend": [{"prefix": tmp_path / name} for name in ("other", "corpus")],
        "text": [f"{tmp_path}/*.txt"],
    }
    config = minimal(
        recipe="liver_hpc.recipes.gpt:GPT",
        data={source: given[source], "split": split},
        eval=EVALUATED if split else None,
    )
    name = "data.text" if source == "text" else f"data: {tmp_path / 'corpus'}"
    found = [*check._check_data(config.data, load_recipe(config))]
    assert found == ([f"{name}{said}"] if said else [])


def test_a_share_that_nobody_reads_may_have_none(tmp_path: Path) -> None:
    write_pair(tmp_path / "corpus", [500])
    data = {"prefix": tmp_path / "corpus", "split": "90,10"}
    config = minimal(recipe="liver_hpc.recipes.gpt:GPT", data=data)
    load_recipe(config).check_data()


# ---- this machine


def test_local_run_with_more_workers_than_the_machine_carries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert check.local_workers_limit() == 12
    layouts = {2: [{"dp": 2}]}
    workers = {"initial": 2, "max": 13}
    said = problems(minimal(layouts=layouts, workers=workers, cluster={"kind": "local"}))
    assert said == [
        "workers.max is 13, but a local run on this machine may have 12 workers "
        "(the larger of 8 and 4 x 3 cores)"
    ]
    elsewhere = {"kind": "slurm", "slurm": {"components": [{"name": "main", "nodes": 13}]}}
    check_run(minimal(layouts=layouts, workers=workers, cluster=elsewhere), FourHeads())
    workers = {"initial": 2, "max": 4, "standby": 9}
    (said,) = problems(minimal(layouts=layouts, workers=workers, cluster={"kind": "local"}))
    assert said.startswith("workers.max is 4 and workers.standby 9, but a local run on this")
    workers["standby"] = 8
    check_run(minimal(layouts=layouts, workers=workers, cluster={"kind": "local"}), FourHeads())


def test_a_small_machine_carries_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert check.local_workers_limit() == 8


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (
            {"interface": "nope0"},
            r"network\.interface: node .* no interface 'nope0' that",
        ),
        ({"nccl_interface": "=lo,nope0"}, r"network\.nccl_interface: node .* no interface 'nope0'"),
        ({"ib_hca": "nope"}, r"network\.ib_hca: node .* has no active adapter port 'nope'"),
    ],
)
def test_what_this_machine_does_not_have(network: dict[str, str], said: str) -> None:
    (problem,) = problems(minimal(cluster={"kind": "local"}, network=network))
    assert re.match(said, problem)
