"""Features beside each other: any two values of two of them are together in one run at least.

Each run is reshaped live, struck or stopped in between, and reshaped again. Its losses are those
of a run that trains the same on one worker, and of which nothing else is asked.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.cli.client import Watch, request, stop
from liver_hpc.cli.submission import resume_run
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.messages import ReplaceRequest, ResizeRequest
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.report.store import RunRecords
from liver_hpc.run.directory import RunDirectory
from tests.integration.runs import (
    ENDLESS,
    finish,
    processes_of,
    run_config,
    start,
    stop_and_read,
    tails,
    wait_until,
    watch,
    worst_difference,
)
from tests.integration.test_matrix import struck
from tests.integration.test_recovery import newest

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

STEPS = 250
"""Of the runs that the others are compared with."""
LIMIT_S = 150.0

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "older": {
        "tied_embeddings": False,
        "position": "learned",
        "normalization": "layernorm",
        "activation": "gelu",
        "bias": True,
        "qk_norm": True,
    },
    "experts": {
        "experts": {
            "number": 4,
            "ffn_hidden": 40,
            "shared_ffn_hidden": 24,
            "load_balancing": "aux_loss",
            "aux_loss_coeff": 0.01,
        }
    },
    "computed again": {"recompute": "full"},
    "dropping": {"dropout": 0.1},
    "bf16": {"dtype": "bf16"},
}
TRAINS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "two at a time": {"micro_batch": 2},
    "growing batch": {"rampup": {"start": 4, "increment": 2, "samples": 60}},
    "clipped late": {"read_ahead": 0, "verify_every_steps": 3},
}
REDUCES: dict[str, dict[str, Any]] = {
    "behind": {},
    "beside": {"overlap_grad_reduce": True, "bucket_elements": 20_000},
    "both beside": {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_elements": 20_000,
    },
}
SHAPES = {
    "data": ("dp2", "dp3", "dp4"),
    "tensors": ("tp2 dp2 sp", "tp2 sp", "dp2"),
    "stages": ("pp2", "pp2 dp2", "pp2 vpp2"),
    "mixed": ("dp2", "tp2 pp2 sp", "pp2 dp2"),
    "contexts": ("cp2", "dp2 cp2", "dp2"),
}
FEATURES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "train": tuple(TRAINS),
    "reduce": tuple(REDUCES),
    "shape": tuple(SHAPES),
    "struck": ("nothing", "worker", "node", "coordinator", "in handoff", "resumed"),
    "last": ("resize", "replace"),
    "memory": ("both", "bounded"),
    "overlap": ("always", "never"),
    "take_over": (True, False),
    "digests": ("moved", "whole"),
    "direct": (True, False),
    "keep_groups": (True, False),
    "rehearsal": ("once", "again", "never"),
    "standby": (0, 1),
    "warm": (True, False),
    "snapshots": (None, 1, 2),
    "disk": (None, 3),
    "per_node": (None, 1),
}


def possible(row: Mapping[str, Any]) -> bool:
    """Of what is lost without a word somebody else has a copy; masks of dropout are those of one
    worker where tensors are whole."""
    if row.get("model") == "dropping" and row.get("shape") in ("tensors", "mixed"):
        return False
    if row.get("disk", 1) is not None:
        return True
    if row.get("struck") == "node" and (row.get("per_node", 1) is None or row.get("warm", False)):
        return False  # all may be on one: an agent that keeps a warm process has every launch
    return not (
        row.get("struck") in ("worker", "node", "in handoff") and row.get("snapshots", 1) is None
    )


def covering(seed: int = 1, tries: int = 40) -> Iterator[dict[str, Any]]:
    """Rows such that each possible pair of values is in one; greedy, the best of some at a time."""
    chance = random.Random(seed)
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(FEATURES, 2)
        for x in FEATURES[a]
        for y in FEATURES[b]
        if possible({a: x, b: y})
    }

    def pairs_of(row: Mapping[str, Any]) -> set[Any]:
        return set(itertools.combinations(((name, row[name]) for name in FEATURES), 2)) & pairs

    def attempt() -> dict[str, Any]:
        row = dict(chance.choice(sorted(pairs, key=repr)))
        for name in chance.sample(list(FEATURES), len(FEATURES)):
            if name not in row:
                values = [x for x in FEATURES[name] if possible(row | {name: x})]
                chance.shuffle(values)
                row[name] = max(values, key=lambda x: new(row, name, x))
        return row

    def new(row: Mapping[str, Any], name: str, value: Any) -> int:
        there = ((other, row[other]) for other in FEATURES if other in row)
        return sum(
            ((one, (name, value)) in pairs) or (((name, value), one) in pairs) for one in there
        )

    while pairs:
        rows = [row for row in (attempt() for _ in range(tries)) if possible(row)]
        best = max(rows, key=lambda row: len(pairs_of(row)))
        pairs -= pairs_of(best)
        yield best


def layouts_of(row: Mapping[str, Any]) -> list[str]:
    found = [Layout.parse(text) for text in SHAPES[row["shape"]]]
    if row["model"] == "experts":
        found = [replace(each, ep=2) if each.dp * each.cp % 2 == 0 else each for each in found]
    return [str(each) for each in found]


def trained(row: Mapping[str, Any]) -> dict[str, Any]:
    train = {"global_batch": 8} | TRAINS[row["train"]]
    return {"model": {"seq_length": 16} | MODELS[row["model"]], "train": train}


@cache
def quiet(model: str, train: str, directory: Path) -> RunRecords:
    sections = trained({"model": model, "train": train})
    one = {1: [{"dp": 1}]}
    run = start(run_config(directory / f"{model} {train}", STEPS, 1, **sections, layouts=one))
    return finish(run)


def config_of(row: Mapping[str, Any], directory: Path) -> Any:
    layouts = layouts_of(row)
    table: dict[int, list[Any]] = {}
    for layout in (*layouts, "dp1", "dp2", "dp3"):
        sizes = Layout.parse(layout)
        there = table.setdefault(sizes.workers, [])
        if asdict(sizes) not in there:
            there.append(asdict(sizes))
    sections = trained(row)
    sections["train"] |= REDUCES[row["reduce"]]
    return run_config(
        directory,
        ENDLESS,
        Layout.parse(layouts[0]).workers,
        **sections,
        layouts=table,
        workers={"max": 4, "warm": row["warm"], "standby": row["standby"]},
        handoff={name: row[name] for name in ("memory", "overlap", "take_over", "digests")}
        | {name: row[name] for name in ("direct", "keep_groups")}
        | {"warm_up": row["rehearsal"] != "never", "warm_up_again": row["rehearsal"] == "again"},
        snapshots={"every_steps": row["snapshots"]},
        checkpoint={"every_steps": row["disk"]},
        cluster={"kind": "local", "workers_per_node": row["per_node"]},
        policy={"retry_s": 1.0, "settle_s": 0.5},
    )


def snapshot_of(run: RunDirectory) -> StatusSnapshot:
    watcher = Watch(run)
    found: list[StatusSnapshot] = []

    def seen() -> bool:
        snapshot = watcher.snapshot()
        assert snapshot is not None, f"the run ended: {run.outcome()}\n{tails(run)}"
        found.append(snapshot)
        return True

    wait_until(seen, LIMIT_S, "a status")
    watcher.close()
    return found[-1]


def train_on(run: RunDirectory, steps: int) -> None:
    """From where it is now, or was before it was struck."""
    until = snapshot_of(run).step + steps
    watch(run, lambda status: status.step >= until and status.handoff is None, LIMIT_S)


def reshaped(run: RunDirectory, layout: str) -> None:
    """Asked for until it is there: who was lost may have been in the handoff."""
    end_s = time.monotonic() + LIMIT_S
    while (status := snapshot_of(run)).layout != layout or status.handoff is not None:
        assert time.monotonic() < end_s, f"{status}\n{tails(run)}"
        if status.handoff is None and not status.queued:
            try:
                request(run, ResizeRequest(layout=layout))
            except LiverError:
                time.sleep(0.5)
        time.sleep(0.2)


def strike(run: RunDirectory, what: str) -> None:
    if what == "coordinator":
        address = run.coordinator()
        assert address is not None
        os.kill(address.pid, signal.SIGKILL)
    elif what == "resumed":
        outcome = stop(run, checkpoint=True)
        assert outcome.state == "stopped", f"{outcome.reason}\n{tails(run)}"
        resume_run(run)
    elif what != "nothing":
        victim = snapshot_of(run).workers[-1]
        hit = struck(run.path, victim, "node" if what == "node" else "worker")
        for process in hit:
            process.send_signal(signal.SIGKILL)


def play(row: Mapping[str, Any], directory: Path) -> RunRecords:
    _first, second, third = layouts_of(row)
    run = start(config_of(row, directory))
    watch(run, lambda status: status.step >= 3, LIMIT_S)
    if row["struck"] == "in handoff":
        if row["snapshots"] is None:
            watch(run, lambda status: status.checkpointed is not None, LIMIT_S)
        request(run, ResizeRequest(layout=second))
        watch(run, lambda status: status.handoff is not None, LIMIT_S)
        time.sleep(random.Random(str(row)).uniform(0.0, 4.0))
        strike(run, "worker")
    else:
        reshaped(run, second)
        train_on(run, 2)
        strike(run, row["struck"])
    train_on(run, 4)
    reshaped(run, third)
    if row["last"] == "replace":
        train_on(run, 1)
        status = snapshot_of(run)
        victim = status.workers[0]
        request(run, ReplaceRequest(replace=victim))
        watch(run, lambda now: victim not in now.workers and now.handoff is None, LIMIT_S)
    train_on(run, 3)
    records = stop_and_read(run)
    wait_until(lambda: not processes_of(run), 20.0, f"the end of {processes_of(run)}")
    return records


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


ROWS = list(covering())


NAMES = [f"{row['model']}, {row['shape']}, {row['struck']}" for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_losses_are_those_of_one_worker(
    row: Mapping[str, Any], tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = quiet(row["model"], row["train"], directory)
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.3")
    records = play(row, tmp_path)
    bound = 5e-2 if row["model"] == "bf16" else 1e-4
    assert worst_difference(newest(records), newest(expected)) <= bound
