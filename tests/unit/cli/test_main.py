from __future__ import annotations

import io
import json
import math
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from liver_hpc import __version__
from liver_hpc.checkpoint.index import INDEX_FILE
from liver_hpc.cli import client, submission
from liver_hpc.cli import main as cli
from liver_hpc.cli.options import new_parser
from liver_hpc.cluster.slurm.replies import RUNNING, JobInfo
from liver_hpc.cluster.slurm.run_job import OwnJob, RunJob
from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.protocol.messages import (
    DrainRequest,
    ReplaceRequest,
    Reply,
    ResizeRequest,
    StopRequest,
)
from liver_hpc.report.hdf5 import read_hdf5
from liver_hpc.run.directory import RunDirectory, create_run_directory, point_latest
from liver_hpc.run.entries import JOURNAL_FILE, encode
from liver_hpc.run.outcome import WorldNote
from liver_hpc.run.records import RunRecords
from tests.unit.config.runs import minimal, write_minimal
from tests.unit.report.journals import write_journal
from tests.unit.report.rows import reconfiguration, step
from tests.unit.standin import StandIn, snapshot

COMMANDS = [
    "init", "submit", "run", "coordinate", "list", "status", "logs", "events", "resize", "replace",
    "drain", "stop", "report", "doctor", "prepare-data", "check-model", "schema",
]  # fmt: skip

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(repository))


@pytest.fixture
def run() -> RunDirectory:
    """A run directory under ./runs, without a coordinator."""
    run = create_run_directory(minimal(cluster={"kind": "slurm"}))
    point_latest(run)
    return run


@pytest.fixture
def standin(run: RunDirectory) -> Iterator[StandIn]:
    with StandIn(run.path) as standin:
        yield standin


def liver(*arguments: str) -> int:
    """The exit code of a command that runs in this process."""
    try:
        return cli.main(arguments)
    except SystemExit as exit_:  # argparse's way to end
        return int(exit_.code or 0)


# ---- the command line


def test_help_names_every_command_in_half_a_second() -> None:
    before_s = _children_cpu_s()
    shown = subprocess.run(
        [sys.executable, "-m", "liver_hpc", "--help"], capture_output=True, text=True, check=True
    ).stdout
    took_s = _children_cpu_s() - before_s  # wall time would measure the neighbours
    for command in COMMANDS:
        assert f"\n    {command}" in shown
    assert took_s < 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples_that_it_takes(command: str, capsys: Captured) -> None:
    assert liver(command, "--help") == 0
    _, _, shown = capsys.readouterr().out.partition("\nexamples:\n")
    assert shown
    for line in shown.splitlines():
        words = line.split()
        assert words[:2] == ["liver", command]
        assert new_parser().parse_args(words[1:]).command == command


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("module", ["liver_hpc.submit", "liver_hpc.cli.main"])
def test_import_loads_no_torch(module: str) -> None:
    code = (
        f"import {module}, sys\n"
        "heavy = {'torch', 'megatron', 'mpi4py', 'h5py', 'submitit', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_version(capsys: Captured) -> None:
    assert liver("--version") == 0
    assert capsys.readouterr().out == f"liver {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frob"], "invalid choice: 'frob'"),
        (["submit"], "submit wants either --config FILE or --resume RUN"),
        (["submit", "--config", "x", "--resume", "y"], "either --config FILE or --resume RUN"),
        (["submit", "--conf", "x"], "unrecognized arguments: --conf x"),
        (["submit", "--resume", "gone"], "there is no run gone"),
        (["submit", "--config", "x", "--cluster", "pbs"], "invalid choice: 'pbs'"),
        (["resize", "latest"], "one of the arguments --layout --workers is required"),
        (["resize", "latest", "--workers", "0"], "wanted a whole number of at least 1, got '0'"),
        (["resize", "latest", "--workers", "2", "--layout", "tp2"], "not allowed with argument"),
        (["resize", "latest", "--layout", "tp=x"], "layout 'tp=x': wanted tp=A,pp=B,dp=C"),
        (["replace", "latest", "--worker", "-1"], "wanted a worker id such as 3, got '-1'"),
        (["stop", "latest", "--timeout-s", "0"], "wanted a number of seconds above 0, got '0'"),
        (["stop", "latest", "--timeout-s", "nan"], "wanted a number of seconds above 0, got 'nan'"),
        (["drain", "latest", "n2", "--undo", "--within-s", "5"], "not allowed with argument"),
        (["submit", "--config", "no.yaml"], "no.yaml: there is no such file"),
        (["status", "latest"], "/runs yet; --runs-directory names another directory of runs"),
        (["status", "runs"], "there is no run runs: neither a directory, nor a name under runs"),
        (["report", "gone", "--runs-directory", "r"], "neither a directory, nor a name under r"),
        (["status", "n" * 300], f"run {'n' * 300}: File name too long"),
        (["submit", "--config", "x", "--runs-directory", "r"], "it is --set runs_directory=r"),
        (["doctor", "--set", "name=x"], "--set changes what a run file says; name one by --config"),
    ],
)
def test_bad_input_exits_2(arguments: list[str], said: str, capsys: Captured) -> None:
    assert liver(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "liver: error: " in shown.err
    assert said in shown.err


def test_python_m_submit_is_liver_submit() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "liver_hpc.submit", "--config", "no.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (shown.returncode, shown.stderr) == (
        2,
        "liver: error: no.yaml: there is no such file\n",
    )


# ---- commands to a run that trains


def test_status_prints_the_snapshot(run: RunDirectory, standin: StandIn, capsys: Captured) -> None:
    assert liver("status", "latest") == 0
    shown = capsys.readouterr().out
    for part in (run.path.name, "training", "7", "10", "tp1 pp1 dp2", "handoff done"):
        assert part in shown


@pytest.mark.parametrize("name", ["latest", "directory", "name", "absolute"])
def test_ways_to_name_a_run(
    run: RunDirectory, standin: StandIn, name: str, capsys: Captured
) -> None:
    names = {
        "latest": "latest",
        "directory": f"runs/{run.path.name}",
        "name": run.path.name,
        "absolute": str(run.path.absolute()),
    }
    assert liver("replace", names[name], "--worker", "1") == 0
    assert capsys.readouterr().out == "replacing worker 1\n"
    assert standin.requests.get(timeout=5) == ReplaceRequest(replace=1)


@pytest.mark.parametrize("layout", ["tp=2,pp=1,dp=2", "tp2 dp2"])
def test_resize_to_a_layout(standin: StandIn, layout: str, capsys: Captured) -> None:
    assert liver("resize", "latest", "--layout", layout) == 0
    assert capsys.readouterr().out == "queued\n"
    assert standin.requests.get(timeout=5) == ResizeRequest(layout="tp2 pp1 dp2")


def test_resize_to_a_number_of_workers(standin: StandIn) -> None:
    assert liver("resize", "latest", "--workers", "4") == 0
    assert standin.requests.get(timeout=5) == ResizeRequest(workers=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], DrainRequest(node="n2")),
        (["--within-s", "30"], DrainRequest(node="n2", within_s=30.0)),
        (["--undo"], DrainRequest(node="n2", undo=True)),
    ],
)
def test_drain(standin: StandIn, options: list[str], message: DrainRequest) -> None:
    assert liver("drain", "latest", "n2", *options) == 0
    assert standin.requests.get(timeout=5) == message


def test_refusal_exits_3(standin: StandIn, capsys: Captured) -> None:
    assert liver("resize", "latest", "--layout", "dp=2") == 3
    shown = capsys.readouterr()
    assert shown.err == "liver: error: the run already has layout tp1 pp1 dp2\n"


def test_no_command_prints_json_that_is_none(
    run: RunDirectory, standin: StandIn, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no NaN, which a loss may be."""
    nan = snapshot("r").model_copy(update={"loss": math.nan, "grad_norm": math.inf})
    monkeypatch.setattr("tests.unit.standin.snapshot", lambda name: nan)
    steps = [step(1, loss=math.nan, grad_norm=math.inf)]
    write_journal(run.path, RunRecords(steps, [], [], {"name": "demo"}))

    def printed(*arguments: str) -> Any:
        assert liver(*arguments) == 0
        return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    shown = printed("status", "latest", "--json")
    assert (shown["loss"], shown["grad_norm"]) == ("NaN", "Infinity")
    assert liver("status", "latest") == 0
    assert "loss nan" in capsys.readouterr().out
    (row,) = printed("report", "latest", "--json")["steps"]
    assert (row["loss"], row["grad_norm"]) == (None, None)
    standin.end("finished", "all steps done")
    assert printed("status", "latest", "--json")["state"] == "finished"


def test_stop_waits_for_the_outcome(standin: StandIn, capsys: Captured) -> None:
    ended = threading.Thread(target=standin.run, args=(30.0,))
    ended.start()
    assert liver("stop", "latest", "--timeout-s", "20") == 0
    ended.join()
    assert "stopped at step 7: asked to" in capsys.readouterr().out
    assert standin.requests.get(timeout=5) == StopRequest()


@pytest.mark.parametrize("written", [True, False])
def test_stop_with_a_checkpoint_fails_where_there_is_none(
    written: bool, run: RunDirectory, standin: StandIn
) -> None:
    if written:
        (index := run.checkpoints_path / "iter_0000007" / INDEX_FILE).parent.mkdir(parents=True)
        index.write_text("{}")
    ended = threading.Thread(target=standin.run, args=(30.0,))
    ended.start()
    assert liver("stop", "latest", "--timeout-s", "20", "--checkpoint") == (0 if written else 1)
    ended.join()


def test_stop_gives_up_at_its_deadline(
    run: RunDirectory, standin: StandIn, capsys: Captured
) -> None:
    assert liver("stop", "latest", "--timeout-s", "0.2") == 1
    assert f"waited 0.2 s for run {run} to stop" in capsys.readouterr().err


def test_stop_waits_as_long_as_the_coordinator_says(
    run: RunDirectory, standin: StandIn, capsys: Captured
) -> None:
    standin.stop_data = {"stops_within_s": 0.5}
    deadlines = {"release_s": 0.1, "exit_s": 0.1}
    (run.path / "run.yaml").write_text(dump_run(minimal(deadlines=deadlines)))
    assert liver("stop", "latest") == 1
    assert f"waited 0.7 s for run {run} to stop" in capsys.readouterr().err


def test_stop_of_a_run_whose_job_goes_on_after_it(
    run: RunDirectory, standin: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A batch script of one's own does more after `liver run`."""
    config = minimal(cluster={"kind": "slurm"}, deadlines={"exit_s": 0.1})
    (run.path / "run.yaml").write_text(dump_run(config))
    run.note_job_id("77")
    monkeypatch.setattr(RunJob, "is_over", lambda _job: False)
    ended = threading.Thread(target=standin.run, args=(30.0,))
    ended.start()
    assert liver("stop", "latest", "--timeout-s", "10") == 0
    ended.join()
    assert "stopped at step 7: asked to" in capsys.readouterr().out


def test_stop_while_another_coordinator_takes_over(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Training goes on: its job is not cancelled."""
    run.note_job_id("77")
    WorldNote(1, "tp1 pp1 dp2", 2, 0, 10, 1000.0, "slurm").write(run.path)
    standin, looks = StandIn(run.path), 0
    ends = threading.Thread(target=standin.run, args=(30.0,))

    def find(_job: RunJob) -> JobInfo | None:
        nonlocal looks
        looks += 1
        if looks == 2:
            standin.__enter__()
            ends.start()
        over = run.outcome() is not None
        return None if over else JobInfo("77", None, RUNNING, "None", ("n1",), None)

    monkeypatch.setattr(RunJob, "find", find)
    monkeypatch.setattr(RunJob, "cancel", lambda *_: pytest.fail("it was cancelled"))
    monkeypatch.setattr(client, "JOB_POLL_S", 0.02)
    assert liver("stop", "latest") == 0
    ends.join()
    standin.__exit__()
    assert "stopped at step 7: asked to" in capsys.readouterr().out


# ---- commands to a run that does not train


def test_run_that_is_over(run: RunDirectory, standin: StandIn, capsys: Captured) -> None:
    standin.end("finished", "all steps done")
    assert liver("status", "latest") == 0
    assert capsys.readouterr().out == f"run {run}: finished at step 7: all steps done\n"
    assert liver("resize", "latest", "--workers", "4") == 1
    assert f"run {run} is over: finished at step 7" in capsys.readouterr().err


def test_run_that_failed(standin: StandIn, capsys: Captured) -> None:
    standin.end("failed", "worker 1 was lost")
    assert liver("status", "latest") == 1
    assert "failed at step 7: worker 1 was lost" in capsys.readouterr().out


def test_run_without_a_coordinator(run: RunDirectory, capsys: Captured) -> None:
    assert liver("status", "latest") == 1
    assert f"run {run} has no coordinator: it is starting or ending" in capsys.readouterr().err


def test_a_process_is_waited_for_whatever_the_file_servers_clock_says(run: RunDirectory) -> None:
    config = minimal(cluster={"kind": "local"}, deadlines={"boot_s": 0.1, "derive_s": 0.1})
    (run.path / "run.yaml").write_text(dump_run(config))
    run.note_job_id(str(os.getpid()))
    os.utime(run.job_id_path, (1000.0, 1000.0))
    with pytest.raises(DeadlineError, match=r"waited 0\.2 s for the coordinator of"):
        client.await_coordinator(run)


def test_run_whose_coordinator_lives_but_has_hung_up(run: RunDirectory, capsys: Captured) -> None:
    with StandIn(run.path):
        pass
    assert liver("status", "latest") == 1
    assert "is ending; its outcome is not written yet" in capsys.readouterr().err


def test_run_whose_coordinator_was_killed(run: RunDirectory, capsys: Captured) -> None:
    with StandIn(run.path):
        pass
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = run.path / "coordinator.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": ended.pid}))
    assert liver("status", "latest") == 1
    said = capsys.readouterr().err
    assert f"run {run}: its coordinator (process " in said
    assert "is gone and left no outcome; its logs are" in said


@pytest.fixture
def elsewhere(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose job runs on another node, where nobody answers this machine."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    address = {"host": "0.0.0.0", "port": port, "pid": 1, "hostname": "n1"}
    (run.path / "coordinator.json").write_text(json.dumps(address))
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '77|77|RUNNING|None|N/A|n1|demo'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run.note_job_id("77")
    return run


def end_is_recorded(run: RunDirectory) -> None:
    end = {"type": "end", "state": "finished", "reason": "all steps are done", "step": 7}
    lines = encode(0, 1000.0, {"type": "coordinator_started"}), encode(1, 1001.0, {}, [end])
    (run.path / JOURNAL_FILE).write_bytes(b"".join(lines))


def test_run_whose_coordinator_is_not_reached(elsewhere: RunDirectory, capsys: Captured) -> None:
    assert liver("status", "latest") == 1
    said = capsys.readouterr().err
    port = json.loads((elsewhere.path / "coordinator.json").read_text())["port"]
    assert f"coordinator does not answer at 0.0.0.0:{port} (Connection refused)" in said
    assert "job 77 is RUNNING on n1; does this machine reach" in said
    assert "`network.interface`" in said


def test_a_coordinator_on_the_loopback_of_another_machine_is_asked_there(
    run: RunDirectory, standin: StandIn, capsys: Captured
) -> None:
    """Whoever listens on this machine's, at its port, is another one."""
    (run.path / "run.yaml").write_text(dump_run(minimal(cluster={"kind": "local"})))
    path = run.path / "coordinator.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hostname": "elsewhere"}))
    said = f"run {run}: its coordinator listens on 127.0.0.1 of elsewhere alone; give the command"
    for command in ("status", "stop"):
        assert liver(command, "latest") == 1
        assert capsys.readouterr().err == f"liver: error: {said} there\n"
    OwnJob(job_id="77").note(run.path)
    with pytest.raises(LiverError, match=r" there \(srun --jobid=77 --overlap \.\.\.\)$"):
        client.Watch(run).snapshot()
    assert standin.requests.empty()


def test_run_whose_coordinator_is_behind_a_firewall(
    elsewhere: RunDirectory, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nothing at all."""

    def times_out(*_: object) -> NoReturn:
        raise DeadlineError("waited 10 s for the coordinator: timed out before its proof")

    monkeypatch.setattr(client, "_open", times_out)
    for command in ("status", "stop"):
        assert liver(command, "latest") == 1
        said = capsys.readouterr().err
        assert "timed out before its proof), and job 77 is RUNNING" in said
    with pytest.raises(LiverError, match=r"`network\.interface`"):
        client.Watch(elsewhere).snapshot()


def test_a_run_whose_job_is_suspended_is_not_said_to_end(
    elsewhere: RunDirectory, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes the connection, and nobody the words."""

    def times_out(*_: object) -> NoReturn:
        raise DeadlineError("waited 10 s for the coordinator: timed out before its proof")

    monkeypatch.setattr(client, "_open", times_out)
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '77|77|SUSPENDED|None|N/A|n1|demo'\n")
    for command in ("status", "stop"):
        assert liver(command, "latest") == 1
        assert "job 77 is SUSPENDED on n1, and so is its coordinator" in capsys.readouterr().err


@pytest.mark.parametrize("waits", ["PENDING|Resources|N/A|", "CONFIGURING|None|N/A|n1"])
def test_a_coordinator_whose_node_is_gone_keeps_no_job_that_waits(
    waits: str,
    elsewhere: RunDirectory,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody refuses a connection, it times out. A job's nodes may boot for half an hour."""

    def times_out(*_: object) -> NoReturn:
        raise DeadlineError("waited 10 s for the coordinator: timed out before its proof")

    monkeypatch.setattr(client, "_open", times_out)
    answers = f"[ -e {tmp_path}/cancelled ] || echo '77|77|{waits}|demo'"
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{answers}\n")
    (tmp_path / "scancel").write_text(f"#!/bin/sh\ntouch {tmp_path}/cancelled\n")
    (tmp_path / "scancel").chmod(0o755)
    assert liver("status", "latest") == 0
    assert f"queued as job 77: {waits.partition('|')[0]}" in capsys.readouterr().out
    assert liver("stop", "latest") == 0
    assert (tmp_path / "cancelled").exists()


def test_who_follows_a_run_waits_for_the_next_coordinator(
    elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the one before answers nothing at all any more, as its node is lost."""
    waited = DeadlineError("waited 30 s for a message"), DeadlineError("timed out before its proof")
    answers = Reply(ok=True, text="", data=snapshot("demo").model_dump())
    said = iter([answers, *waited, answers])

    def answer(*_: object) -> Reply:
        if isinstance(each := next(said), DeadlineError):
            raise each
        return each

    monkeypatch.setattr(client, "JOB_POLL_S", 0.02)
    monkeypatch.setattr(client, "_open", lambda *_: io.BytesIO())
    monkeypatch.setattr(client, "_ask", answer)
    watch = client.Watch(elsewhere)
    assert watch.snapshot() == watch.snapshot()


def test_a_coordinator_that_is_slow_is_reached(
    elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_slow(*_: object) -> NoReturn:
        raise DeadlineError("waited 30 s for a message")

    monkeypatch.setattr(client, "_open", lambda *_: io.BytesIO())
    monkeypatch.setattr(client, "_ask", is_slow)
    with pytest.raises(DeadlineError, match=r"^waited 30 s for a message$"):
        client.Watch(elsewhere).snapshot()


def test_run_whose_coordinator_has_hung_up_elsewhere(
    elsewhere: RunDirectory, capsys: Captured
) -> None:
    end_is_recorded(elsewhere)
    assert liver("status", "latest") == 1
    assert "is ending; its outcome is not written yet" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [False, True])
def test_who_follows_a_run_without_reaching_it_is_told_so(
    ends: bool, elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and no more; but not of a coordinator that has hung up as it ends."""
    monkeypatch.setattr(client, "_OUTCOME_S", 0.1)
    monkeypatch.setattr(client, "JOB_POLL_S", 0.02)
    watch = client.Watch(elsewhere)
    if ends:
        end_is_recorded(elsewhere)
        assert watch.snapshot() is None
    else:
        with pytest.raises(LiverError, match=r"\(Connection refused\), and job 77 is RUNNING"):
            watch.snapshot()


def test_run_of_another_secret(run: RunDirectory, standin: StandIn, capsys: Captured) -> None:
    run.secret_path.write_text("00" * 32)
    assert liver("status", "latest") == 1
    assert "secret" in capsys.readouterr().err


def test_secret_that_others_can_read(run: RunDirectory, standin: StandIn, capsys: Captured) -> None:
    run.secret_path.chmod(0o644)
    assert liver("status", "latest") == 2
    assert "mode 0644 lets others in" in capsys.readouterr().err


def test_damaged_coordinator_file(run: RunDirectory, capsys: Captured) -> None:
    (run.path / "coordinator.json").write_text(json.dumps({"host": "127.0.0.1"}))
    assert liver("status", "latest") == 1
    assert "coordinator.json is damaged" in capsys.readouterr().err


def test_latest_names_a_run_that_is_gone(run: RunDirectory, capsys: Captured) -> None:
    latest = Path("runs/latest")
    name = os.readlink(latest)
    run.path.rename("elsewhere")
    assert liver("status", "latest") == 2
    said = f"runs/latest names {name}, which is gone; `liver list` says which runs there are"
    assert said in capsys.readouterr().err


def test_an_interrupt_says_that_nothing_was_launched(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def checks(*_of: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(submission, "checked_run", checks)
    assert liver("submit", "--config", str(write_minimal(Path()))) == 130
    assert capsys.readouterr().err == "liver: error: interrupted; nothing was launched\n"
    assert not Path("runs").exists()


def test_directory_that_is_no_run(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "other").mkdir()
    assert liver("status", "other") == 2
    assert "other is not a run directory: it has no run.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["runs_directory", "checkpoint.load", "recipe_directory"])
def test_the_home_of_a_user_that_there_is_not(key: str, capsys: Captured) -> None:
    given = f"--set={key}=~nobody-here/x"
    recipe = {"recipe": "own:Recipe"} if key == "recipe_directory" else {}
    path = write_minimal(Path(), **recipe)
    assert liver("submit", "--config", str(path), given, "--dry-run") == 2
    wanted = f"--set {key}=~nobody-here/x: there is no home directory '~nobody-here'"
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("key", ["runs_directory", "checkpoint.directory", "recipe_directory"])
@pytest.mark.parametrize("given", ["$SCRATCH/x", "/scratch/${USER}"])
def test_a_path_that_a_shell_would_expand(key: str, given: str, capsys: Captured) -> None:
    path = write_minimal(Path())
    assert liver("submit", "--config", str(path), f"--set={key}={given}", "--dry-run") == 2
    told = capsys.readouterr().err
    assert f"--set {key}={given}: '{given}': $ is not expanded here; write what it stands" in told


def test_a_directory_that_a_run_file_cannot_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    path = write_minimal(tmp_path)
    (tmp_path / "a$b").mkdir()
    monkeypatch.chdir(tmp_path / "a$b")
    assert liver("submit", "--config", str(path), "--dry-run") == 2
    assert "runs_directory: '" in capsys.readouterr().err


def test_texts_of_a_user_that_there_is_not(capsys: Captured) -> None:
    path = write_minimal(Path(), data={"text": ["~nobody-here/*.txt"]})
    assert liver("submit", "--config", str(path), "--dry-run") == 2
    assert "data.text: no file matches '" in capsys.readouterr().err


def test_the_directory_may_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    path = write_minimal(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert liver("submit", "--config", str(path), "--dry-run") == 2
    assert "the current directory: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["list"], ["--help"]])
@pytest.mark.parametrize(("taker", "code", "said"), [("", 0, ""), ("/dev/full", 1, "[Errno 28]")])
def test_output_that_nobody_takes(
    taker: str, code: int, said: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe whose reader has gone, or a disk that is full."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    if taker:
        output = os.open(taker, os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "liver_hpc", *words],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(output)
    assert ended.returncode == code
    lines = [f"liver: error: {said} No space left on device"] if said else []
    assert ended.stderr.splitlines() == lines


@pytest.mark.parametrize("words", ["list", "--help", "submit --config run.yaml --dry-run"])
def test_output_that_is_closed(words: str, tmp_path: Path) -> None:
    write_minimal(tmp_path)
    line = f"{sys.executable} -m liver_hpc {words} <&- >&-"
    ended = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# ---- run directories


def test_run_directory_is_private_and_latest_follows(run: RunDirectory) -> None:
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.secret_path.stat().st_mode & 0o777 == 0o600
    assert isinstance(run.config(), RunConfig)
    second = create_run_directory(minimal())
    assert second.path != run.path
    assert Path("runs/latest").resolve() == run.path.resolve()
    point_latest(second)
    assert Path("runs/latest").resolve() == second.path.resolve()
    assert sorted(p.name for p in Path("runs").iterdir() if p.name.startswith(".")) == []


def test_runs_directory_that_is_a_file(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "runs").write_text("")
    path = write_minimal(tmp_path)
    assert liver("submit", "--config", str(path), "--cluster", "local") == 2
    assert "runs_directory: cannot make a run in" in capsys.readouterr().err


# ---- data


def test_prepare_data_without_text(tmp_path: Path, capsys: Captured) -> None:
    assert liver("prepare-data", "--config", str(write_minimal(tmp_path))) == 2
    assert "data.text is not given" in capsys.readouterr().err


def test_text_is_prepared_once(tmp_path: Path, capsys: Captured) -> None:
    Path("a.txt").write_text("some text\n" * 100)
    path = write_minimal(tmp_path, data={"text": ["*.txt"]})
    assert liver("prepare-data", "--config", str(path)) == 0
    first = capsys.readouterr().out
    assert first.startswith(str(tmp_path / "data" / "text-"))
    assert "1 documents, 1001 tokens of uint16" in first
    made = {each.name: each.stat().st_mtime_ns for each in Path("data").glob("text-*.???")}
    assert len(made) == 2
    assert liver("prepare-data", "--config", str(path)) == 0
    assert capsys.readouterr().out == first
    again = {each.name: each.stat().st_mtime_ns for each in Path("data").glob("text-*.???")}
    assert again == made


def test_data_that_cannot_be_written(tmp_path: Path, capsys: Captured) -> None:
    Path("a.txt").write_text("some text\n")
    Path("data").write_text("in the way")
    path = write_minimal(tmp_path, data={"text": ["a.txt"]})
    assert liver("prepare-data", "--config", str(path)) == 2
    assert "cannot be written: " in capsys.readouterr().err


# ---- the report


def test_report(run: RunDirectory, capsys: Captured) -> None:
    write_journal(run.path, RunRecords([step(1)], [reconfiguration()], [], {"name": "demo"}))
    assert liver("report", "latest") == 0
    shown = capsys.readouterr().out
    assert "Reconfigurations" in shown
    assert liver("report", "latest", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {"steps", "reconfigurations", "baselines"} <= document.keys()
    wanted = {
        "generation", "source", "target", "notice", "pause_s", "cost_s", "lost_s", "lost_steps",
        "slowdown_s", "reconfiguration_s", "bytes_moved", "bytes_local", "digest_equal", "outcome",
    }  # fmt: skip
    assert wanted <= document["reconfigurations"][0].keys()


def test_report_into_files(run: RunDirectory, tmp_path: Path, capsys: Captured) -> None:
    write_journal(run.path, RunRecords([step(1)], [], [], {"name": "demo"}))
    options = ("--html", "r.html", "--png", "plots", "--hdf5", "m.h5")
    assert liver("report", "latest", *options) == 0
    assert capsys.readouterr().out.split() == ["r.html", "plots/training.png", "m.h5"]
    assert read_hdf5(tmp_path / "m.h5").steps == [step(1)]
    assert "<strong>1 step</strong>" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--json", "--html", "r.html"], "--json prints"),
        (["--baselines", "r.json"], "needs --html or --png"),
        (["--html", "r.html", "--baselines", "gone.json"], "gone.json: there is no such file"),
        (["--html", "gone/r.html"], "gone/r.html cannot be written"),
        (["--hdf5", "gone/m.h5"], "gone/m.h5 cannot be written: No such file"),
        (["--json", "--hdf5", "m.h5"], "--json prints"),
    ],
)
def test_report_into_files_that_cannot_be(
    run: RunDirectory, options: list[str], said: str, capsys: Captured
) -> None:
    write_journal(run.path, RunRecords([], [], [], {}))
    assert liver("report", "latest", *options) == 2
    assert said in capsys.readouterr().err


def test_report_of_a_run_without_figures(run: RunDirectory, capsys: Captured) -> None:
    assert liver("report", "latest") == 2
    assert "metrics.h5: there is no such file; nothing was recorded yet" in capsys.readouterr().err
