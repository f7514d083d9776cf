"""A launch through submitit, with a stand-in for the coordinator: what survives what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from liver_hpc.cli import main as cli
from liver_hpc.cli.client import stop
from liver_hpc.cli.submission import submit_run
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.load import absolute_paths
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.recipes.text_data import prefix_of, text_files
from liver_hpc.run.directory import RunDirectory, find_run, process_lives
from liver_hpc.run.outcome import Outcome
from tests.unit.config.runs import minimal, write_minimal
from tests.unit.config.test_indexed_data import write_pair
from tests.unit.standin import sitecustomize_in

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _with_the_standin(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{repository}")
    sitecustomize_in(tmp_path, repository)
    yield
    for run in Path("runs").glob("run-*"):
        end(RunDirectory(run))


@pytest.fixture
def config() -> RunConfig:
    return minimal(cluster={"kind": "local"})


def processes(run: RunDirectory) -> list[int]:
    """The job's controller, the job, and the coordinator, as far as they live."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(run.jobs_path.absolute()) in words and process_lives(process.pid):
            found.append(process.pid)
    return found


def end(run: RunDirectory) -> None:
    """Whatever a test did, no process of its run is left."""
    for pid in processes(run):
        os.kill(pid, signal.SIGKILL)
    await_end(run)


def await_end(run: RunDirectory) -> None:
    poll_until(
        lambda: not processes(run), Deadline.after(SystemClock(), LIMIT_S, f"{run} to be gone")
    )


def test_coordinator_has_a_session_of_its_own(config: RunConfig) -> None:
    run = submit_run(config)
    address, job = run.coordinator(), run.job_id()
    assert address is not None
    assert job is not None
    assert int(job) in [parent.pid for parent in psutil.Process(address.pid).parents()]
    assert os.getsid(address.pid) != os.getsid(0)
    assert os.getpgid(int(job)) != os.getpgid(0)
    assert find_run("latest", Path("runs")).path == run.path.resolve()


def test_stop_leaves_no_process(config: RunConfig) -> None:
    run = submit_run(config)
    before = processes(run)
    assert len(before) == 3
    outcome = stop(run, timeout_s=LIMIT_S)
    assert outcome.state == "stopped"
    assert not [pid for pid in before if process_lives(pid)]


def test_a_killed_job_leaves_no_controller_and_no_coordinator(config: RunConfig) -> None:
    run = submit_run(config)
    address = run.coordinator()
    assert address is not None
    os.kill(psutil.Process(address.pid).ppid(), signal.SIGKILL)
    await_end(run)
    assert run.outcome() is None


def test_a_killed_coordinator_is_followed_by_another_one(config: RunConfig) -> None:
    run = submit_run(config)
    address = run.coordinator()
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)

    def is_there() -> bool:
        another = run.coordinator()
        return another is not None and another.pid != address.pid

    deadline = Deadline.after(SystemClock(), LIMIT_S, "another coordinator")
    poll_until(is_there, deadline)
    assert stop(run, timeout_s=LIMIT_S).state == "stopped"


def test_accelerators_that_submitit_hides_are_shown_again(
    config: RunConfig, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    note = "import os; open(f'{run_directory}/seen', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    sitecustomize_in(tmp_path, repository, before=note)
    run = submit_run(config)
    assert (run.path / "seen").read_text() == "3,1"


def test_end_of_the_jobs_time_is_a_request_to_stop(
    config: RunConfig, tmp_path: Path, repository: Path
) -> None:
    sitecustomize_in(tmp_path, repository)
    run = submit_run(config)
    address = run.coordinator()
    assert address is not None
    os.kill(address.pid, signal.SIGUSR2)
    await_end(run)
    assert run.outcome() == Outcome("stopped", "its time limit, cluster.timeout_min", 7)


def test_text_is_pinned_to_what_was_prepared(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    config = minimal(cluster={"kind": "local"}, data={"text": ["a.txt"]})
    data = absolute_paths(config).data
    assert data is not None
    prefix = prefix_of(data, text_files(data))
    prefix.parent.mkdir()
    write_pair(prefix, [9])
    pinned = submit_run(config).config().data
    assert pinned is not None
    assert (pinned.text, pinned.prefix) == (None, prefix)


def test_coordinator_that_ends_at_once_is_noticed(
    config: RunConfig, tmp_path: Path, repository: Path
) -> None:
    sitecustomize_in(tmp_path, repository, before="raise SystemExit('no luck')")
    started = time.monotonic()
    with pytest.raises(LiverError, match=r"ended at once; its logs are runs/run-.*/logs"):
        submit_run(config)
    assert time.monotonic() - started < config.deadlines.boot_s / 2


def test_failed_launch_says_what_submitit_said(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "submitit.py").write_text("raise RuntimeError('no submitit today')\n")
    with pytest.raises(LiverError, match=r"submitit: RuntimeError: no submitit today; see .*log"):
        submit_run(config)
    assert not Path("runs/latest").is_symlink()


def test_interrupt_does_not_come_between_a_launch_and_its_job_id(tmp_path: Path) -> None:
    path = write_minimal(tmp_path)
    # The launching process waits for `go`, so that the interrupt comes in the middle of it.
    (tmp_path / "submitit.py").write_text(
        "import os, subprocess, sys\n"
        "if 'liver_hpc.cli.launch' in ' '.join(sys.orig_argv):\n"
        f"    open({str(tmp_path / 'launching')!r}, 'w')\n"
        f"    until = 'until test -e {tmp_path}/go; do sleep 0.05; done'\n"
        "    subprocess.run(['sh', '-c', until], check=True, timeout=60)\n"
        f"sys.path.remove({str(tmp_path)!r})\n"
        "del sys.modules['submitit']\n"
        "import submitit\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
    )
    with subprocess.Popen(
        command("submit", "--config", str(path), "--cluster", "local", "--follow"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        deadline = Deadline.after(SystemClock(), LIMIT_S, "the launch")
        poll_until((tmp_path / "launching").exists, deadline)
        assert not Path("runs/latest").is_symlink()
        os.killpg(process.pid, signal.SIGINT)
        (tmp_path / "go").touch()
        shown = rest_of(process)
    assert process.returncode == cli.EXIT_INTERRUPTED, shown
    run = find_run("latest", Path("runs"))
    assert f"interrupted; run {run} goes on; see `liver status {run}`" in shown
    deadline = Deadline.after(SystemClock(), LIMIT_S, f"the coordinator of {run}")
    poll_until(lambda: len(processes(run)) == 3, deadline)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "liver_hpc", *arguments]


def test_no_follow_prints_the_run_directory_and_ends(tmp_path: Path) -> None:
    path = write_minimal(tmp_path)
    shown = subprocess.run(
        command("submit", "--config", str(path), "--cluster", "local", "--no-follow"),
        capture_output=True,  # a run that held on to our pipes would keep this from ending
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    run = find_run("latest", Path("runs"))
    assert shown.stdout == f"runs/{run.path.name}\n"
    assert len(processes(run)) == 3


@pytest.fixture
def following(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`liver submit --follow` that has shown its first snapshot."""
    path = write_minimal(tmp_path)
    with subprocess.Popen(
        command("submit", "--config", str(path), "--cluster", "local", "--follow"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal's foreground processes, which Ctrl-C is for
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("run runs/run-")
        assert process.stdout.readline().endswith(": training\n")
        yield process
        process.kill()


def rest_of(process: subprocess.Popen[str]) -> str:
    shown, _ = process.communicate(timeout=LIMIT_S)
    return shown


def test_interrupted_follow_leaves_the_run_going(following: subprocess.Popen[str]) -> None:
    os.killpg(following.pid, signal.SIGINT)
    run = find_run("latest", Path("runs"))
    assert f"run {run} goes on; see `liver status {run}`" in rest_of(following)
    assert following.returncode == cli.EXIT_INTERRUPTED
    assert len(processes(run)) == 3


def test_follow_ends_with_the_run_and_tells_its_outcome(following: subprocess.Popen[str]) -> None:
    run = find_run("latest", Path("runs"))
    stop(run, timeout_s=LIMIT_S)
    assert rest_of(following).endswith(f"run {run}: stopped at step 7: asked to\n")
    assert following.returncode == cli.EXIT_OK


def test_follow_of_a_killed_job_fails(following: subprocess.Popen[str]) -> None:
    run = find_run("latest", Path("runs"))
    address = run.coordinator()
    assert address is not None
    os.kill(psutil.Process(address.pid).ppid(), signal.SIGKILL)
    assert f"liver: error: run {run} ended without an outcome; its logs" in rest_of(following)
    assert following.returncode == cli.EXIT_FAILED
