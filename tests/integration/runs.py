"""Whole runs on this machine, as `liver submit` starts them, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from liver_hpc.cli.client import Watch, stop
from liver_hpc.cli.submission import submit_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.report.store import RunRecords, read_run
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.outcome import Outcome
from tests.integration.replay import check_replay
from tests.integration.worlds import apart

ENDLESS = 100_000
"""Steps of a run that a test stops itself."""

_started: list[RunDirectory] = []

TINY_MODEL = {"layers": 4, "hidden": 64, "ffn_hidden": 96, "heads": 4, "query_groups": 2}
TINY_MODEL |= {"seq_length": 32, "vocab_size": 128}
SCHEDULE = {"decay_steps": 1000, "warmup_steps": 10}
LAYOUTS = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"tp": 2}, {"pp": 2}],
    4: [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"dp": 4}, {"tp": 2, "pp": 2}],
}


def run_config(tmp_path: Path, steps: int, initial: int = 2, **sections: Any) -> RunConfig:
    """A run of the tiny model under `tmp_path`; `sections` are run-file sections."""
    values: dict[str, Any] = {
        "name": "test",
        "runs_directory": str(tmp_path / "runs"),
        "recipe": "tests.integration.random_tokens:RandomTokenGPT",
        "model": TINY_MODEL,
        "train": {"steps": steps, "global_batch": 4, "micro_batch": 1},
        "schedule": SCHEDULE,  # the same however long the run is
        "workers": {"initial": initial, "max": 4},
        "layouts": LAYOUTS,
        "cluster": {"kind": "local"},
        "checkpoint": {"every_steps": None},  # else one is written after a minute
        "handoff": {"staging_bytes": 1 << 20, "bucket_bytes": 1 << 17},
        "deadlines": {"transfer_s": 20.0, "collective_s": 30.0, "heartbeat_s": 20.0},
    }
    for name, section in sections.items():
        old = values.get(name)
        merge = isinstance(old, dict) and isinstance(section, dict) and name != "layouts"
        values[name] = {**old, **section} if merge else section
    return RunConfig.model_validate(values)


def start(config: RunConfig) -> RunDirectory:
    run = submit_run(config)
    _started.append(run)
    return run


def worst_difference(
    ours: Sequence[tuple[float, float]], quiet: Sequence[tuple[float, float]]
) -> float:
    """How far `apart` all steps of ours are from those of a run that may be longer."""
    return apart(ours, quiet[: len(ours)])


def stop_and_read(run: RunDirectory) -> RunRecords:
    """Stops a run at its next step boundary; returns its records. Its journal is played again."""
    outcome = stop(run)
    assert outcome.state == "stopped", f"{outcome.reason}\n{tails(run)}"
    check_replay(run.path)
    return read_run(run.path)


def kill_started() -> None:
    """Ends what a failed test has left running."""
    while _started:
        for process in processes_of(_started.pop()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def wait_until(
    condition: Callable[[], bool], timeout_s: float, waits_for: str, interval_s: float = 0.05
) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {timeout_s:g} s for {waits_for}"
        time.sleep(interval_s)


def wait_for_end(run: RunDirectory, timeout_s: float = 300.0) -> Outcome:
    """The outcome, once it is written and the run's processes have gone."""
    wait_until(lambda: run.outcome() is not None, timeout_s, f"the end of {run}: {tails(run)}")
    outcome = run.outcome()
    assert outcome is not None
    return outcome


def finish(run: RunDirectory, timeout_s: float = 300.0) -> Any:
    """Waits for the end of a run that must finish; returns its records. Its journal, of all its
    starts, is played again."""
    outcome = wait_for_end(run, timeout_s)
    assert outcome.state == "finished", f"{outcome.reason}\n{tails(run)}"
    wait_until(lambda: not processes_of(run), 20.0, f"processes {processes_of(run)}")
    check_replay(run.path)
    return read_run(run.path)


def watch(run: RunDirectory, until: Callable[[StatusSnapshot], bool], timeout_s: float) -> None:
    """Polls the status until a snapshot satisfies `until`."""
    watcher = Watch(run)

    def seen() -> bool:
        snapshot = watcher.snapshot()
        assert snapshot is not None, f"the run ended: {run.outcome()}\n{tails(run)}"
        return until(snapshot)

    wait_until(seen, timeout_s, "the status", interval_s=0.02)
    watcher.close()


def processes_of(run: RunDirectory) -> list[psutil.Process]:
    """Live processes of this machine that name the run's directory, this one excepted."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        zombie = process.info["status"] == psutil.STATUS_ZOMBIE
        if str(run.path) in words and process.pid != os.getpid() and not zombie:
            found.append(process)
    return found


def kill_host(run: RunDirectory) -> None:
    """Kills who would start another coordinator, and with it the one that there is."""
    address = run.coordinator()
    assert address is not None
    host = psutil.Process(address.pid).parent()
    assert host is not None
    host.kill()


def tails(run: RunDirectory, lines: int = 15) -> str:
    """The ends of the run's logs, for a failure message."""
    texts = []
    for path in sorted(run.path.glob("logs/*.log")):
        end = path.read_text(errors="replace").splitlines()[-lines:]
        texts.append(f"--- {path.name}\n" + "\n".join(end))
    return "\n".join(texts)
