"""A journal that grows, told to trackers by one process after the other."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.config.load import dump_run, load_run
from liver_hpc.config.schema import OpenMetricsSection, RunConfig
from liver_hpc.host.files import file_lock
from liver_hpc.report.derive import RunFigures, run_figures
from liver_hpc.report.store import read_run
from liver_hpc.run.actions import Record
from liver_hpc.run.codec import encode
from liver_hpc.run.entries import Entry
from liver_hpc.tracking import main
from liver_hpc.tracking.base import Mark, Point, Tracker, missing_packages
from liver_hpc.tracking.main import Following, Stands
from tests.unit.report.rows import straggler
from tests.unit.tracking.told import STARTED, append, entries, step_done


class Listening(Tracker):
    def __init__(self) -> None:
        self.told: list[Point | Mark] = []
        self.closed = False

    def take(self, what: Point | Mark) -> None:
        if isinstance(what, Point) and what.step == 13:
            raise OSError("no space left")
        self.told.append(what)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    @property
    def steps(self) -> list[int]:
        return [each.step for each in self.told if "train/loss" in getattr(each, "values", {})]


def config_of(**tracking: Any) -> RunConfig:
    values = {"train": {"steps": 9, "global_batch": 2}, "workers": {"initial": 1, "max": 1}}
    return RunConfig.model_validate({**values, "layouts": {1: {"dp": 1}}, "tracking": tracking})


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> list[Listening]:
    """Each that is opened, with where it goes on."""
    opened: list[Listening] = []

    def open_one(self: Following, name: str, told: list[Mark], stands: Stands) -> None:
        opened.append(Listening())
        self._trackers[name] = opened[-1]

    monkeypatch.setattr(Following, "_open", open_one)
    return opened


def steps(*numbers: int) -> list[Entry]:
    return entries(*(step_done(number) for number in numbers))


def test_each_process_goes_on_where_the_one_before_it_was(
    tmp_path: Path, listening: list[Listening]
) -> None:
    said: list[str] = []
    append(tmp_path, entries(STARTED))
    for first, more in ((1, (0, 1)), (3, (2, 3, 4))):
        following = Following(tmp_path, config_of(tensorboard={}), said.append)
        following.open()
        append(tmp_path, steps(*more), first)
        following.look(last=True)
        following.close()
    assert [each.steps for each in listening] == [[1, 2], [3, 4, 5]]
    assert all(each.closed for each in listening)
    assert said == []


def test_another_journal_is_told_from_its_beginning(
    tmp_path: Path, listening: list[Listening]
) -> None:
    """The one before was damaged, and is set aside."""
    for first_s, numbers in ((0.0, (0, 1, 2)), (5000.0, (1, 2))):
        (tmp_path / "journal.jsonl").unlink(missing_ok=True)
        begun = entries(STARTED)[0]._replace(at_s=first_s)
        append(tmp_path, [begun, *steps(*numbers)])
        following = Following(tmp_path, config_of(tensorboard={}), pytest.fail)
        following.open()
        following.close()
    assert [each.steps for each in listening] == [[1, 2, 3], [2, 3]]


def test_one_that_fails_is_named_once_and_told_of_no_more(
    tmp_path: Path, listening: list[Listening]
) -> None:
    said: list[str] = []
    append(tmp_path, [*entries(STARTED), *steps(*range(15))])
    following = Following(tmp_path, config_of(tensorboard={}), said.append)
    following.open()
    following.look(last=True)
    following.close()
    assert said == ["tracking.tensorboard has failed: OSError: no space left"]
    assert listening[0].steps == [*range(1, 13)]
    assert not listening[0].closed


def test_a_line_that_is_not_whole_waits_for_its_end(
    tmp_path: Path, listening: list[Listening]
) -> None:
    append(tmp_path, [*entries(STARTED), *steps(0, 1)])
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-5])
    following = Following(tmp_path, config_of(tensorboard={}), print)
    following.open()
    assert listening[0].steps == [1]
    journal.write_bytes(whole)
    following.look()
    assert listening[0].steps == [1, 2]


def test_a_journal_that_is_not_to_be_had_for_a_moment_is_read_again(
    tmp_path: Path, listening: list[Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, [*entries(STARTED), *steps(0, 1)])
    following = Following(tmp_path, config_of(tensorboard={}), pytest.fail)
    following.open()
    append(tmp_path, steps(2), 3)
    stale, opened = [OSError(116, "Stale file handle")] * 2, Path.open
    monkeypatch.setattr(main, "AGAIN_S", 0.0)

    def once(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == "journal.jsonl" and stale:
            raise stale.pop()
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", once)
    following.look()
    assert listening[0].steps == [1, 2, 3]
    assert not stale


def test_a_lock_that_is_left_of_a_lost_host_is_not_waited_for_for_ever(
    tmp_path: Path, listening: list[Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "LOCKED_S", 0.05)
    monkeypatch.setattr(main, "_die_in_time", lambda _wake: None)
    (tmp_path / "run.yaml").write_text(dump_run(config_of(tensorboard={})))
    append(tmp_path, [*entries(STARTED), *steps(0, 1)])
    wake, other_end = os.pipe()
    os.close(other_end)
    with file_lock(tmp_path / main.DIRECTORY / "lock"):
        main.follow(tmp_path, wake, pytest.fail)
    os.close(wake)
    assert listening[0].steps == [1, 2]
    assert listening[0].closed


def test_openmetrics_says_what_the_report_says(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    nodes = [{"name": name, "allocation": "main", "slots": 2} for name in ("n1", "n2")]
    told = [
        STARTED,
        *({"type": "node_granted", "node": node} for node in nodes),
        step_done(0, metrics={"accuracy": 0.5}),
        step_done(1),
        step_done(2, ended_s=104),
        ({"type": "node_straggles"}, [encode(Record(straggler("n3"))) for _ in range(2)]),
        {"type": "checkpoint_written", "step": 2, "took_s": 1.5},
        {"type": "checkpoint_failed", "step": 3, "reason": "Disk quota exceeded"},
        {"type": "node_gone", "node": "n2", "reason": "its power failed"},
    ]
    append(tmp_path, entries(*told))
    following = Following(tmp_path, config_of(openmetrics={}), pytest.fail)
    following.open()
    token = tmp_path / "tracking" / "openmetrics-token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    where = json.loads((tmp_path / "tracking" / "openmetrics.json").read_text())
    assert where["host"] == "127.0.0.1"
    request = urllib.request.Request(
        f"http://{where['host']}:{where['port']}/metrics",
        headers={"Authorization": f"Bearer {token.read_text().strip()}"},
    )
    with urllib.request.urlopen(request, timeout=10.0) as answer:
        text = answer.read().decode()
    following.close()
    assert not (tmp_path / "tracking" / "openmetrics.json").exists()
    families = {each.name: each for each in parser.text_string_to_metric_families(text)}
    values = {name: each.samples[0].value for name, each in families.items()}
    assert (values["liver_steps_done"], values["liver_train_loss"]) == (3, pytest.approx(3.8))
    assert (values["liver_checkpoint_step"], values["liver_failed_checkpoints"]) == (2, 1)
    assert values["liver_run_nodes"] == 1  # although no step has followed
    assert "liver_metric" not in values  # the last step had none
    goodput = run_figures(read_run(tmp_path)).goodput
    assert values["liver_goodput_ratio"] == pytest.approx(goodput)
    assert 0 < goodput < 1
    assert all(
        sample.labels["run"] == tmp_path.name
        for each in families.values()
        for sample in each.samples
    )
    assert {s.labels["outcome"]: s.value for s in families["liver_handoffs"].samples} == {
        "aborted": 0,
        "completed": 0,
    }
    assert [(s.labels["node"], s.value) for s in families["liver_stragglers"].samples] == [
        ("n3", 2)
    ]
    assert not any(math.isnan(value) for value in values.values())


def test_figures_that_take_long_keep_nothing_else_back(tmp_path: Path) -> None:
    openmetrics = pytest.importorskip("liver_hpc.tracking.openmetrics")
    section, derived = OpenMetricsSection(), [0]

    def figures() -> RunFigures:
        derived[0] += 1
        time.sleep(0.3)
        return run_figures(read_run(tmp_path))

    append(tmp_path, [*entries(STARTED), *steps(0, 1)])
    tracker = openmetrics.OpenMetrics(section, tmp_path, "toy", figures, dict)
    for step in (7, 8):
        tracker.take(Point(step, 1.0, {}))
        assert f'liver_steps_done{{run="toy"}} {step}.0' in tracker.text().decode()
    tracker.close()
    assert derived == [1]


def test_goodput_has_a_share_of_the_time(
    tmp_path: Path, listening: list[Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, [*entries(STARTED), *steps(0, 1)])
    following = Following(tmp_path, config_of(tensorboard={}), pytest.fail)
    following._clock = clock = FakeClock(following._next_s)
    following.open()
    figures, derived_s = following.figures(), []

    def long_figures() -> RunFigures:
        derived_s.append(clock.now_s())
        clock.advance(10.0)
        return figures

    monkeypatch.setattr(following, "figures", long_figures)
    for _ in range(300):
        following.look()
        clock.advance(1.0)
    following.look(last=True)  # trackers have 30 s to send the rest
    first_s, second_s = derived_s
    assert second_s - first_s == 210.0


def test_runs_with_one_directory_keep_their_curves_and_a_resume_goes_on_with_its_own(
    tmp_path: Path,
) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = config_of(tensorboard={"directory": str(tmp_path / "curves")})
    for name, first, more in (
        ("toy-1", 0, [*entries(STARTED), *steps(0, 1)]),
        ("toy-2", 0, [*entries(STARTED), *steps(0)]),
        ("toy-1", 3, steps(2)),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        append(tmp_path / name, more, first)
        following = Following(tmp_path / name, config, pytest.fail)
        following.open()
        following.look(last=True)
        following.close()
    told = {}
    for directory in (tmp_path / "curves").iterdir():
        found = reader.EventAccumulator(str(directory)).Reload()
        told[directory.name] = [each.step for each in found.Scalars("train/loss")]
    assert told == {"toy-1": [1, 2, 3], "toy-2": [1]}


def test_a_package_that_is_missing_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("liver_hpc.tracking.base.find_spec", lambda name: None)
    config = config_of(wandb={"project": "p"}, openmetrics={})
    assert [*missing_packages(config.tracking)] == [
        "tracking.wandb: this Python lacks the package wandb; pip install 'liver_hpc[wandb]'",
        "tracking.openmetrics: this Python lacks the package prometheus_client; "
        "pip install 'liver_hpc[openmetrics]'",
    ]
    assert [*missing_packages(config_of().tracking)] == []


def test_weights_and_biases_has_one_run_and_steps_that_are_done_again_at_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, over a second start that does steps again, one twice. W&B's own axis goes on."""
    pytest.importorskip("wandb", reason="W&B is not installed; pip install 'liver_hpc[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = config_of(wandb={"project": "p"})
    (tmp_path / "run.yaml").write_text(dump_run(config))
    append(tmp_path, entries(STARTED))
    resumed = STARTED | {"resumed": {"step": 2, "weights": False}}
    starts = ((1, steps(0, 1, 2)), (4, [*entries(resumed), *steps(2, 3, 3)]))
    for first, more in starts:
        following = Following(tmp_path, load_run(tmp_path / "run.yaml"), pytest.fail)
        following.open()
        append(tmp_path, more, first)
        following.look(last=True)
        following.close()
    files = sorted((tmp_path / "tracking" / "wandb").glob("offline-run-*/*.wandb"))
    run_id = (tmp_path / "tracking" / "run-id").read_text().strip()
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    assert [_steps_of(path) for path in files] == [
        [(1, 1), (2, 2), (3, 3)],
        [(4, 3), (5, 4), (6, 4)],
    ]


def test_weights_and_biases_finds_out_nothing_of_the_repository_around_and_of_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user's account has W&B keep the code of runs."""
    pytest.importorskip("wandb", reason="W&B is not installed; pip install 'liver_hpc[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SAVE_CODE", "true")
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    monkeypatch.chdir(tmp_path)
    committed = "-c user.name=ann -c user.email=ann@lab commit --allow-empty -m x"
    for words in ("init", "remote add origin lab:secret", committed):
        subprocess.run(["git", *words.split()], check=True)
    config = config_of(wandb={"project": "p"})
    (tmp_path / "run.yaml").write_text(dump_run(config))
    append(tmp_path, [*entries(STARTED), *steps(0)])
    following = Following(tmp_path, load_run(tmp_path / "run.yaml"), pytest.fail)
    following.open()
    following.close()
    (path,) = (tmp_path / "tracking" / "wandb").glob("offline-run-*/*.wandb")
    assert [*path.parent.glob("files/**/*.*")] == [], "files to be sent"
    told = [Record.FromString(data) for data in _records(path)]
    (run,) = (one.run for one in told if one.HasField("run"))
    assert not run.HasField("git")
    assert not [one for one in told if one.environment.executable or one.environment.args]
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


BLOCK_BYTES, FILE_HEAD_BYTES, HEAD = 32768, 7, struct.Struct("<IHB")


def _records(path: Path) -> Iterator[bytes]:
    """W&B's files are logs of LevelDB: records in blocks, in one piece or in several."""
    data, at, record = path.read_bytes(), FILE_HEAD_BYTES, b""
    while at + HEAD.size <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < HEAD.size:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, size, kind = HEAD.unpack_from(data, at)
        at += HEAD.size
        record += data[at : at + size]
        at += size
        if kind in (1, 4):  # whole, or its last piece
            yield record
            record = b""


def _steps_of(path: Path) -> list[tuple[int, int]]:
    """Of the losses in one of W&B's files: W&B's step, and ours."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for data in _records(path):
        record = Record.FromString(data)
        items = record.history.item
        values = {item.key or "/".join(item.nested_key): item.value_json for item in items}
        if "train/loss" in values:
            found.append((record.history.step.num, int(values["step"])))
    return found
